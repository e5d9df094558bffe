"""Weights of four and eight bits in the order of the tensor cores' operands.

A fragment is 16 rows by 64 columns of 4-bit numbers, or by 32 columns of 8-bit numbers. Thread
4 g + t of a warp holds two words (of four bytes) of row g and two of row g + 8. A word of 4-bit
numbers covers 32 columns: the thread has columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of the first 16
and of the next 16, as in the first operand of `mma.sync` and `wgmma`. A word of 8-bit numbers
covers 16 columns. The bits in a word are arranged so that few shifts turn pairs of numbers into
bfloat16.

The fragments of a group of 32 rows are contiguous. So are their scales, in words of four bytes with
the scales of 16 rows next to each other; those of FLOAT8 are a plain matrix. If K is no multiple of
a fragment's columns, or of the columns that share a scale, the rows are padded with zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.kernels.formats.float4 import Float4Matrix
from slipstream.kernels.formats.float8_blocks import Float8BlockMatrix
from slipstream.kernels.formats.four_bits import FourBitMatrix
from slipstream.kernels.formats.int4 import Int4Matrix
from slipstream.kernels.formats.int8 import Int8Matrix
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix
from slipstream.kernels.formats.weight import Weight

COLUMNS, ROWS = 64, 32
PAIR = 2 * COLUMNS  # the larger group of columns that can share a scale of INT4
E2M1, INT4, INT4_ZEROS, INT8, FLOAT8 = 0, 1, 2, 3, 4  # values of `Fragments.coding`
_SLICE = 1 << 26  # numbers that are rearranged at once
# The lowest bits in a word of INT4 of columns 2 t, 2 t + 8, 2 t + 16 and 2 t + 24.
# Those of the next column are 16 bits higher.
_INT4_BITS = (0, 4, 8, 12)
# Sign, exponent and mantissa of two e2m1 numbers, in their places in two bfloat16.
E2M1_PAIR = 0x81C081C0
# Three pairs of each word are in these places if it is rotated to the left by E2M1_TURNS: columns
# 2 t, 2 t + 8 and 2 t + 16, with the columns next to them. A fourth pair does not fit into the bits
# that remain, but two pairs fit into those of two words: the bits E2M1_CHOSEN of the first and the
# others of the second, shifted to the left by E2M1_SHIFT. Rotated by E2M1_RESTS, they are columns
# 2 t + 24 of the first and of the second word.
E2M1_TURNS, E2M1_RESTS = (0, 6, 10), (2, 12)
E2M1_CHOSEN, E2M1_SHIFT = 0x0C180C18, 2
_FourBits = TypeVar("_FourBits", bound=FourBitMatrix)
_LIFT_BACK = 2.0**7  # `lift_back` of integers, which are unpacked to 2 ** -7 times their value
_BFLOAT16_128 = 0x4300  # bits of 128 in bfloat16; plus an integer up to 127: bits of the sum


@dataclass(frozen=True, eq=False)
class Fragments(Weight):
    """A quantised weight [N, K] for `grouped_stream_kernels.py`.

    The value of a number by its `coding`:

    - E2M1: e2m1 * 2 ** -126 * s, where s is the bfloat16 with the bits (scale << shift) + lift. A
      scale is one byte.
    - INT4: (4-bit integer - 8) * scale, rounded to bfloat16. A scale is bfloat16.
    - INT4_ZEROS: (4-bit integer - zero point) * scale, rounded to bfloat16. A scale is stored with
      128 + zero point, both in bfloat16.
    - INT8: 8-bit integer - 128.
    - FLOAT8: e4m3; sums over 128 columns are multiplied by the scale of their block.

    The sums of the product are multiplied by `row_scales` if there are any, else by `lift_back`.

    Attributes:
        values: [N K bits / 1024, 128] uint8.
        scales: [entries, words, 16] int32; an entry is 32 rows by 64 columns, or by the columns of
            a group if these are more; None for INT8. Of FLOAT8: [N / 32, K / 128] float32.
        row_scales: [N] float32.
        group: columns that share a scale: 16 or 32 of E2M1, 32 or 128 of INT4, 128 of FLOAT8, 0
            for INT8.
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
    def fragment_columns(self) -> int:
        return COLUMNS // 2 if self.coding in (INT8, FLOAT8) else COLUMNS

    @property
    def stored_columns(self) -> int:
        """K with the padding."""
        entry = max(self.fragment_columns, self.group)
        return -(-self.size[1] // entry) * entry

    @property
    def nbytes(self) -> int:
        others = (self.scales, self.row_scales)
        return self.values.nbytes + sum(each.nbytes for each in others if each is not None)

    def select(self, index: Tensor) -> "Fragments":
        """The rows `index`; the stored rows are padded to a multiple of 64 by the first of them.

        Raises:
            UsageError: rows of FLOAT8 from different blocks would share one.
        """
        count, fragments = len(index), self.stored_columns // self.fragment_columns
        index = torch.cat((index, index[:1].expand(-count % (2 * ROWS))))
        group, unit, lower, row = index // 32, index // 16 % 2, index // 8 % 2, index % 8
        values = self.values.view(-1, fragments, 2, 8, 4, 2, 8)
        values = values[group, :, unit, row, :, lower].view(-1, 2, 2, 8, fragments, 4, 8)
        scales = None
        if self.coding == FLOAT8:
            scales = self._block_scales(group)
        elif self.scales is not None:
            scales = _scale_fragments(self._scales_by_row()[index], self.coding, self.group)
        return replace(
            self,
            size=(count, self.size[1]),
            values=values.permute(0, 4, 1, 3, 5, 2, 6).reshape(-1, 128),
            scales=scales,
            row_scales=None if self.row_scales is None else self.row_scales[index[:count]],
        )

    def _block_scales(self, group: Tensor) -> Tensor:
        """Scales of the rows whose groups of 32 are `group`; see `select`."""
        assert self.scales is not None
        whole = group.view(-1, ROWS)
        if (whole != whole[:, :1]).any():
            raise UsageError(
                "rows of a matrix of FP8 blocks cannot be chosen one by one on this GPU; leave "
                "draft_vocab_size out"
            )
        return self.scales[whole[:, 0]]

    def rows(self, start: int, stop: int | None = None) -> "Fragments":
        stop = self.size[0] if stop is None else stop
        return self.select(torch.arange(start, stop, device=self.values.device))

    def _scales_by_row(self) -> Tensor:
        """[N, K / group, bytes of a scale] uint8."""
        assert self.scales is not None
        order, size = _order(self.coding, self.group)
        entry, columns = max(COLUMNS, self.group), self.stored_columns
        row_major = (
            len(self.values) * 256 // 32 // columns,
            2,
            2,
            8,
            columns // entry,
            entry // self.group,
            size,
        )
        ordered = self.scales.view(torch.uint8).view([row_major[place] for place in order])
        own = ordered.permute([order.index(place) for place in range(len(order))])
        return own.reshape(-1, columns // self.group, size)


def fits(weight: Weight) -> bool:
    rows, columns = weight.shape
    # With a multiple of 64 rows, the gate and the up half are multiples of 32 rows each.
    return rows % (2 * ROWS) == 0 and columns % (COLUMNS // 2) == 0


def from_mxfp4(weight: Mxfp4Matrix) -> Fragments:
    """If the largest scale is too large for bfloat16, all exponents are lowered by the same amount,
    which `lift_back` makes up for. Groups whose exponent is then too small become 0."""
    shape, weight = weight.shape, _zero_padded(weight)
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
    """Scales get an exponent of five bits, so that subnormal e4m3 scales become normal numbers.
    The sign of a scale moves to its values."""
    shape, weight = weight.shape, _zero_padded(weight)
    scales = weight.scales.float()
    mantissa, exponent = torch.frexp(scales.abs())
    codes = ((exponent + 9) << 3) + ((2 * mantissa - 1) * 8).int()
    is_zero = scales == 0
    values = _float_fragments(weight, is_zero, scales < 0)
    bits = codes.masked_fill(is_zero, 0).to(torch.uint8).unsqueeze(-1)
    return Fragments(
        shape, E2M1, values, _scale_fragments(bits, E2M1, 16),
        weight.global_scales * 2.0**8, group=16, shift=4, lift=235 << 7,
    )  # fmt: skip


def from_int4(weight: Int4Matrix) -> Fragments:
    """Groups of a multiple of 128 columns become groups of 128, others groups of 32; scales are
    rounded to bfloat16."""
    group = PAIR if weight.group % PAIR == 0 else 32
    shape, weight = weight.shape, _zero_padded(weight.regrouped(group))
    coding, own, lift_back = INT4, weight.scales, 1.0
    if weight.zeros is None:  # scales below 2: the kernel multiplies them by 2 ** 126
        lift_back = 2.0 ** max(0, int(torch.frexp(own.abs().max()).exponent) - 1)
        own, lift_back = own / lift_back, lift_back * _LIFT_BACK
    scales = own.to(torch.bfloat16).view(torch.int16).unsqueeze(-1)
    if weight.zeros is not None:
        coding = INT4_ZEROS
        zeros = (weight.zeros.to(torch.int16) + _BFLOAT16_128).unsqueeze(-1)
        scales = torch.cat((scales, zeros), -1)
    packed = _scale_fragments(scales.contiguous().view(torch.uint8), coding, group)
    values = _fragments(weight.values, _integer_words, lambda codes, part: codes)
    return Fragments(shape, coding, values, packed, None, group=group, lift_back=lift_back)


def from_int8(weight: Int8Matrix) -> Fragments:
    values = _byte_fragments(weight.values, 128)
    return Fragments(weight.shape, INT8, values, None, weight.scales * _LIFT_BACK)


def from_float8_blocks(weight: Float8BlockMatrix) -> Fragments | None:
    """None: blocks do not have whole groups of 32 rows, or not 128 columns each."""
    if weight.block_rows % ROWS or weight.block_columns != PAIR or weight.shape[1] % PAIR:
        return None
    scales = weight.regrouped(ROWS).scales.contiguous()
    values = _byte_fragments(weight.values, 0)
    return Fragments(weight.shape, FLOAT8, values, scales, None, group=PAIR)


def _byte_fragments(values: Tensor, changed: int) -> Tensor:
    """values [N, K] of one byte -> fragments [N K / 128, 128] uint8, with bits flipped as
    in `changed`."""
    rows, columns = values.shape
    out = torch.empty(rows * columns // 128, 128, dtype=torch.uint8, device=values.device)
    step = max(1, _SLICE // (columns * ROWS)) * ROWS
    for start in range(0, rows, step):
        some = values[start : start + step].view(torch.uint8) ^ changed
        # group, unit, row 8, row 1, fragment, word, 8, thread, 1
        apart = some.view(-1, 2, 2, 8, columns // 32, 2, 2, 4, 2)
        ordered = apart.permute(0, 4, 1, 3, 7, 2, 5, 8, 6).reshape(-1, 128)
        out[start * columns // 128 :][: len(ordered)] = ordered
    return out


def _zero_padded(weight: _FourBits) -> _FourBits:
    """`weight` with columns of zeros appended, up to whole fragments."""
    missing = -weight.shape[1] % COLUMNS
    return weight.widened(weight.shape[1] + missing) if missing else weight


def _float_fragments(weight: Float4Matrix, is_zero: Tensor, negative: Tensor | None) -> Tensor:
    """[N K / 256, 128] uint8; numbers of groups with `is_zero` become 0, those of groups with
    `negative` change their sign. Both are [N, K / group] bool."""

    def transform(codes: Tensor, part: slice) -> Tensor:
        codes = codes.view(codes.shape[0], is_zero.shape[1], -1)
        if negative is not None:
            codes = codes ^ (negative[part].unsqueeze(-1).to(torch.uint8) << 3)
        return codes.masked_fill(is_zero[part].unsqueeze(-1), 0)

    return _fragments(weight.values, _float_words, transform)


def _fragments(
    values: Tensor,
    words: Callable[[Tensor], Tensor],
    transform: Callable[[Tensor, slice], Tensor],
) -> Tensor:
    """values [N, K / 2] uint8 -> fragments [N K / 256, 128] uint8.

    Args:
        words: `_float_words` or `_integer_words`.
        transform: maps the codes of some rows, and the slice of these rows, to the stored codes.
    """
    rows, columns = values.shape[0], 2 * values.shape[1]
    out = torch.empty(rows * columns // 256, 128, dtype=torch.uint8, device=values.device)
    step = max(1, _SLICE // (columns * ROWS)) * ROWS
    for start in range(0, rows, step):
        part = slice(start, min(rows, start + step))
        codes = torch.stack((values[part] & 15, values[part] >> 4), -1)
        codes = transform(codes, part)
        made = words(codes.view(-1, 2, 2, 8, columns // COLUMNS, 2, 4, 4, 2))
        ordered = made.permute(0, 4, 1, 3, 6, 2, 5).contiguous().view(torch.uint8)
        out[start * columns // 256 : part.stop * columns // 256] = ordered.view(-1, 128)
    return out


def _integer_words(codes: Tensor) -> Tensor:
    """Codes [group, unit, row 8, row 1, chunk, word, 8, thread, 1] uint8 -> [group, unit, row 8,
    row 1, chunk, word, thread] int32."""
    words = torch.zeros((), dtype=torch.int32, device=codes.device)
    for number, lowest in enumerate(_INT4_BITS):
        first, second = codes[..., number, :, :].int().unbind(-1)
        words = words | first << lowest | second << lowest + 16
    return words


def _float_words(codes: Tensor) -> Tensor:
    """Like `_integer_words`, of e2m1."""
    words, rests = [], torch.zeros((), dtype=torch.int32, device=codes.device)
    for word, rest in enumerate(E2M1_RESTS):
        own = codes[..., word, :, :, :].int()
        first, second = ((own & 8) << 12 | (own & 7) << 6).unbind(-1)
        *pairs, last = (first | second << 16).unbind(-2)
        words.append(sum(map(_turned_back, pairs, E2M1_TURNS), torch.zeros_like(last)))
        rests = rests | _turned_back(last, rest)
    words[0] |= rests & E2M1_CHOSEN
    words[1] |= (rests & ~E2M1_CHOSEN) >> E2M1_SHIFT
    return torch.stack(words, -2)


def _turned_back(words: Tensor, bits: int) -> Tensor:
    """int32 words, rotated to the right."""
    if not bits:
        return words
    return words >> bits & (1 << 32 - bits) - 1 | words << 32 - bits


def _scale_fragments(scales: Tensor, coding: int, group: int) -> Tensor:
    """scales [N, K / group, bytes] uint8 -> [entries, words, 16] int32."""
    order, size = _order(coding, group)
    rows, each = scales.shape[0], max(COLUMNS, group) // group
    apart = scales.view(rows // ROWS, 2, 2, 8, scales.shape[1] // each, each, size)
    ordered = apart.permute(order).reshape(-1, 4).view(torch.int32)
    words = 2 * each * size // 4
    return ordered.view(-1, words, 16)


def _order(coding: int, group: int) -> tuple[tuple[int, ...], int]:
    """(order in memory of the dimensions (32 rows, 16 rows, 8 rows, row, entry, scale, byte) of the
    scales, bytes of each scale). A word has the scales of two rows if these fit into it."""
    if coding == E2M1:
        return ((0, 4, 1, 3, 2, 5, 6) if group == 32 else (0, 4, 2, 1, 3, 5, 6)), 1
    if coding == INT4:
        return (0, 4, 5, 1, 3, 2, 6), 2
    return (0, 4, 5, 2, 1, 3, 6), 4
