"""The precision that matrices are multiplied in: as they are stored, or rounded to fewer bits."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.float8 import ToFloat8
from slipstream.kernels.formats.int4 import GROUPS, ToInt4
from slipstream.kernels.formats.int8 import ToInt8
from slipstream.kernels.formats.weight import Rounding, Weight
from slipstream.kernels.table import Ops
from slipstream.layers.parameters import ParameterSource, Part
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.parameter_sources import TensorSource
from slipstream.models.quantized.source import QuantizedSource

logger = logging.getLogger("slipstream")


@dataclass(frozen=True)
class Precision:
    """What `quantization` names.

    Attributes:
        matrix, head: what they are rounded to; a head's logits are worth more bits.
        words: of the matrices, for the log.
    """

    matrix: Rounding
    head: Rounding
    words: str


def _four_bits(group: int, zeros: bool) -> Precision:
    words = f"four bits in groups of {group}{' with zeros' if zeros else ''}, the head to int8"
    return Precision(ToInt4(group, zeros), ToInt8(), words)


PRECISIONS: Final = {
    "fp8": Precision(ToFloat8(), ToFloat8(), "fp8"),
    "int8": Precision(ToInt8(), ToInt8(), "int8"),
    "int8-dynamic": Precision(
        ToInt8(rounds_input=True), ToInt8(), "int8, activations too except at the head"
    ),
    "int4": _four_bits(32, zeros=False),
    "int4-g128": _four_bits(128, zeros=False),
    "int4-asym": _four_bits(32, zeros=True),
    "int4-g128-asym": _four_bits(128, zeros=True),
}


class Unquantized:
    """Every parameter as it is stored."""

    def __init__(self, tensors: TensorSource) -> None:
        self._tensors = tensors

    def matrix(self, parts: Sequence[Part], columns: int) -> Weight:
        return _as_stored(self._tensors, parts, columns)

    def head(self, parts: Sequence[Part], columns: int) -> Weight:
        return _as_stored(self._tensors, parts, columns)

    def table(self, parts: Sequence[Part], columns: int) -> DenseMatrix:
        return DenseMatrix(self._tensors.matrix(parts, columns))

    def tied(self, table: Weight) -> Weight:
        return table

    def vector(self, parts: Sequence[Part]) -> Tensor:
        return self._tensors.vector(parts)


class Rounded:
    """Matrices rounded as soon as they are there: only one is ever in memory unrounded.

    Tables and vectors stay, and matrices that are stored in fewer bits already; a head that is tied
    to a table becomes a second, rounded copy of it.
    """

    def __init__(
        self,
        tensors: TensorSource,
        precision: Precision,
        round_matrix: Callable[[Tensor, Rounding], Weight],
    ) -> None:
        self._tensors, self._precision, self._round = tensors, precision, round_matrix
        self._odd_columns: set[int] = set()

    def matrix(self, parts: Sequence[Part], columns: int) -> Weight:
        found = _as_stored(self._tensors, parts, columns)
        if found.floats is None:
            return found
        columns = found.shape[1]  # of which a rank may have a share
        form = self._precision.matrix.for_columns(columns)
        if form.bits != self._precision.matrix.bits:
            self._tell(parts, columns)
        return self._round(found.floats, form)

    def head(self, parts: Sequence[Part], columns: int) -> Weight:
        found = _as_stored(self._tensors, parts, columns)
        return found if found.floats is None else self.tied(found)

    def table(self, parts: Sequence[Part], columns: int) -> DenseMatrix:
        return DenseMatrix(self._tensors.matrix(parts, columns))

    def tied(self, table: Weight) -> Weight:
        assert table.floats is not None, "a table is not rounded"
        return self._round(table.floats, self._precision.head)

    def vector(self, parts: Sequence[Part]) -> Tensor:
        return self._tensors.vector(parts)

    def _tell(self, parts: Sequence[Part], columns: int) -> None:
        """Once for each width that no group divides."""
        if columns not in self._odd_columns:
            self._odd_columns.add(columns)
            logger.info(
                "%s has %d columns, no multiple of %d: rounded to int8 in place of four bits, as "
                "are all matrices of this width",
                parts[0].name,
                columns,
                GROUPS[-1],
            )


def _as_stored(tensors: TensorSource, parts: Sequence[Part], columns: int) -> Weight:
    if isinstance(tensors, QuantizedSource):
        return tensors.weight(parts, columns)
    return DenseMatrix(tensors.matrix(parts, columns))


class Packed:
    """Matrices as a column of kernels reads them: only one is ever in memory in both layouts."""

    def __init__(self, source: ParameterSource, pack: Callable[[Weight], Weight]) -> None:
        self._source, self._pack = source, pack

    def matrix(self, parts: Sequence[Part], columns: int) -> Weight:
        return self._pack(self._source.matrix(parts, columns))

    def head(self, parts: Sequence[Part], columns: int) -> Weight:
        return self._pack(self._source.head(parts, columns))

    def table(self, parts: Sequence[Part], columns: int) -> DenseMatrix:
        return self._source.table(parts, columns)

    def tied(self, table: Weight) -> Weight:
        return self._pack(self._source.tied(table))

    def vector(self, parts: Sequence[Part]) -> Tensor:
        return self._source.vector(parts)


def in_precision(tensors: TensorSource, quantization: str | None, ops: Ops) -> ParameterSource:
    """The parameters made of these tensors, for this column."""
    if quantization is None:
        return Packed(Unquantized(tensors), ops.pack)
    return Packed(Rounded(tensors, PRECISIONS[quantization], ops.round), ops.pack)


def weight_bytes(config: DecoderConfig, dtype: torch.dtype, quantization: str | None) -> int:
    """What the matrices and tables of a network take, which is all but a few of its bytes."""
    if quantization is None:
        return config.num_matrix_parameters * dtype.itemsize
    table = config.vocab_size * config.hidden_size
    layers = int(config.num_layer_parameters * PRECISIONS[quantization].matrix.bytes_per_number)
    # The head, tied or not, is a rounded matrix of eight bits.
    return table * dtype.itemsize + table + layers
