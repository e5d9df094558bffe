"""Integers with a scale for every group of columns, as matrices that ops take."""

import torch
from torch import Tensor

from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.int4 import GROUPS, Int4Matrix, half_scales, unpacked
from slipstream.kernels.formats.int8 import Int8Matrix
from slipstream.kernels.formats.weight import Weight

_ROWS_AT_ONCE = 256


def grouped_matrix(
    values: Tensor,
    bits: int,
    scales: Tensor,
    zeros: Tensor | None,
    group: int,
    group_of: Tensor | None = None,
) -> Weight:
    """(value - zero) * scale.

    Args:
        values: [N, K bits / 8] uint8: of four bits two columns a byte, the even one below.
        bits: 4 or 8.
        scales: [N, G] float32.
        zeros: [N, G] uint8; None: the middle of all values.
        group: columns of a group, the last of which may be shorter.
        group_of: [K] the group of each column, where they do not follow each other.

    Returns:
        An `Int4Matrix` or `Int8Matrix` with these numbers, or where neither can have them a
        float32 matrix. A scale of 32 bits is rounded to those that an `Int4Matrix` may have.
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


def integer_kind(bits: int, group: int | None, ordered: bool, symmetric: bool) -> type[Weight]:
    """The class of `grouped_matrix`; a group of None has all columns."""
    if bits == 8:
        return Int8Matrix if group is None and symmetric else DenseMatrix
    return Int4Matrix if group is None or not (ordered or group % GROUPS[-1]) else DenseMatrix


def whole_group(group: int, columns: int) -> int | None:
    """The largest group of an `Int4Matrix` that these groups consist of; None without one."""
    group = min(group, columns)
    fitting = [unit for unit in GROUPS if group % unit == 0 and columns % unit == 0]
    return fitting[0] if fitting else None


def grouped_unit(kind: type[Weight], group: int | None, columns: int) -> int:
    """`StoredQuantization.unit` of such a class (`integer_kind`)."""
    unit = whole_group(group or columns, columns) if kind is Int4Matrix else None
    return unit or 1


def _per_unit(of_groups: Tensor, group: int, unit: int, columns: int) -> Tensor:
    times = min(group, columns) // unit
    return of_groups.repeat_interleave(times, 1)[:, : columns // unit].contiguous()


def _whole(
    values: Tensor, bits: int, scales: Tensor, zeros: Tensor | None, group_of: Tensor
) -> Tensor:
    """[N, K] float32."""
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
    """int32 [..., n] -> uint8 [..., 4 n], each word from its lowest byte up."""
    return words.contiguous().view(torch.uint8)
