"""MXFP4: four-bit floats in groups of 32 columns; each group has a power of two as its scale.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3 and 6.3.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.formats.float4 import Float4Matrix, Float4Rounding, round_groups

SCALE_BIAS = 127  # a stored scale s means 2 ** (s - 127)
_LARGEST_EXPONENT = 2  # of e2m1


@dataclass(frozen=True, eq=False)
class Mxfp4Matrix(Float4Matrix):
    """A weight [N, K] of e2m1 numbers times powers of two.

    Attributes:
        values: [N, K / 2] uint8, two columns a byte, the even one in the lower half.
        scales: [N, K / 32] uint8, e8m0: s means 2 ** (s - 127); never 255, which is NaN.
    """

    group = 32
    kept_on = frozenset({"cpu", "cuda"})

    def group_scales(self) -> Tensor:
        return self.scales.view(torch.float8_e8m0fnu).float()


@dataclass(frozen=True)
class ToMxfp4(Float4Rounding):
    """Rounds to an `Mxfp4Matrix`.

    A group is scaled so that its largest magnitude has the exponent of 4 and 6, the largest e2m1
    numbers; numbers that are then beyond 6 become 6.
    """

    weight = Mxfp4Matrix
    words = "four-bit floats (e2m1) with a power of two for each 32 columns"

    def round(self, matrix: Tensor) -> Mxfp4Matrix:
        return Mxfp4Matrix(*round_groups(matrix, Mxfp4Matrix.group, torch.uint8, _power_of_two))


def _power_of_two(largest: Tensor) -> tuple[Tensor, Tensor]:
    # The smallest power is excluded: it is subnormal in float32 and bfloat16.
    exponent = (torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT).clamp_min(1 - SCALE_BIAS)
    return exponent + SCALE_BIAS, torch.ldexp(torch.ones_like(largest), -exponent)
