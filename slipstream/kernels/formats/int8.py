"""Eight-bit integers with a scale for each row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.formats.weight import (
    PRODUCT_SLICE,
    Rounding,
    RowScaled,
    rounding_slices,
    row_slices,
)

INT8_MAX = 127
# Numbers that are rounded at a time on CPUs. Torch does not share so few among threads, which would
# wait for each other far longer than they work where others keep the machine busy.
CACHED_SLICE = (1 << 15) - 1
_WHOLE = 1.5 * 2.0**23  # from here to 2 ** 24 float32 has the integers and nothing between
_TINY = torch.finfo(torch.float32).tiny * INT8_MAX


@dataclass(frozen=True, eq=False)
class Int8Matrix(RowScaled):
    """A weight [N, K] of integers [N, K] int8, each row times its scale [N] float32.

    Attributes:
        rounds_input: its products also round the other factor: each row of x becomes integers from
            -127 to 127, scaled so that its largest number is one of them, and sums are exact.
    """

    values: Tensor
    scales: Tensor
    rounds_input: bool = False

    def _like(self, values: Tensor, scales: Tensor | None) -> "Int8Matrix":
        assert scales is not None
        return Int8Matrix(values, scales, self.rounds_input)

    @classmethod
    def stack(cls, weights: Sequence[Self]) -> Self | None:
        if any(weight.rounds_input != weights[0].rounds_input for weight in weights):
            return None
        return super().stack(weights)

    def logits(self, x: Tensor) -> Tensor:
        return self._exact_product(x) if self.rounds_input else super().logits(x)

    def _exact_product(self, x: Tensor) -> Tensor:
        """Integers on both sides; float64 holds every sum of such products exactly."""
        values, scales = round_rows(x)
        values = values.double()
        out = torch.empty(x.shape[0], self.shape[0], device=x.device)
        for part in row_slices(*self.shape, PRODUCT_SLICE):
            out[:, part] = F.linear(values, self.values[part].double())
        return out * scales.unsqueeze(-1) * self.scales


@dataclass(frozen=True)
class ToInt8(Rounding):
    """Rounding to an `Int8Matrix`, each row scaled by its largest number.

    Attributes:
        rounds_input: of that matrix.
    """

    rounds_input: bool = False
    bits = 8

    def round(self, matrix: Tensor) -> Int8Matrix:
        values = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
        scales = torch.empty(len(matrix), dtype=torch.float32, device=matrix.device)
        for part in rounding_slices(len(matrix), matrix.shape[1], matrix.device, CACHED_SLICE):
            values[part], scales[part] = round_rows(matrix[part])
        return Int8Matrix(values, scales, self.rounds_input)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, K] as (int8 [N, K], scales [N] float32): the largest number of a row becomes 127.

    Halves go to the even neighbour.
    """
    scales = x.abs().amax(-1).float().clamp_min(_TINY) / INT8_MAX
    scaled = x.float() / scales.unsqueeze(-1)
    return to_nearest(scaled, out=scaled).to(torch.int8), scales


def to_nearest(x: Tensor, out: Tensor) -> Tensor:
    """Float32 numbers below 2 ** 22 as integers in `out`, halves to the even neighbour.

    Torch's own function shares even a few thousand numbers among threads, which takes far longer
    than the work where others keep the machine busy.
    """
    return torch.add(x, _WHOLE, out=out).sub_(_WHOLE)
