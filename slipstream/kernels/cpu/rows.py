"""Norms and activations in C++ (`csrc/rows.h`). Shapes: `kernels/ops.py`.

Intermediate results are rounded as in the reference: a sum before its norm, and a gate before the
multiplication.
"""

import _slipstream_cpu as cpp
import torch
from torch import Tensor

from slipstream.kernels.norm import Activation


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    cpp.norm(rows, weight, eps, out)
    return out.view(x.shape)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [T, H] -> (norm(x + residual), x + residual)."""
    both = torch.empty((2, *x.shape), dtype=x.dtype)
    normed, added = both.unbind()
    cpp.add_norm(x, residual, weight, eps, normed, added)
    return normed, added


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Computed with a gate of ones, so that a row's bits depend only on the row."""
    return gated_activation(torch.cat((x, torch.ones_like(x)), -1), activation)


def gated_activation(gate_up: Tensor, activation: Activation = Activation.SILU) -> Tensor:
    out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype)
    cpp.gated(gate_up, activation.value, out)
    return out
