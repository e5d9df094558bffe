"""Integers with group-wise scales, converted to the weight classes that ops take."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.int4 import GROUPS, Int4Matrix, half_scales, unpacked
from slipstream.kernels.formats.int8 import Int8Matrix
from slipstream.kernels.formats.weight import Weight
from slipstream.models.quantized.module import StoredForm

_ROWS_AT_ONCE = 256


def grouped_matrix(
    values: Tensor,
    bits: int,
    scales: Tensor,
    zeros: Tensor | None,
    group: int,
    group_of: Tensor | None = None,
) -> Weight:
    """Make the weight (value - zero) * scale, [N, K].

    Args:
        values: [N, K * bits / 8] uint8; with 4 bits the even column is in a byte's lower half.
        bits: 4 or 8.
        scales: [N, G] float32.
        zeros: [N, G] uint8; None: the middle of the range.
        group: number of columns of a group; the last one may be shorter.
        group_of: [K], the group of each column; None: groups are contiguous.

    Returns:
        An `Int4Matrix` or `Int8Matrix`, or a float32 matrix if neither supports this layout. An
        `Int4Matrix` rounds its scales to the dtypes that it supports.
    """
    columns = values.shape[1] * 8 // bits
    in_order = torch.arange(columns, device=values.device) // group
    if group_of is not None and torch.equal(group_of, in_order):
        group_of = None
    middle = 1 << (bits - 1)
    if zeros is not None and bool((zeros == middle).all()):
        zeros = None
    unit = whole_group(group, columns)
    if bits == 4 and unit is not None and group_of is None:
        scales = half_scales(_per_unit(scales, group, unit, columns))
        own = None if zeros is None else _per_unit(zeros, group, unit, columns)
        return Int4Matrix(values.contiguous(), scales, own, unit)
    if bits == 8 and zeros is None and scales.shape[1] == 1:
        return Int8Matrix((values ^ middle).view(torch.int8), scales.flatten().contiguous())
    order = in_order if group_of is None else group_of
    return DenseMatrix(_whole(values, bits, scales, zeros, order))


@dataclass(frozen=True, kw_only=True)
class IntegerForm(StoredForm):
    """Integers with a scale, and maybe a zero, for each group of a row's columns.

    Attributes:
        group: number of columns of a group; None: one group a row.
        ordered: the columns of a group may be scattered.
        symmetric: the zeros are in the middle of the range.
    """

    bits: int
    group: int | None = None
    ordered: bool = False
    symmetric: bool = True

    @property
    def words(self) -> str:
        size = "a scale a row" if self.group is None else f"groups of {self.group}"
        zeros = "" if self.symmetric else " with zeros"
        order = ", columns in an order of their own" if self.ordered else ""
        return f"{self.bits} bits, {size}{zeros}{order}"

    @property
    def kind(self) -> type[Weight]:
        """The class that `grouped_matrix` returns."""
        group = self.group
        if self.bits == 8:
            return Int8Matrix if group is None and self.symmetric else DenseMatrix
        is_kept = group is None or not (self.ordered or group % GROUPS[-1])
        return Int4Matrix if is_kept else DenseMatrix

    def num_groups(self, columns: int) -> int:
        return -(-columns // (self.group or columns))

    def unit(self, columns: int) -> int:
        if self.kind is not Int4Matrix:
            return 1
        return whole_group(self.group or columns, columns) or 1


def whole_group(group: int, columns: int) -> int | None:
    """The largest group of `Int4Matrix` that divides `group` and `columns`; None without one."""
    group = min(group, columns)
    fitting = [unit for unit in GROUPS if group % unit == 0 and columns % unit == 0]
    return fitting[0] if fitting else None


def _per_unit(of_groups: Tensor, group: int, unit: int, columns: int) -> Tensor:
    times = min(group, columns) // unit
    return of_groups.repeat_interleave(times, 1)[:, : columns // unit].contiguous()


def _whole(
    values: Tensor, bits: int, scales: Tensor, zeros: Tensor | None, group_of: Tensor
) -> Tensor:
    """The dequantised matrix, [N, K] float32."""
    out = torch.empty(len(values), len(group_of), device=values.device)
    for start in range(0, len(values), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        own = unpacked(values[part]) if bits == 4 else values[part]
        if zeros is None:
            shifted = own.float() - (1 << (bits - 1))
        else:
            shifted = own.float() - zeros[part][:, group_of].float()
        torch.mul(shifted, scales[part][:, group_of], out=out[part])
    return out


def as_bytes(words: Tensor) -> Tensor:
    """int32 [..., n] -> uint8 [..., 4 n], little endian."""
    return words.contiguous().view(torch.uint8)
