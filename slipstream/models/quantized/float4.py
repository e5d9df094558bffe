"""Reads MXFP4 and NVFP4 matrices. A byte has two columns, the even one in the lower half.

MXFP4  scales [N, K / 32], e8m0 or uint8 with the same bits
NVFP4  scales [N, K / 16] e4m3, and one float32 global scale
"""

import torch
from torch import Tensor

from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix
from slipstream.models.quantized.module import StoredModule

BYTES = (torch.uint8,)
POWERS = (torch.uint8, torch.float8_e8m0fnu)
_NAN = 255  # NaN in e8m0
_SCALARS = (), (1,), (1, 1)


def read_mxfp4(
    module: StoredModule, rows: int, columns: int, values: str, scales: str
) -> Mxfp4Matrix:
    """Read an MXFP4 matrix [rows, columns]; `values` and `scales` are tensor name endings."""
    group = Mxfp4Matrix.group
    module.require_groups(columns, group)
    found = module.take(values, BYTES, (rows, columns // 2), stays=True)
    powers = module.take(scales, POWERS, (rows, columns // group), stays=True).view(torch.uint8)
    require_powers(module, scales, powers)
    return Mxfp4Matrix(found, powers)


def require_powers(module: StoredModule, scales: str, powers: Tensor) -> None:
    """Raise CheckpointError if an e8m0 scale is NaN."""
    if bool((powers == _NAN).any()):
        raise module.error(
            f"holds {_NAN}, which is NaN, in the scales {module.full_name(scales)}; copy or "
            "download the file again, or use another checkpoint"
        )


def read_nvfp4(
    module: StoredModule, rows: int, columns: int, values: str, whole: str, divides: bool
) -> Nvfp4Matrix:
    """Read an NVFP4 matrix [rows, columns].

    Args:
        values, whole: name endings of the packed values and the global scale.
        divides: weights are divided by the global scale instead of multiplied.
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
