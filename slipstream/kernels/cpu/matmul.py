"""Weights packed for the C++ kernels, and their products."""

from collections.abc import Sequence
from dataclasses import replace
from functools import singledispatch
from typing import Any

import _slipstream_cpu as cpp
import torch
from torch import Tensor

from slipstream.kernels.devices import CPP_DTYPES
from slipstream.kernels.formats.blocks import BlockMatrix, runs
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.int4 import Int4Matrix, ToInt4
from slipstream.kernels.formats.int8 import Int8Matrix, ToInt8
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix
from slipstream.kernels.formats.weight import Rounding, Weight

_LARGE = 1 << 21  # bytes
BLOCK_ROWS = 64  # rows of a block
# Maximum columns for which exact sums fit into 32 bits; for four bits, sums of two digits together.
MOST_INT8_COLUMNS, MOST_INT4_GROUP = 1 << 16, 1 << 13


class CpuMatrix(Weight):
    """A weight in the layout of the C++ kernels: one stream of blocks of 64 rows.

    Args:
        table_dtype: dtype of looked-up rows: that of the packed floats, or any for the blocks of a
            GGUF file; None for quantised weights, whose rows cannot be looked up.
    """

    def __init__(self, handle: "cpp.Matrix", table_dtype: torch.dtype | None) -> None:
        self.handle, self.table_dtype = handle, table_dtype
        self._shape = handle.rows, handle.columns

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    @property
    def nbytes(self) -> int:
        size: int = self.handle.nbytes
        return size

    def select(self, index: Tensor) -> "CpuMatrix":
        return CpuMatrix(self.handle.select(index.long().contiguous()), self.table_dtype)

    def rows(self, start: int, stop: int | None = None) -> "CpuMatrix":
        stop = self.shape[0] if stop is None else stop
        if start % BLOCK_ROWS:
            return self.select(torch.arange(start, stop))
        return CpuMatrix(self.handle.part(start, stop), self.table_dtype)

    def look_up(self, index: Tensor) -> Tensor:
        assert self.table_dtype is not None, "rounded weights are no tables"
        rows = torch.empty((index.numel(), self.shape[1]), dtype=self.table_dtype)
        cpp.look_up(self.handle, index.long().contiguous(), rows)
        return rows if index.dim() == 1 else rows.view(*index.shape, self.shape[1])

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out = x.new_empty((x.shape[0], self._shape[0]))
        cpp.matmul(self.handle, x, bias, out)
        return out

    def logits(self, x: Tensor) -> Tensor:
        out = torch.empty((x.shape[0], self._shape[0]))
        cpp.matmul(self.handle, x, None, out)
        return out


class CpuMatrices(Weight):
    """Stacked weights that cannot be one stream, such as blocks of different types.

    Args:
        parts: at least one; all have the same number of columns.
    """

    def __init__(self, parts: Sequence[Weight]) -> None:
        self._parts = parts

    @property
    def shape(self) -> tuple[int, int]:
        return sum(self._lengths), self._parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    @property
    def _lengths(self) -> list[int]:
        return [part.shape[0] for part in self._parts]

    def select(self, index: Tensor) -> "CpuMatrices":
        found = [self._parts[place].select(own) for place, own in runs(self._lengths, index.long())]
        return CpuMatrices(found or [self._parts[0].select(index.long())])

    def rows(self, start: int, stop: int | None = None) -> "CpuMatrices":
        return self.select(torch.arange(start, self.shape[0] if stop is None else stop))

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        products, start = [], 0
        for part in self._parts:
            stop = start + part.shape[0]
            products.append(part.linear(x, None if bias is None else bias[start:stop]))
            start = stop
        return torch.cat(products, 1)

    def logits(self, x: Tensor) -> Tensor:
        return torch.cat([part.logits(x) for part in self._parts], 1)


def handle_of(weight: Weight) -> "cpp.Matrix | None":
    """The C++ object of a packed matrix; None for a weight that is not packed."""
    return weight.handle if isinstance(weight, CpuMatrix) else None


def pack(weight: Weight) -> Weight:
    """Pack `weight` for the kernels; formats that they do not support are returned unchanged."""
    _give_back_memory(weight.nbytes)
    return _packed(weight)


@singledispatch
def _packed(weight: Any) -> Weight:
    """Formats without a kernel are returned unchanged."""
    assert isinstance(weight, Weight)
    return weight


@_packed.register
def _(weight: DenseMatrix) -> Weight:
    if weight.values.dtype not in CPP_DTYPES:
        return weight
    return CpuMatrix(cpp.pack(weight.values.contiguous()), weight.values.dtype)


@_packed.register
def _(weight: Int8Matrix) -> Weight:
    if weight.shape[1] > MOST_INT8_COLUMNS:
        return weight
    values = weight.values.contiguous()
    return CpuMatrix(cpp.pack_int8(values, weight.scales, weight.rounds_input), None)


@_packed.register
def _(weight: Int4Matrix) -> Weight:
    """Larger groups are split; each part gets the scale and zero of the group."""
    units = weight.group // 32
    parts = next(
        parts
        for parts in range(1, units + 1)
        if units % parts == 0 and weight.group // parts <= MOST_INT4_GROUP
    )
    weight = weight if parts == 1 else weight.regrouped(weight.group // parts)
    values = weight.values.contiguous()
    return CpuMatrix(cpp.pack_int4(values, weight.scales, weight.zeros, weight.group), None)


@_packed.register
def _(weight: Mxfp4Matrix) -> Weight:
    return CpuMatrix(cpp.pack_mxfp4(weight.values.contiguous(), weight.scales.contiguous()), None)


@_packed.register
def _(weight: Nvfp4Matrix) -> Weight:
    values, scales = weight.values.contiguous(), weight.scales.float()
    return CpuMatrix(cpp.pack_nvfp4(values, scales, weight.global_scales.contiguous()), None)


@_packed.register
def _(weight: BlockMatrix) -> Weight:
    raw = [part.raw.contiguous() for part in weight.parts]
    handle = cpp.pack_blocks(raw, [part.type.name for part in weight.parts])
    if handle is not None:
        return CpuMatrix(handle, weight.table_dtype)
    if len(weight.parts) == 1:
        return weight
    return CpuMatrices([_packed(replace(weight, parts=(part,))) for part in weight.parts])


def rounded(matrix: Tensor, form: Rounding) -> Weight:
    """Quantise `matrix`, packed if the kernels support the format."""
    if matrix.dtype not in CPP_DTYPES:
        return form.round(matrix)
    _give_back_memory(matrix.nbytes)
    return _rounded(form, matrix.contiguous())


@singledispatch
def _rounded(form: Any, matrix: Tensor) -> Weight:
    """Formats without a kernel are rounded by the reference."""
    assert isinstance(form, Rounding)
    return form.round(matrix)


@_rounded.register
def _(form: ToInt8, matrix: Tensor) -> Weight:
    if matrix.shape[1] > MOST_INT8_COLUMNS:
        return form.round(matrix)
    return CpuMatrix(cpp.round_to_int8(matrix, form.rounds_input), None)


@_rounded.register
def _(form: ToInt4, matrix: Tensor) -> Weight:
    return CpuMatrix(cpp.round_to_int4(matrix, form.group, form.zeros), None)


def _give_back_memory(nbytes: int) -> None:
    """Before a large weight is packed, return freed memory to the system."""
    if nbytes >= _LARGE:
        cpp.give_back_memory()
