"""Norms and activations in C++. Shapes and meanings: `kernels/composition.py`."""

import _slipstream_cpu as cpp
import torch
from torch import Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    width = x.shape[-1]
    cpp.norm(x.reshape(-1, width), weight, eps, out.view(-1, width))
    return out


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, added = torch.empty_like(x), torch.empty_like(x)
    cpp.add_norm(x, residual, weight, eps, out, added)
    return out, added


def gated_activation(gate_up: Tensor) -> Tensor:
    out = gate_up.new_empty((len(gate_up), gate_up.shape[1] // 2))
    cpp.gated(gate_up, out)
    return out
