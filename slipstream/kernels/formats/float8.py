"""FP8 weights (e4m3) with a scale for each row."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.formats.weight import Rounding, RowScaled, row_slices

FLOAT8_MAX = 448.0  # of e4m3
_SLICE = 1 << 24  # how many numbers are in float32 at a time during rounding


@dataclass(frozen=True, eq=False)
class Float8Matrix(RowScaled):
    """A weight [N, K] in e4m3 with a float32 scale for each of its rows [N].

    Products also round activations to e4m3: each row of x is scaled so that its largest magnitude
    becomes 448, the largest of e4m3.
    """

    values: Tensor
    scales: Tensor

    kept_on = frozenset({"cuda"})
    needs_float8 = True

    def logits(self, x: Tensor) -> Tensor:
        values, scales = round_rows(x)
        product = F.linear(values.float(), self.values.float())
        return product * scales.unsqueeze(-1) * self.scales


@dataclass(frozen=True)
class ToFloat8(Rounding):
    """Rounds to a `Float8Matrix`, each row scaled by its largest magnitude."""

    weight = Float8Matrix
    bits = 8
    words = "e4m3 with a scale for each row, activations too"

    def round(self, matrix: Tensor) -> Float8Matrix:
        values = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn, device=matrix.device)
        scales = torch.empty(len(matrix), dtype=torch.float32, device=matrix.device)
        for part in row_slices(len(matrix), matrix.shape[1], _SLICE):
            values[part], scales[part] = round_rows(matrix[part])
        return Float8Matrix(values, scales)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [N, K] to (e4m3 [N, K], scales [N] float32); each row's largest becomes 448."""
    largest = x.abs().amax(-1).float().clamp_min(torch.finfo(torch.float32).tiny * FLOAT8_MAX)
    scales = largest / FLOAT8_MAX
    return (x.float() / scales.unsqueeze(-1)).to(torch.float8_e4m3fn), scales
