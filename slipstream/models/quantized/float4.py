"""Reads MXFP4 and NVFP4 matrices. A byte has two columns, the even one in the lower half.

MXFP4  scales [N, K / 32], e8m0 or uint8 with the same bits
NVFP4  scales [N, K / 16] e4m3, and one float32 global scale
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix, ToMxfp4
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix, ToNvfp4
from slipstream.models.quantized.module import StoredForm, StoredModule, Tensors

BYTES = (torch.uint8,)
POWERS = (torch.uint8, torch.float8_e8m0fnu)
_NAN = 255  # NaN in e8m0
_SCALARS = (), (1,), (1, 1)


@dataclass(frozen=True)
class Mxfp4Form(StoredForm):
    """MXFP4 in tensors whose names have these endings."""

    values: str
    scales: str

    bits = 4
    words = "mxfp4"
    kind = Mxfp4Matrix
    rounding = ToMxfp4()

    def tensors(self, module: StoredModule, rows: int, columns: int) -> Tensors:
        group = Mxfp4Matrix.group
        module.require_groups(columns, group)
        return {
            "values": module.take(self.values, BYTES, (rows, columns // 2), stays=True),
            "scales": module.take(self.scales, POWERS, (rows, columns // group), stays=True),
        }

    def matrix(self, module: StoredModule, found: Tensors, rows: int, columns: int) -> Mxfp4Matrix:
        powers = found["scales"].view(torch.uint8)
        require_powers(module, self.scales, powers)
        return Mxfp4Matrix(found["values"], powers)


def require_powers(module: StoredModule, scales: str, powers: Tensor) -> None:
    """Raise CheckpointError if an e8m0 scale is NaN."""
    if bool((powers == _NAN).any()):
        raise module.error(
            f"holds {_NAN}, which is NaN, in the scales {module.full_name(scales)}; copy or "
            "download the file again, or use another checkpoint"
        )


@dataclass(frozen=True)
class Nvfp4Form(StoredForm):
    """NVFP4 in addition to `weight_scale`.

    Attributes:
        values, whole: name endings of the values and of the global scale.
        divides: other scales are divided by the global one, not multiplied.
    """

    values: str
    whole: str
    divides: bool

    bits = 4
    words = "nvfp4"
    kind = Nvfp4Matrix
    rounding = ToNvfp4()

    def tensors(self, module: StoredModule, rows: int, columns: int) -> Tensors:
        group = Nvfp4Matrix.group
        module.require_groups(columns, group)
        scales, shape = (torch.float8_e4m3fn,), (rows, columns // group)
        return {
            "values": module.take(self.values, BYTES, (rows, columns // 2), stays=True),
            "scales": module.take("weight_scale", scales, shape, stays=True),
            "whole": module.take_scales(self.whole, *_SCALARS),
        }

    def matrix(self, module: StoredModule, found: Tensors, rows: int, columns: int) -> Nvfp4Matrix:
        shared = found["whole"].flatten()
        if not float(shared) > 0:
            raise module.error(
                f"holds {float(shared)} in {module.full_name(self.whole)}, where a global scale is "
                "above 0; use another checkpoint"
            )
        shared = shared.reciprocal() if self.divides else shared
        return Nvfp4Matrix(found["values"], found["scales"], shared.expand(rows).contiguous())
