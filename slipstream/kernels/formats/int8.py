"""Eight-bit integers with a scale for each row."""

from dataclasses import dataclass

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
# Numbers that are rounded at a time on CPUs: so few that torch uses one thread. On a busy machine
# several threads would wait for each other far longer than they work.
CACHED_SLICE = (1 << 15) - 1
_WHOLE = 1.5 * 2.0**23  # from here to 2 ** 24, all float32 numbers are integers
_TINY = torch.finfo(torch.float32).tiny * INT8_MAX


@dataclass(frozen=True, eq=False)
class Int8Matrix(RowScaled):
    """A weight [N, K]: int8 integers times a float32 scale [N] for each row.

    Attributes:
        rounds_input: products also round activations: each row of x becomes integers from -127
            to 127, scaled by its largest magnitude; sums are exact.
    """

    values: Tensor
    scales: Tensor
    rounds_input: bool = False

    kept_on = frozenset({"cpu", "cuda"})

    def logits(self, x: Tensor) -> Tensor:
        return self._exact_product(x) if self.rounds_input else super().logits(x)

    def _exact_product(self, x: Tensor) -> Tensor:
        """The product of two integer matrices, exact in float64."""
        values, scales = round_rows(x)
        values = values.double()
        out = torch.empty(x.shape[0], self.shape[0], device=x.device)
        for part in row_slices(*self.shape, PRODUCT_SLICE):
            out[:, part] = F.linear(values, self.values[part].double())
        return out * scales.unsqueeze(-1) * self.scales


@dataclass(frozen=True)
class ToInt8(Rounding):
    """Rounds to an `Int8Matrix`, each row scaled by its largest magnitude.

    Attributes:
        rounds_input: see `Int8Matrix`.
    """

    rounds_input: bool = False

    weight = Int8Matrix
    bits = 8

    @property
    def words(self) -> str:
        also = ", activations too" if self.rounds_input else ""
        return f"integers of 8 bits with a scale for each row{also}"

    @property
    def is_for_gpus(self) -> bool:  # type: ignore[override]
        return not self.rounds_input

    def round(self, matrix: Tensor) -> Int8Matrix:
        values = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
        scales = torch.empty(len(matrix), dtype=torch.float32, device=matrix.device)
        for part in rounding_slices(len(matrix), matrix.shape[1], matrix.device, CACHED_SLICE):
            values[part], scales[part] = round_rows(matrix[part])
        return Int8Matrix(values, scales, self.rounds_input)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [N, K] to (int8 [N, K], scales [N] float32); a row's largest magnitude becomes 127.

    Ties go to the even integer.
    """
    scales = x.abs().amax(-1).float().clamp_min(_TINY) / INT8_MAX
    scaled = x.float() / scales.unsqueeze(-1)
    return to_nearest(scaled, out=scaled).to(torch.int8), scales


def to_nearest(x: Tensor, out: Tensor) -> Tensor:
    """Round float32 numbers below 2 ** 22 to integers in `out`, ties to the even integer.

    Torch's own function uses several threads even for a few thousand numbers, which on a busy
    machine takes far longer than the work.
    """
    return torch.add(x, _WHOLE, out=out).sub_(_WHOLE)
