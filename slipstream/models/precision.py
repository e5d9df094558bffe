"""The precision that matrices are multiplied in: as they are stored, or rounded to eight bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.kernels.reference.dense import round_rows
from slipstream.kernels.table import Float8Matrix, Weight
from slipstream.layers.parameters import ParameterSource, Part
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.parameter_sources import TensorSource

FLOAT8 = "fp8"
_SLICE = 1 << 24  # numbers that are in float32 at once while they are rounded


class Unquantized:
    """Every parameter as its tensor is."""

    def __init__(self, tensors: TensorSource) -> None:
        self._tensors = tensors

    def matrix(self, parts: Sequence[Part], columns: int) -> Weight:
        return self._tensors.matrix(parts, columns)

    def table(self, parts: Sequence[Part], columns: int) -> Tensor:
        return self._tensors.matrix(parts, columns)

    def tied(self, table: Tensor) -> Weight:
        return table

    def vector(self, parts: Sequence[Part]) -> Tensor:
        return self._tensors.vector(parts)


class Float8:
    """Matrices rounded to e4m3 as soon as they are there: only one is ever in memory unrounded.

    Tables and vectors stay; a head that is tied to a table becomes a second, rounded copy of it.
    """

    def __init__(self, tensors: TensorSource) -> None:
        self._tensors = tensors

    def matrix(self, parts: Sequence[Part], columns: int) -> Weight:
        return rounded(self._tensors.matrix(parts, columns))

    def table(self, parts: Sequence[Part], columns: int) -> Tensor:
        return self._tensors.matrix(parts, columns)

    def tied(self, table: Tensor) -> Weight:
        return rounded(table)

    def vector(self, parts: Sequence[Part]) -> Tensor:
        return self._tensors.vector(parts)


def in_precision(tensors: TensorSource, quantization: str | None) -> ParameterSource:
    """The parameters made of these tensors."""
    return Float8(tensors) if quantization == FLOAT8 else Unquantized(tensors)


def rounded(matrix: Tensor) -> Float8Matrix:
    """[N, K] in e4m3, each row scaled so that its largest number becomes the largest of e4m3."""
    rows, columns = matrix.shape
    values = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn, device=matrix.device)
    scales = torch.empty(rows, dtype=torch.float32, device=matrix.device)
    step = max(1, _SLICE // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        values[part], scales[part] = round_rows(matrix[part])
    return Float8Matrix(values, scales)


def weight_bytes(config: DecoderConfig, dtype: torch.dtype, quantization: str | None) -> int:
    """What the matrices and tables of a network take, which is all but a few of its bytes."""
    if quantization is None:
        return config.num_matrix_parameters * dtype.itemsize
    table = config.vocab_size * config.hidden_size
    copy = table if config.tie_word_embeddings else 0
    matrices = config.num_matrix_parameters - table + copy
    return table * dtype.itemsize + matrices
