"""Norms, activations and low-rank products in C++ (`csrc/rows.h`, `csrc/low_rank.h`). Shapes:
`kernels/ops.py`.

Intermediate results are rounded as in the reference: a sum before its norm, and a gate before the
multiplication.
"""

import _slipstream_cpu as cpp
import torch
from torch import Tensor

from slipstream.kernels.adapters import Adapted, LowRank
from slipstream.kernels.devices import CPP_DTYPES
from slipstream.kernels.norm import Activation
from slipstream.kernels.reference import dense


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


def add_low_rank(y: Tensor, x: Tensor, adapted: Adapted) -> Tensor:
    """Add the low-rank products of x [T, K] to y [T, N], in place."""
    if x.dtype not in CPP_DTYPES:
        return dense.add_low_rank(y, x, adapted)
    x = x if x.stride(-1) == 1 else x.contiguous()
    cpp.add_low_rank(low_rank_of(adapted.factors), x, adapted.slots.contiguous(), y)
    return y


def low_rank_of(factors: LowRank) -> "cpp.LowRank":
    """The C++ object for these factors, made once."""
    found = factors.packed.get("cpu")
    if not isinstance(found, cpp.LowRank):
        found = factors.packed["cpu"] = cpp.LowRank(factors.down, factors.up, list(factors.ends))
    return found
