"""Numbers of four and eight bits in the order in which Hopper's tensor cores take them.

A fragment is 16 rows by 64 columns of four bits, or 32 of eight: of thread 4 g + t of a warp, 8
bytes of row g and 8 of row g + 8, and of each row two words. A word of four bits is of 32 columns,
those at 2 t and 2 t + 1, and 8 further, of 16 columns and of the next 16 (see `warpgroup_mma`'s
first operand); a word of eight bits is of 16 columns. Their bits are such that pairs of numbers
become bfloat16 by few shifts. 32 rows lie together, fragment after fragment; so do their scales,
16 rows' side by side in words of four bytes. Where columns end inside a fragment, or inside those
that share a scale, zeros follow.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from slipstream.kernels.formats.float4 import Float4Matrix
from slipstream.kernels.formats.four_bits import FourBitMatrix
from slipstream.kernels.formats.int4 import Int4Matrix
from slipstream.kernels.formats.int8 import Int8Matrix
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix
from slipstream.kernels.formats.weight import Weight

COLUMNS, ROWS = 64, 32
PAIR = 2 * COLUMNS  # columns of four bits that integers may share a scale in
# What a number is: `Fragments.coding`.
E2M1, INT4, INT4_ZEROS, INT8 = 0, 1, 2, 3
_SLICE = 1 << 26  # numbers that are rearranged at once
# Where a word's half has the highest bit and the lower three of its four numbers: of columns 0, 8,
# 16 and 24.
_FLOATS = ((15, 6), (12, 3), (14, 0), (13, 9))
_INTEGERS = ((3, 0), (7, 4), (11, 8), (15, 12))
_FourBits = TypeVar("_FourBits", bound=FourBitMatrix)
_LIFT_BACK = 2.0**7  # of integers that are 2 ** -7 of what is meant
_ZERO = 0x4300  # 128 in bfloat16, to which numbers from 0 to 127 are added by their bits


@dataclass(frozen=True, eq=False)
class Fragments(Weight):
    """A weight [N, K] of few bits, for `grouped_stream_kernels.py`.

    - E2M1: a number is its e2m1 times 2 ** -126 times the bfloat16 of bits (scale << shift) + lift;
      a scale is a byte.
    - INT4: its four bits less 8, times a scale in bfloat16, rounded to bfloat16.
    - INT4_ZEROS: less a zero of the group; beside its scale stands 128 plus it in bfloat16.
    - INT8: its eight bits less 128.

    Sums are multiplied by those of `row_scales`, or by `lift_back`.

    Attributes:
        values: [N K bits / 1024, 128] uint8.
        scales: [entries, words, 16] int32, an entry being 32 rows by 64 columns or those that share
            a scale; None without scales in rows.
        group: columns that share a scale: 16 or 32 of E2M1, 32 or 128 of integers, 0 without.
    """

    size: tuple[int, int]
    coding: int
    values: Tensor
    scales: Tensor | None
    row_scales: Tensor | None
    group: int = 0
    shift: int = 0
    lift: int = 0
    lift_back: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        return self.size

    @property
    def columns_of_fragment(self) -> int:
        return COLUMNS // 2 if self.coding == INT8 else COLUMNS

    @property
    def stored_columns(self) -> int:
        """K, and the zeros behind it."""
        entry = max(self.columns_of_fragment, self.group)
        return -(-self.size[1] // entry) * entry

    @property
    def nbytes(self) -> int:
        beside = (self.scales, self.row_scales)
        return self.values.nbytes + sum(each.nbytes for each in beside if each is not None)

    def select(self, index: Tensor) -> "Fragments":
        """Fragments are whole: after the last row there are copies of the first row."""
        count, fragments = len(index), self.stored_columns // self.columns_of_fragment
        index = torch.cat((index, index[:1].expand(-count % (2 * ROWS))))
        group, unit, lower, row = index // 32, index // 16 % 2, index // 8 % 2, index % 8
        values = self.values.view(-1, fragments, 2, 8, 4, 2, 8)
        values = values[group, :, unit, row, :, lower].view(-1, 2, 2, 8, fragments, 4, 8)
        scales = None
        if self.scales is not None:
            scales = _scale_fragments(self._own_scales()[index], self.coding, self.group)
        return replace(
            self,
            size=(count, self.size[1]),
            values=values.permute(0, 4, 1, 3, 5, 2, 6).reshape(-1, 128),
            scales=scales,
            row_scales=None if self.row_scales is None else self.row_scales[index[:count]],
        )

    def rows(self, start: int, stop: int | None = None) -> "Fragments":
        stop = self.size[0] if stop is None else stop
        return self.select(torch.arange(start, stop, device=self.values.device))

    def _own_scales(self) -> Tensor:
        """[N, K / group, bytes of a scale] uint8."""
        assert self.scales is not None
        order, size = _order(self.coding, self.group)
        entry, columns = max(COLUMNS, self.group), self.stored_columns
        natural = (
            len(self.values) * 256 // 32 // columns,
            2,
            2,
            8,
            columns // entry,
            entry // self.group,
            size,
        )
        lying = self.scales.view(torch.uint8).view([natural[place] for place in order])
        own = lying.permute([order.index(place) for place in range(len(order))])
        return own.reshape(-1, columns // self.group, size)


def fits(weight: Weight) -> bool:
    rows, columns = weight.shape
    return rows % (2 * ROWS) == 0 and columns % (COLUMNS // 2) == 0  # gates are whole, too


def from_mxfp4(weight: Mxfp4Matrix) -> Fragments:
    """Exponents are lowered where the largest would be none of bfloat16."""
    shape, weight = weight.shape, _filled_up(weight)
    lowered = max(0, int(weight.scales.max()) - 128)
    codes = weight.scales.int()
    least = lowered - 125
    values = _float_fragments(weight, codes < least, None)
    bits = codes.clamp_min(least).to(torch.uint8).unsqueeze(-1)
    return Fragments(
        shape, E2M1, values, _scale_fragments(bits, E2M1, 32), None, group=32,
        shift=7, lift=(126 - lowered) << 7, lift_back=2.0**lowered,
    )  # fmt: skip


def from_nvfp4(weight: Nvfp4Matrix) -> Fragments:
    """Scales with five bits of exponent, among which the subnormal ones of e4m3 are none."""
    shape, weight = weight.shape, _filled_up(weight)
    scales = weight.scales.float()
    mantissa, exponent = torch.frexp(scales.abs())
    codes = ((exponent + 9) << 3) + ((2 * mantissa - 1) * 8).int()
    nothing = scales == 0
    values = _float_fragments(weight, nothing, scales < 0)
    bits = codes.masked_fill(nothing, 0).to(torch.uint8).unsqueeze(-1)
    return Fragments(
        shape, E2M1, values, _scale_fragments(bits, E2M1, 16),
        weight.global_scales * 2.0**8, group=16, shift=4, lift=235 << 7,
    )  # fmt: skip


def from_int4(weight: Int4Matrix) -> Fragments:
    """Groups that are whole pairs of fragments, or of 32; scales are rounded to bfloat16."""
    group = PAIR if weight.group % PAIR == 0 else 32
    shape, weight = weight.shape, _filled_up(weight.regrouped(group))
    coding, own, lift_back = INT4, weight.scales, 1.0
    if weight.zeros is None:  # scales below 2, which may be multiplied by 2 ** 126
        lift_back = 2.0 ** max(0, int(torch.frexp(own.abs().max()).exponent) - 1)
        own, lift_back = own / lift_back, lift_back * _LIFT_BACK
    scales = own.to(torch.bfloat16).view(torch.int16).unsqueeze(-1)
    if weight.zeros is not None:
        coding = INT4_ZEROS
        zeros = (weight.zeros.to(torch.int16) + _ZERO).unsqueeze(-1)
        scales = torch.cat((scales, zeros), -1)
    packed = _scale_fragments(scales.contiguous().view(torch.uint8), coding, group)
    values = _fragments(weight.values, _INTEGERS, lambda codes, part: codes)
    return Fragments(shape, coding, values, packed, None, group=group, lift_back=lift_back)


def from_int8(weight: Int8Matrix) -> Fragments:
    rows, columns = weight.shape
    out = torch.empty(rows * columns // 128, 128, dtype=torch.uint8, device=weight.values.device)
    step = max(1, _SLICE // (columns * ROWS)) * ROWS
    for start in range(0, rows, step):
        some = weight.values[start : start + step].view(torch.uint8) ^ 128
        # group, unit, row 8, row 1, fragment, word, 8, thread, 1
        apart = some.view(-1, 2, 2, 8, columns // 32, 2, 2, 4, 2)
        ordered = apart.permute(0, 4, 1, 3, 7, 2, 5, 8, 6).reshape(-1, 128)
        out[start * columns // 128 :][: len(ordered)] = ordered
    return Fragments(weight.shape, INT8, out, None, weight.scales * _LIFT_BACK)


def _filled_up(weight: _FourBits) -> _FourBits:
    """`weight` with zeros behind its columns, up to whole fragments."""
    lacking = -weight.shape[1] % COLUMNS
    return weight.widened(weight.shape[1] + lacking) if lacking else weight


def _float_fragments(weight: Float4Matrix, nothing: Tensor, negative: Tensor | None) -> Tensor:
    """[N K / 256, 128] uint8; groups that are nothing become 0."""

    def changed(codes: Tensor, part: slice) -> Tensor:
        codes = codes.view(codes.shape[0], nothing.shape[1], -1)
        if negative is not None:
            codes = codes ^ (negative[part].unsqueeze(-1).to(torch.uint8) << 3)
        return codes.masked_fill(nothing[part].unsqueeze(-1), 0)

    return _fragments(weight.values, _FLOATS, changed)


def _fragments(
    values: Tensor, places: tuple[tuple[int, int], ...], changed: Callable[[Tensor, slice], Tensor]
) -> Tensor:
    """values [N, K / 2] uint8, codes of rows `changed` -> [N K / 256, 128] uint8."""
    rows, columns = values.shape[0], 2 * values.shape[1]
    out = torch.empty(rows * columns // 256, 128, dtype=torch.uint8, device=values.device)
    step = max(1, _SLICE // (columns * ROWS)) * ROWS
    for start in range(0, rows, step):
        part = slice(start, min(rows, start + step))
        codes = torch.stack((values[part] & 15, values[part] >> 4), -1)
        codes = changed(codes, part)
        made = _words(codes.view(-1, 2, 2, 8, columns // COLUMNS, 2, 2, 2, 4, 2), places)
        out[start * columns // 256 : part.stop * columns // 256] = made.view(-1, 128)
    return out


def _words(codes: Tensor, places: tuple[tuple[int, int], ...]) -> Tensor:
    """[group, unit, row 8, row 1, chunk, word, 16, 8, thread, 1] -> bytes of fragments."""
    halves = torch.zeros((), dtype=torch.int32, device=codes.device)
    for number, (highest, lower) in enumerate(places):
        own = codes[..., number // 2, number % 2, :, :].int()
        halves = halves + ((own >> 3 << highest) | ((own & 7) << lower))
    # group, unit, row 8, row 1, chunk, word, thread, 1
    ordered = halves.permute(0, 4, 1, 3, 6, 2, 5, 7).contiguous()
    return ordered.to(torch.int16).view(torch.uint8)


def _scale_fragments(scales: Tensor, coding: int, group: int) -> Tensor:
    """scales [N, K / group, bytes] uint8 -> [entries, words, 16] int32."""
    order, size = _order(coding, group)
    rows, each = scales.shape[0], max(COLUMNS, group) // group
    apart = scales.view(rows // ROWS, 2, 2, 8, scales.shape[1] // each, each, size)
    ordered = apart.permute(order).reshape(-1, 4).view(torch.int32)
    words = 2 * each * size // 4
    return ordered.view(-1, words, 16)


def _order(coding: int, group: int) -> tuple[tuple[int, ...], int]:
    """How bytes of scales lie, of (group, unit, row 8, row 1, entry, scale, byte), and how many
    each has. Where two rows fit into a word they share it."""
    if coding == E2M1:
        return ((0, 4, 1, 3, 2, 5, 6) if group == 32 else (0, 4, 2, 1, 3, 5, 6)), 1
    if coding == INT4:
        return (0, 4, 5, 1, 3, 2, 6), 2
    return (0, 4, 5, 2, 1, 3, 6), 4
