"""Four-bit floats in the order in which Hopper's tensor cores take them.

A fragment is 16 rows by 64 columns: of thread 4 g + t of a warp, 8 bytes of row g and 8 of row
g + 8, and of each row two words, for 32 columns each. The columns of a word are those at 2 t and
2 t + 1, and 8 further, of 16 columns and of the next 16 (see `warpgroup_mma`'s first operand); its
bits are such that pairs of numbers become bfloat16 by few shifts. 32 rows lie together, 64 columns
after 64 columns; so do their scales, 16 rows' bytes for 32 columns (or 16) side by side.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.formats.float4 import Float4Matrix
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix
from slipstream.kernels.formats.weight import Weight

COLUMNS, ROWS = 64, 32
_SLICE = 1 << 26  # numbers that are rearranged at once
# Where a word's half has sign and magnitude of its four numbers: of columns 0, 8, 16 and 24.
_PLACES = ((15, 6), (12, 3), (14, 0), (13, 9))


@dataclass(frozen=True, eq=False)
class Float4Fragments(Weight):
    """A weight [N, K] of four-bit floats, for `grouped_stream_kernels.py`.

    A number is its e2m1 times 2 ** -126 times the bfloat16 of bits (scale << shift) + lift, and
    sums are multiplied by those of `row_scales`, or by `lift_back`.

    Attributes:
        values: [N K / 256, 128] uint8.
        scales: [N K / 1024, words, 16] int32.
    """

    size: tuple[int, int]
    values: Tensor
    scales: Tensor
    row_scales: Tensor | None
    shift: int
    lift: int
    lift_back: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.size

    @property
    def nbytes(self) -> int:
        own = self.values.nbytes + self.scales.nbytes
        return own if self.row_scales is None else own + self.row_scales.nbytes

    def select(self, index: Tensor) -> "Float4Fragments":
        """Fragments are whole: behind the last row there are copies of the first."""
        count, columns = len(index), self.size[1]
        index = torch.cat((index, index[:1].expand(-count % (2 * ROWS))))
        group, unit, lower, row = index // 32, index // 16 % 2, index // 8 % 2, index % 8
        values = self.values.view(-1, columns // COLUMNS, 2, 8, 4, 2, 8)
        values = values[group, :, unit, row, :, lower].view(-1, 2, 2, 8, columns // COLUMNS, 4, 8)
        scales = self.scales.view(torch.uint8)
        if self.scales.shape[1] == 1:
            scales = scales.view(-1, columns // COLUMNS, 2, 8, 2, 2)[group, :, unit, row, lower]
        else:
            scales = scales.view(-1, columns // COLUMNS, 2, 2, 8, 4)[group, :, lower, unit, row]
        return Float4Fragments(
            (count, columns),
            values.permute(0, 4, 1, 3, 5, 2, 6).reshape(-1, 128),
            _scale_fragments(scales.flatten(1), 32 // self.scales.shape[1]),
            None if self.row_scales is None else self.row_scales[index[:count]],
            self.shift,
            self.lift,
            self.lift_back,
        )

    def rows(self, start: int, stop: int | None = None) -> "Float4Fragments":
        stop = self.size[0] if stop is None else stop
        return self.select(torch.arange(start, stop, device=self.values.device))


def fits(weight: Float4Matrix) -> bool:
    rows, columns = weight.shape
    return rows % (2 * ROWS) == 0 and columns % COLUMNS == 0  # so that gates are whole, too


def from_mxfp4(weight: Mxfp4Matrix) -> Float4Fragments:
    """Exponents are lowered where the largest would be none of bfloat16."""
    lowered = max(0, int(weight.scales.max()) - 128)
    codes = weight.scales.int()
    least = lowered - 125
    values = _fragments(weight.values, codes < least, None)
    scales = _scale_fragments(codes.clamp_min(least).to(torch.uint8), weight.group)
    lift = (126 - lowered) << 7
    return Float4Fragments(weight.shape, values, scales, None, 7, lift, 2.0**lowered)


def from_nvfp4(weight: Nvfp4Matrix) -> Float4Fragments:
    """Scales with five bits of exponent, among which the subnormal ones of e4m3 are none."""
    scales = weight.scales.float()
    mantissa, exponent = torch.frexp(scales.abs())
    codes = ((exponent + 9) << 3) + ((2 * mantissa - 1) * 8).int()
    nothing = scales == 0
    values = _fragments(weight.values, nothing, scales < 0)
    packed = _scale_fragments(codes.masked_fill(nothing, 0).to(torch.uint8), weight.group)
    row_scales = weight.global_scales * 2.0**8
    return Float4Fragments(weight.shape, values, packed, row_scales, 4, 235 << 7, 1.0)


def _fragments(values: Tensor, nothing: Tensor, negative: Tensor | None) -> Tensor:
    """values [N, K / 2] uint8 -> [N K / 256, 128] uint8; groups that are nothing become 0."""
    rows, columns = values.shape[0], 2 * values.shape[1]
    out = torch.empty(rows * columns // 256, 128, dtype=torch.uint8, device=values.device)
    step = max(1, _SLICE // (columns * ROWS)) * ROWS
    for start in range(0, rows, step):
        part = slice(start, min(rows, start + step))
        codes = torch.stack((values[part] & 15, values[part] >> 4), -1)
        codes = codes.view(codes.shape[0], nothing.shape[1], -1)
        if negative is not None:
            codes ^= negative[part].unsqueeze(-1).to(torch.uint8) << 3
        codes = codes.masked_fill(nothing[part].unsqueeze(-1), 0)
        made = _words(codes.view(-1, 2, 2, 8, columns // COLUMNS, 2, 2, 2, 4, 2))
        out[start * columns // 256 : part.stop * columns // 256] = made.view(-1, 128)
    return out


def _words(codes: Tensor) -> Tensor:
    """[group, unit, row 8, row 1, chunk, word, 16, 8, thread, 1] -> bytes of fragments."""
    halves = torch.zeros((), dtype=torch.int32, device=codes.device)
    for number, (sign, magnitude) in enumerate(_PLACES):
        own = codes[..., number // 2, number % 2, :, :].int()
        halves = halves + ((own >> 3 << sign) | ((own & 7) << magnitude))
    # group, unit, row 8, row 1, chunk, word, thread, 1
    ordered = halves.permute(0, 4, 1, 3, 6, 2, 5, 7).contiguous()
    return ordered.to(torch.int16).view(torch.uint8)


def _scale_fragments(scales: Tensor, group: int) -> Tensor:
    """scales [N, K / group] uint8 -> [N K / 1024, words, 16] int32, a word being four of them."""
    rows, each = scales.shape[0], COLUMNS // group
    apart = scales.view(rows // ROWS, 2, 2, 8, scales.shape[1] // each, each)
    # group, unit, row 8, row 1, chunk, scale
    order = (0, 4, 1, 3, 2, 5) if group == 32 else (0, 4, 2, 1, 3, 5)
    ordered = apart.permute(order).reshape(-1, 4).view(torch.int32)
    return ordered.view(-1, 32 // group, 16)
