"""The precision of weight matrices: as stored, or quantised while loading; and the bytes that a
pass reads of them, which determine its time for few rows."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError
from slipstream.kernels.experts import Routing
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.float8 import ToFloat8
from slipstream.kernels.formats.int4 import ToInt4
from slipstream.kernels.formats.int8 import ToInt8
from slipstream.kernels.formats.mxfp4 import ToMxfp4
from slipstream.kernels.formats.nvfp4 import ToNvfp4
from slipstream.kernels.formats.weight import Rounding, Weight
from slipstream.kernels.ops import Ops
from slipstream.layers.layer import BuildContext, build_layers
from slipstream.layers.parameters import FusedExperts, ParameterSource, Part
from slipstream.layers.rope import RopeTables
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.parameter_sources import TensorSource
from slipstream.models.quantized.module import StoredQuantization
from slipstream.models.quantized.source import (
    QuantizedSource,
    RandomQuantizedSource,
    stored_rounding,
)

logger = logging.getLogger("slipstream")

# (name, columns) of a matrix -> its quantisation method, or None
FormOf = Callable[[str, int], Rounding | None]

_MOST_NUMBERS = 1 << 60  # of a matrix: torch counts bytes in 64 bits
NOWHERE = torch.device("meta")  # the device of tensors with shapes but no data


@dataclass(frozen=True)
class Precision:
    """The meaning of a value of `quantization`.

    Attributes:
        matrix, head: quantisation methods; logits need more bits. None: the head is unquantised.
    """

    matrix: Rounding
    head: Rounding | None

    @property
    def words(self) -> str:
        if self.head == self.matrix:
            return self.matrix.words
        head = "stays as it is" if self.head is None else f"becomes {self.head.words}"
        return f"{self.matrix.words}; the head {head}"


PRECISIONS: Final = {
    "fp8": Precision(ToFloat8(), ToFloat8()),
    "int8": Precision(ToInt8(), ToInt8()),
    "int8-dynamic": Precision(ToInt8(rounds_input=True), ToInt8()),
    "int4": Precision(ToInt4(32), ToInt8()),
    "int4-g128": Precision(ToInt4(128), ToInt8()),
    "int4-asym": Precision(ToInt4(32, zeros=True), ToInt8()),
    "int4-g128-asym": Precision(ToInt4(128, zeros=True), ToInt8()),
    "mxfp4": Precision(ToMxfp4(), None),
    "nvfp4": Precision(ToNvfp4(), None),
}


def names_stored_form(quantization: str, stored: StoredQuantization) -> bool:
    """Whether `quantization` names the four-bit floats in which a checkpoint stores all matrices
    that it quantises: then its other matrices are meant to stay as they are, too."""
    precision = PRECISIONS[quantization]
    return precision.head is None and stored.kinds == {precision.matrix.weight}


class PreparedSource:
    """Parameters packed for a backend, and quantised first if a precision is given.

    Each matrix is prepared when it is read, so that only one at a time is in memory twice. Tables,
    vectors and matrices that are stored quantised are not changed; a tied head becomes a second,
    quantised copy of the table.
    """

    def __init__(self, tensors: TensorSource, precision: Precision | None, ops: Ops) -> None:
        self._tensors, self._precision, self._ops = tensors, precision, ops
        self._odd_columns: set[int] = set()

    def matrix(self, parts: Sequence[Part], columns: int) -> Weight:
        found = self._as_stored(parts, columns)
        order = _order(parts, found.shape[0])
        found = found if order is None else found.select(order)
        if self._precision is None or parts[0].exact:
            return self._ops.pack(found)
        form = self._precision.matrix.for_columns(found.shape[1])
        bits = None if form is None else form.bits
        if found.floats is not None and bits != self._precision.matrix.bits:
            self._log_odd_columns(parts[0].name, found.shape[1], bits)
        return self._prepared(found, form)

    def alike(self, parts: Sequence[Part]) -> bool:
        if self._precision is not None and len({part.exact for part in parts}) > 1:
            return False
        stored = self._tensors
        if isinstance(stored, QuantizedSource | RandomQuantizedSource):
            return stored.alike(parts)
        return True

    def head(self, parts: Sequence[Part], columns: int) -> Weight:
        return self.tied(self._as_stored(parts, columns))

    def table(self, parts: Sequence[Part], columns: int) -> DenseMatrix:
        if isinstance(self._tensors, QuantizedSource):
            return self._tensors.floats(parts, columns)
        return DenseMatrix(self._tensors.matrix(parts, columns))

    def embedding(self, parts: Sequence[Part], columns: int) -> Weight:
        if isinstance(self._tensors, QuantizedSource):
            return self._ops.pack(self._tensors.embedding(parts, columns))
        return DenseMatrix(self._tensors.matrix(parts, columns))

    def tied(self, table: Weight) -> Weight:
        return self._prepared(table, None if self._precision is None else self._precision.head)

    def vector(self, parts: Sequence[Part]) -> Tensor:
        vector = self._tensors.vector(parts)
        order = _order(parts, len(vector))
        return vector if order is None else vector[order]

    def _as_stored(self, parts: Sequence[Part], columns: int) -> Weight:
        if isinstance(self._tensors, QuantizedSource | RandomQuantizedSource):
            return self._tensors.weight(parts, columns)
        return DenseMatrix(self._tensors.matrix(parts, columns))

    def _prepared(self, matrix: Weight, form: Rounding | None) -> Weight:
        if form is not None and matrix.floats is not None:
            matrix = self._ops.round(matrix.floats, form)
        return self._ops.pack(matrix)

    def _log_odd_columns(self, name: str, columns: int, bits: int | None) -> None:
        """Log once for each number of columns that is no multiple of a group."""
        if columns not in self._odd_columns:
            self._odd_columns.add(columns)
            logger.info(
                "%s has %d columns, no multiple of a group of four-bit numbers: it and all "
                "matrices of this width are %s",
                name,
                columns,
                "not quantised" if bits is None else f"rounded to int{bits}",
            )


def _order(parts: Sequence[Part], held: int) -> Tensor | None:
    """[held]: the index in the stored order of each row as it is used, for the `held` rows of these
    parts on this rank; None: the orders are equal."""
    if all(part.paired is None for part in parts):
        return None
    ranks = sum(part.rows for part in parts) // held
    orders, start = [], 0
    for part in parts:
        rows = part.rows // ranks
        order = torch.arange(rows) if part.paired is None else part.paired.order(rows)
        orders.append(start + order)
        start += rows
    return torch.cat(orders)


def in_precision(tensors: TensorSource, quantization: str | None, ops: Ops) -> ParameterSource:
    """Make parameters for a backend; `quantization` is a key of `PRECISIONS`, or None for none."""
    return PreparedSource(tensors, PRECISIONS[quantization] if quantization else None, ops)


def weight_bytes(
    config: DecoderConfig,
    dtype: torch.dtype,
    quantization: str | None,
    stored: FormOf | None = None,
) -> int:
    """Bytes of a network's matrices and tables, which are nearly all of its bytes.

    Args:
        quantization: a key of `PRECISIONS`; None: nothing is quantised.
        stored: the format in which the checkpoint stores a matrix of this name and number of
            columns; None: all are unquantised.
    """
    precision = PRECISIONS[quantization] if quantization else None
    total = sum(matrix.nbytes for matrix in layer_matrices(config, dtype, quantization, stored))
    table = config.vocab_size * config.hidden_size
    total += table * dtype.itemsize
    if not config.tie_word_embeddings or (precision is not None and precision.head is not None):
        # The head gets a separate matrix, even if it is tied to the embedding.
        total += head_bytes(config, dtype, quantization)
    return int(total)


@dataclass(frozen=True)
class MatrixBytes:
    """The size of a matrix of a network's layers.

    Attributes:
        experts: number of experts in it, of which a row uses a few; 1: every row uses all of it.
    """

    nbytes: float
    experts: int


def layer_matrices(
    config: DecoderConfig,
    dtype: torch.dtype,
    quantization: str | None,
    stored: FormOf | None = None,
) -> Iterator[MatrixBytes]:
    """All matrices of the layers; arguments as in `weight_bytes`."""
    precision = PRECISIONS[quantization] if quantization else None
    shapes = Shapes()
    layer = BuildContext(shapes, config.hidden_size, RopeTables(1, NOWHERE))
    build_layers(config.layers, layer)
    for table in shapes.tables:
        yield MatrixBytes(table.shape.numel() * dtype.itemsize, 1)
    for part, rows, columns in shapes.matrices:
        form = None if stored is None else stored(part.name, columns)
        if form is None and precision is not None and not part.exact:
            form = precision.matrix.for_columns(columns)
        each = dtype.itemsize if form is None else form.bytes_per_number
        experts = part.fused.experts if isinstance(part.fused, FusedExperts) else 1
        yield MatrixBytes(rows * columns * each, experts)


def head_bytes(config: DecoderConfig, dtype: torch.dtype, quantization: str | None) -> float:
    form = PRECISIONS[quantization].head if quantization else None
    each = dtype.itemsize if form is None else form.bytes_per_number
    return config.vocab_size * config.hidden_size * each


class Shapes:
    """A source of parameters without data, which records matrices by their first parts."""

    def __init__(self) -> None:
        self.matrices: list[tuple[Part, int, int]] = []
        self.tables: list[Tensor] = []

    def matrix(self, parts: Sequence[Part], columns: int) -> Weight:
        weight = _unfilled(parts, columns)
        self.matrices.append((parts[0], *weight.shape))
        return weight

    def alike(self, parts: Sequence[Part]) -> bool:
        """Always False, so that each matrix is recorded."""
        return False

    def head(self, parts: Sequence[Part], columns: int) -> Weight:
        return self.matrix(parts, columns)

    def table(self, parts: Sequence[Part], columns: int) -> DenseMatrix:
        table = _unfilled(parts, columns)
        self.tables.append(table.values)
        return table

    def embedding(self, parts: Sequence[Part], columns: int) -> DenseMatrix:
        return self.table(parts, columns)

    def tied(self, table: Weight) -> Weight:
        return table

    def vector(self, parts: Sequence[Part]) -> Tensor:
        return torch.empty(sum(part.rows for part in parts), device=NOWHERE)


def _unfilled(parts: Sequence[Part], columns: int) -> DenseMatrix:
    rows = sum(part.rows for part in parts)
    if rows * columns > _MOST_NUMBERS:
        raise CheckpointError(
            f"{parts[0].name} is part of a matrix of {rows} x {columns} numbers; correct the sizes "
            "in config.json"
        )
    return DenseMatrix(torch.empty((rows, columns), device=NOWHERE))


def expected_experts(routing: Routing, rows: int) -> float:
    """The expected number of distinct experts in a layer, if rows choose independently."""
    share = routing.num_chosen / routing.num_experts
    return routing.num_experts * (1.0 - (1.0 - share) ** rows)


def pass_bytes(
    config: DecoderConfig,
    rows: int,
    dtype: torch.dtype,
    quantization: str | None = None,
    stored: StoredQuantization | None = None,
    experts: float | None = None,
) -> float:
    """Bytes of the matrices that a pass with this number of rows reads, including the head.

    Args:
        quantization: a key of `PRECISIONS`; None: nothing is quantised.
        stored: how a quantised checkpoint stores them.
        experts: number of distinct experts in a layer; None: `expected_experts`.
    """
    form = None if stored is None else partial(stored_rounding, stored)
    routing = config.routing
    total = head_bytes(config, dtype, quantization)
    for matrix in layer_matrices(config, dtype, quantization, form):
        touched = 1.0
        if routing is not None and matrix.experts > 1:
            touched = expected_experts(routing, rows) if experts is None else experts
        total += matrix.nbytes * touched / matrix.experts
    return total
