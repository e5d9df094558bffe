"""The two optimisers of a run: Muon for the matrices, AdamW for everything else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .network import Network
from .settings import Plan

# The quintic whose iteration drives singular values towards one fast (Jordan et al. 2024,
# "Muon: an optimizer for hidden layers in neural networks").
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_MOMENTUM = 0.95


def orthogonalise(gradients: Tensor) -> Tensor:
    """Nearly replace each matrix of a stack by the nearest orthogonal one (Newton-Schulz)."""
    a, b, c = _QUINTIC
    x: Tensor = gradients.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result


class Muon:
    """Momentum with orthogonalised updates, all matrices of one shape at once."""

    def __init__(self, matrices: Sequence[Tensor], decay: float) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.shape].append(matrix)
        self.groups = list(by_shape.values())
        self.momenta = [torch.zeros_like(torch.stack(group)) for group in self.groups]
        self.decay = decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update with Nesterov momentum; wide and tall matrices move equally far."""
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            gradients = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            momentum.lerp_(gradients, 1 - _MOMENTUM)
            update = orthogonalise(gradients.lerp(momentum, _MOMENTUM)).to(gradients.dtype)
            scale = max(1.0, update.shape[1] / update.shape[2]) ** 0.5
            parts = list(update.unbind())
            torch._foreach_mul_(group, 1 - rate * self.decay)
            torch._foreach_add_(group, parts, alpha=-rate * scale)


class Optimisers:
    """Combines both optimisers, with one schedule factor."""

    def __init__(self, network: Network, plan: Plan) -> None:
        named = list(network.model.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in named if p.ndim != 2 or "embed" in name]
        self.plan = plan
        self.muon = Muon(matrices, plan.matrix_decay)
        self.adam = torch.optim.AdamW(
            others, lr=plan.other_rate, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0
        )

    def step(self, factor: float) -> None:
        """Update all parameters with rates times ``factor`` and drop the gradients."""
        self.muon.step(self.plan.matrix_rate * factor)
        for group in self.adam.param_groups:
            group["lr"] = self.plan.other_rate * factor
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for matrices in self.muon.groups:
            for matrix in matrices:
                matrix.grad = None

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint must have."""
        return {"momenta": self.muon.momenta, "adam": self.adam.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the state of a checkpoint."""
        for mine, theirs in zip(self.muon.momenta, state["momenta"], strict=True):
            mine.copy_(theirs)
        self.adam.load_state_dict(state["adam"])
