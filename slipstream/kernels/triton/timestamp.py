"""The GPU's own clock, so that a captured graph can tell how long its parts took."""

import torch
import triton
from torch import Tensor
from triton.language.extra.cuda import globaltimer


@triton.jit
def _timestamp_kernel(out):
    triton.language.store(out, globaltimer())


def timestamp(device: torch.device) -> Tensor:
    """Nanoseconds, a scalar int64."""
    out = torch.empty((), dtype=torch.int64, device=device)
    _timestamp_kernel[(1,)](out, num_warps=1)
    return out
