"""Matmuls, norms, activations and low-rank products in plain torch; see `kernels/ops.py`."""

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.adapters import Adapted
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.norm import Activation


def linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    return weight.linear(x, bias)


def logits(x: Tensor, weight: Weight) -> Tensor:
    return weight.logits(x)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm (Zhang and Sennrich 2019)."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    residual = x + residual
    return norm(residual, weight, eps), residual


def activated(x: Tensor, activation: Activation) -> Tensor:
    return F.silu(x) if activation is Activation.SILU else F.gelu(x, approximate="tanh")


def gated_activation(gate_up: Tensor, activation: Activation = Activation.SILU) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activated(gate, activation) * up


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
