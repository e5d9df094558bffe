"""Matmuls, norms and activations in plain torch. Shapes and meanings: `kernels/table.py`."""

import torch
from torch import Tensor
from torch.nn import functional as F

# Weight rows converted to float32 at a time: small enough to stay in a core's cache.
LOGITS_ROWS = 256


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def logits(x: Tensor, weight: Tensor) -> Tensor:
    if weight.dtype == torch.float32:
        return F.linear(x, weight)
    # torch rounds a bf16 product to bf16, which makes ties; so convert slices and keep float32.
    x = x.float()
    out = torch.empty(x.shape[0], weight.shape[0], device=x.device)
    for start in range(0, weight.shape[0], LOGITS_ROWS):
        rows = weight[start : start + LOGITS_ROWS]
        out[:, start : start + LOGITS_ROWS] = F.linear(x, rows.float())
    return out


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm (Zhang and Sennrich 2019)."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    residual = x + residual
    return norm(residual, weight, eps), residual


def gated_activation(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
