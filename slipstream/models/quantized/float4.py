"""Matrices of four-bit floats as checkpoints store them, two columns a byte, the even one below.

MXFP4  scales [N, K / 32] e8m0, as such or as bytes
NVFP4  scales [N, K / 16] e4m3, and one float32 for the whole
"""

import torch
from torch import Tensor

from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix
from slipstream.models.quantized.module import StoredModule

BYTES = (torch.uint8,)
POWERS = (torch.uint8, torch.float8_e8m0fnu)
_NAN = 255  # of e8m0
_SCALARS = (), (1,), (1, 1)


def read_mxfp4(
    module: StoredModule, rows: int, columns: int, values: str, scales: str
) -> Mxfp4Matrix:
    """A matrix whose tensors have these endings."""
    group = Mxfp4Matrix.group
    module.require_groups(columns, group)
    found = module.take(values, BYTES, (rows, columns // 2), stays=True)
    powers = module.take(scales, POWERS, (rows, columns // group), stays=True).view(torch.uint8)
    require_powers(module, scales, powers)
    return Mxfp4Matrix(found, powers)


def require_powers(module: StoredModule, scales: str, powers: Tensor) -> None:
    """Raise CheckpointError where a scale of e8m0 is no number."""
    if bool((powers == _NAN).any()):
        raise module.error(
            f"holds {_NAN}, which is NaN, in the scales {module.full_name(scales)}; copy or "
            "download the file again, or use another checkpoint"
        )


def read_nvfp4(
    module: StoredModule, rows: int, columns: int, values: str, whole: str, divides: bool
) -> Nvfp4Matrix:
    """A matrix whose values and global scale have these endings.

    Args:
        divides: the global scale is what numbers are divided by, and else a factor.
    """
    group = Nvfp4Matrix.group
    module.require_groups(columns, group)
    found = module.take(values, BYTES, (rows, columns // 2), stays=True)
    scales = module.take(
        "weight_scale", (torch.float8_e4m3fn,), (rows, columns // group), stays=True
    )
    shared = module.take_scales(whole, *_SCALARS).flatten()
    if not float(shared) > 0:
        raise module.error(
            f"holds {float(shared)} in {module.full_name(whole)}, where a global scale is above 0; "
            "use another checkpoint"
        )
    shared = shared.reciprocal() if divides else shared
    return Nvfp4Matrix(found, scales, shared.expand(rows).contiguous())
