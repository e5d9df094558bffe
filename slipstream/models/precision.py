"""The precision that matrices are multiplied in: as they are stored, or rounded to fewer bits."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.float8 import ToFloat8
from slipstream.kernels.formats.int4 import ToInt4
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
    """What one name of `quantization` means.

    Attributes:
        matrix, head: what they are rounded to; logits need more bits.
        words: a description for the log.
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


class PreparedSource:
    """Parameters as a backend reads them, rounded first where a precision is given.

    Each matrix is prepared as soon as it is read, so that only one at a time is in memory in two
    forms. Tables and vectors stay as they are, and so do matrices that are stored in fewer bits
    already; a head that is tied to a table becomes a second, rounded copy of it.
    """

    def __init__(self, tensors: TensorSource, precision: Precision | None, ops: Ops) -> None:
        self._tensors, self._precision, self._ops = tensors, precision, ops
        self._odd_columns: set[int] = set()

    def matrix(self, parts: Sequence[Part], columns: int) -> Weight:
        found = self._as_stored(parts, columns)
        if self._precision is None:
            return self._ops.pack(found)
        form = self._precision.matrix.for_columns(found.shape[1])
        bits = None if form is None else form.bits
        if found.floats is not None and bits != self._precision.matrix.bits:
            self._log_odd_columns(parts[0].name, found.shape[1], bits)
        return self._prepared(found, form)

    def head(self, parts: Sequence[Part], columns: int) -> Weight:
        return self.tied(self._as_stored(parts, columns))

    def table(self, parts: Sequence[Part], columns: int) -> DenseMatrix:
        return DenseMatrix(self._tensors.matrix(parts, columns))

    def tied(self, table: Weight) -> Weight:
        return self._prepared(table, None if self._precision is None else self._precision.head)

    def vector(self, parts: Sequence[Part]) -> Tensor:
        return self._tensors.vector(parts)

    def _as_stored(self, parts: Sequence[Part], columns: int) -> Weight:
        if isinstance(self._tensors, QuantizedSource):
            return self._tensors.weight(parts, columns)
        return DenseMatrix(self._tensors.matrix(parts, columns))

    def _prepared(self, matrix: Weight, form: Rounding | None) -> Weight:
        if form is not None and matrix.floats is not None:
            matrix = self._ops.round(matrix.floats, form)
        return self._ops.pack(matrix)

    def _log_odd_columns(self, name: str, columns: int, bits: int | None) -> None:
        """Log once for each number of columns that no group divides."""
        if columns not in self._odd_columns:
            self._odd_columns.add(columns)
            logger.info(
                "%s has %d columns, which no group divides: %s in place of four bits, as are all "
                "matrices of this width",
                name,
                columns,
                "left as it is" if bits is None else f"rounded to int{bits}",
            )


def in_precision(tensors: TensorSource, quantization: str | None, ops: Ops) -> ParameterSource:
    """Parameters made of these tensors for a backend.

    Args:
        quantization: a key of `PRECISIONS`; None: nothing is rounded.
    """
    return PreparedSource(tensors, PRECISIONS[quantization] if quantization else None, ops)


def weight_bytes(config: DecoderConfig, dtype: torch.dtype, quantization: str | None) -> int:
    """Bytes of a network's matrices and tables, which are nearly all of its bytes.

    Args:
        quantization: a key of `PRECISIONS`; None: nothing is rounded.
    """
    if quantization is None:
        return config.num_matrix_parameters * dtype.itemsize
    table = config.vocab_size * config.hidden_size
    layers = int(config.num_layer_parameters * PRECISIONS[quantization].matrix.bytes_per_number)
    # The head, tied or not, is a rounded matrix of eight bits.
    return table * dtype.itemsize + table + layers
