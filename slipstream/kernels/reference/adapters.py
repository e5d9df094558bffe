"""Low-rank products of LoRA adapters in plain torch; see `kernels/adapters.py`."""

import torch
from torch import Tensor

from slipstream.kernels.adapters import Adapted


def add_low_rank(y: Tensor, x: Tensor, adapted: Adapted) -> Tensor:
    """Add the low-rank products of x [T, K] to y [T, N], in place.

    Sums are float32 (float64 for float64 rows), and rounded once.
    """
    factors, rank = adapted.factors, adapted.factors.rank
    wide = torch.promote_types(x.dtype, torch.float32)
    for slot in sorted({*adapted.slots.tolist()} - {-1}):
        rows = (adapted.slots == slot).nonzero().squeeze(1)
        inner = x[rows].to(wide) @ factors.down[slot].to(wide).T
        made, start = y[rows].to(wide), 0
        for part, end in enumerate(factors.ends):
            own = inner[:, part * rank : (part + 1) * rank]
            made[:, start:end] += own @ factors.up[slot, :, start:end].to(wide)
            start = end
        y[rows] = made.to(y.dtype)
    return y
