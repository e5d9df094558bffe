"""Matmuls, norms and activations in plain torch; see `kernels/ops.py`."""

from torch import Tensor
from torch.nn import functional as F

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
