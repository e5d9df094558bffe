"""Four-bit floats (e2m1) with a scale for each group of columns: the base of MXFP4 and NVFP4.

The low three bits of a code are the index of a magnitude, the highest bit is the sign.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.formats.four_bits import FourBitMatrix
from slipstream.kernels.formats.int4 import packed
from slipstream.kernels.formats.weight import Rounding, rounding_slices

MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FLOAT4_MAX = MAGNITUDES[-1]
_ODD_ABOVE = (0.25, 1.25, 2.5, 5.0)  # midpoints between magnitudes; a tie goes to the even code
_EVEN_FROM = (0.75, 1.75, 3.5)


@dataclass(frozen=True, eq=False)
class Float4Matrix(FourBitMatrix):
    """A weight [N, K] of e2m1 numbers; `group` columns of a row share a scale.

    Attributes:
        values: [N, K / 2] uint8, two columns a byte, the even one in the lower half.
        scales: [N, K / group], one byte each, which each format interprets in its own way.
    """

    values: Tensor
    scales: Tensor

    def group_scales(self) -> Tensor:
        """[N, K / group] float32: the factor of each group."""
        raise NotImplementedError

    def dequantised(self) -> Tensor:
        magnitudes = torch.tensor(MAGNITUDES, device=self.values.device)
        table = torch.cat([magnitudes, -magnitudes])
        pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], -1)  # [256, 2]
        numbers = F.embedding(self.values.int(), pairs).view(*self.scales.shape, self.group)
        return numbers.mul_(self.group_scales().unsqueeze(-1)).flatten(1)


class Float4Rounding(Rounding):
    """Rounds to a `Float4Matrix`; matrices whose rows are no whole groups stay unquantised."""

    weight: ClassVar[type[Float4Matrix]]
    bits = 4

    @property
    def bytes_per_number(self) -> float:
        return 0.5 + 1 / self.weight.group

    def for_columns(self, columns: int) -> Rounding | None:
        return None if columns % self.weight.group else self


def round_groups(
    matrix: Tensor,
    group: int,
    scale_dtype: torch.dtype,
    choose: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Round to the nearest e2m1 numbers, a few rows at a time in float32.

    Args:
        matrix: [N, K] float.
        choose: maps the largest magnitude of each group [n, K / group] float32 to the stored
            scale, in `scale_dtype`, and the float32 factor that numbers have when they are rounded.

    Returns:
        `values` and `scales` of a `Float4Matrix`.
    """
    rows, columns = matrix.shape
    values = torch.empty((rows, columns // 2), dtype=torch.uint8, device=matrix.device)
    scales = torch.empty((rows, columns // group), dtype=scale_dtype, device=matrix.device)
    for part in rounding_slices(rows, columns, matrix.device):
        groups = matrix[part].float().view(-1, columns // group, group)
        stored, inverse = choose(groups.abs().amax(-1))
        scales[part] = stored
        values[part] = packed(_codes((groups * inverse.unsqueeze(-1)).flatten(1)))
    return values, scales


def _codes(scaled: Tensor) -> Tensor:
    """[N, K] float32 -> [N, K] int8: codes (0 to 15) of the nearest e2m1 numbers.

    Ties go to the even code; numbers beyond the largest magnitude become the largest.
    """
    magnitudes = scaled.abs()
    codes = torch.signbit(scaled).view(torch.int8) * 8
    # Seven comparisons are several times faster than a binary search.
    for middle in _ODD_ABOVE:
        codes += (magnitudes > middle).view(torch.int8)
    for middle in _EVEN_FROM:
        codes += (magnitudes >= middle).view(torch.int8)
    return codes
