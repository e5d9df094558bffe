"""Products with packed weights in C++."""

import _slipstream_cpu as cpp
import torch
from torch import Tensor

from slipstream.kernels.devices import CPP_DTYPES
from slipstream.kernels.forms import Rounding, ToFloat8, ToInt8
from slipstream.kernels.reference import REFERENCE
from slipstream.kernels.table import Int4Matrix, Int8Matrix, PackedMatrix, Weight
from slipstream.kernels.weights import bytes_of

_LARGE = 1 << 21  # bytes
BLOCK_ROWS = 64  # that lie together
# Columns of which exact sums fit into 32 bits; of four bits, of two digits together.
MOST_INT8_COLUMNS, MOST_INT4_GROUP = 1 << 16, 1 << 13


class CpuMatrix(PackedMatrix):
    """A weight as the C++ kernels read it: one stream of blocks of 64 rows."""

    def __init__(self, handle: "cpp.Matrix", dtype: torch.dtype | None) -> None:
        self.handle, self.table_dtype = handle, dtype
        self.shape, self.nbytes = (handle.rows, handle.columns), handle.nbytes

    def select(self, index: Tensor) -> "CpuMatrix":
        return CpuMatrix(self.handle.select(index.long().contiguous()), self.table_dtype)

    def part(self, start: int, stop: int) -> "CpuMatrix":
        if start % BLOCK_ROWS:
            return self.select(torch.arange(start, stop))
        return CpuMatrix(self.handle.part(start, stop), self.table_dtype)

    def look_up(self, index: Tensor) -> Tensor:
        assert self.table_dtype is not None, "rounded weights are no tables"
        rows = torch.empty((index.numel(), self.shape[1]), dtype=self.table_dtype)
        cpp.look_up(self.handle, index.long().contiguous(), rows)
        return rows.view(*index.shape, self.shape[1])


def pack(weight: Weight) -> Weight:
    """`weight` as the kernels read it; what they do not serve stays as it is."""
    _give_back_memory(weight)
    if isinstance(weight, Tensor):
        if weight.dim() != 2 or weight.dtype not in CPP_DTYPES:
            return weight
        return CpuMatrix(cpp.pack(weight.contiguous()), weight.dtype)
    if isinstance(weight, Int8Matrix) and weight.values.shape[1] <= MOST_INT8_COLUMNS:
        values = weight.values.contiguous()
        return CpuMatrix(cpp.pack_int8(values, weight.scales, weight.rounds_input), None)
    if isinstance(weight, Int4Matrix):
        return _pack_int4(weight)
    return weight


def _pack_int4(weight: Int4Matrix) -> CpuMatrix:
    """Larger groups are taken apart: all parts get the scale and the zero of the whole."""
    units = weight.group // 32
    parts = next(
        parts
        for parts in range(1, units + 1)
        if units % parts == 0 and weight.group // parts <= MOST_INT4_GROUP
    )
    scales, zeros = (
        of if of is None or parts == 1 else of.repeat_interleave(parts, dim=1)
        for of in (weight.scales, weight.zeros)
    )
    values = weight.values.contiguous()
    return CpuMatrix(cpp.pack_int4(values, scales, zeros, weight.group // parts), None)


def rounded(matrix: Tensor, form: Rounding) -> Weight:
    """`matrix` in fewer bits, packed; what the kernels do not serve is left to be packed."""
    if isinstance(form, ToFloat8) or matrix.dtype not in CPP_DTYPES:
        return REFERENCE.round(matrix, form)
    if isinstance(form, ToInt8) and matrix.shape[1] > MOST_INT8_COLUMNS:
        return REFERENCE.round(matrix, form)
    _give_back_memory(matrix)
    matrix = matrix.contiguous()
    if isinstance(form, ToInt8):
        return CpuMatrix(cpp.round_to_int8(matrix, form.rounds_input), None)
    return CpuMatrix(cpp.round_to_int4(matrix, form.group, form.zeros), None)


def _give_back_memory(weight: Weight) -> None:
    """Of what was packed before, where a large weight comes."""
    if bytes_of(weight) >= _LARGE:
        cpp.give_back_memory()


def linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    if not isinstance(weight, CpuMatrix):
        return REFERENCE.linear(x, weight, bias)
    out = x.new_empty((x.shape[0], weight.shape[0]))
    cpp.matmul(weight.handle, x, bias, out)
    return out


def logits(x: Tensor, weight: Weight) -> Tensor:
    if not isinstance(weight, CpuMatrix):
        return REFERENCE.logits(x, weight)
    out = torch.empty((x.shape[0], weight.shape[0]))
    cpp.matmul(weight.handle, x, None, out)
    return out
