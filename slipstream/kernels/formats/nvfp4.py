"""NVFP4: four-bit floats in groups of 16 columns with e4m3 scales, and a global scale."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.formats.float4 import FLOAT4_MAX, Float4Matrix, Float4Rounding, round_groups
from slipstream.kernels.formats.float8 import FLOAT8_MAX
from slipstream.kernels.formats.weight import rounding_slices


@dataclass(frozen=True, eq=False)
class Nvfp4Matrix(Float4Matrix):
    """A weight [N, K] of e2m1 numbers times scales of groups and a global scale.

    The global scale is stored for each row, since stacked matrices have different ones.

    Attributes:
        values: [N, K / 2] uint8, two columns a byte, the even one in the lower half.
        scales: [N, K / 16] float8_e4m3fn.
        global_scales: [N] float32; a group is multiplied by its scale and the one of its row.
    """

    global_scales: Tensor

    group = 16
    kept_on = frozenset({"cpu", "cuda"})
    needs_float8_unpacked = True  # scales are e4m3

    def group_scales(self) -> Tensor:
        return self.scales.float() * self.global_scales.unsqueeze(-1)


@dataclass(frozen=True)
class ToNvfp4(Float4Rounding):
    """Rounds to an `Nvfp4Matrix` with one global scale.

    The largest magnitude of the matrix becomes 6 * 448, the largest number of the format; the
    largest of each group becomes about 6.
    """

    weight = Nvfp4Matrix
    words = "four-bit floats (e2m1) with an e4m3 scale for each 16 columns"

    def round(self, matrix: Tensor) -> Nvfp4Matrix:
        whole = (_largest(matrix) / (FLOAT4_MAX * FLOAT8_MAX)).clamp_min(
            torch.finfo(torch.float32).tiny
        )

        def scale(largest: Tensor) -> tuple[Tensor, Tensor]:
            stored = (largest / FLOAT4_MAX / whole).clamp_max(FLOAT8_MAX).to(torch.float8_e4m3fn)
            inverse = (stored.float() * whole).reciprocal()
            return stored, inverse.where(stored.float() > 0, 0)

        values, scales = round_groups(matrix, Nvfp4Matrix.group, torch.float8_e4m3fn, scale)
        return Nvfp4Matrix(values, scales, whole.expand(len(matrix)).contiguous())


def _largest(matrix: Tensor) -> Tensor:
    """The largest magnitude, as float32."""
    parts = [matrix[part] for part in rounding_slices(len(matrix), matrix.shape[1], matrix.device)]
    return torch.stack([part.abs().amax() for part in parts]).amax().float()
