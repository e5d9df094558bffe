"""The loss of drafts against the target, and their simulated acceptance."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.train.compiled import fused
from slipstream.train.target import TargetDistribution


def distillation(
    logits: Tensor, target: TargetDistribution, weight: Tensor, argmax_weight: float
) -> Tensor:
    """The weighted mean loss over rows, a scalar.

    KL(p, q) of the target's p and the drafter's q over the draft vocabulary (Hinton et al. 2015,
    arXiv 1503.02531), mixed with the cross-entropy of the target's top token, which is all that
    greedy decoding needs.

    Args:
        logits: [N, Vd] float32, the drafter's.
        weight: [N] float32; 0 for rows whose top token is not in the draft vocabulary.
        argmax_weight: the weight of the cross-entropy, from 0 to 1.
    """
    weight = weight * (target.top >= 0)
    scale = weight / weight.sum().clamp_min(1.0)
    loss: Tensor = _Distillation.apply(logits, target, scale, argmax_weight)  # type: ignore[no-untyped-call]
    return loss


class _Distillation(torch.autograd.Function):
    """The sum of scale * loss. The forward pass also computes the gradient: both need the same
    exponentials, and autograd would keep several tensors of the logits' size."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: TargetDistribution, scale: Tensor, argmax_weight: float
    ) -> Tensor:
        top = target.top.clamp_min(0)
        loss, gradient = _loss_and_gradient(logits, target.logits, top, scale, argmax_weight)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0], None, None, None


@fused
def _loss_and_gradient(
    logits: Tensor, wanted: Tensor, top: Tensor, scale: Tensor, argmax_weight: float
) -> tuple[Tensor, Tensor]:
    """The sum over rows, and its gradient [N, Vd] to the logits.

    A row's gradient is q - (1 - a) p - a e: of the cross-entropies with p and with the top token e,
    since p does not depend on the logits.
    """
    logs = torch.log_softmax(logits, -1)
    wide = wanted.float()
    log_p = torch.log_softmax(wide, -1)
    p = log_p.exp()
    column = top.unsqueeze(-1)
    # Finite where p is 0, as long as the target's logits are.
    divergence = (p * (log_p - logs)).sum(-1)
    mixed = (1 - argmax_weight) * divergence - argmax_weight * logs.gather(-1, column).squeeze(-1)
    first = torch.arange(logits.shape[-1], device=logits.device) == column
    gradient = logs.exp() - (1 - argmax_weight) * p - argmax_weight * first
    return (mixed * scale).sum(), gradient * scale.unsqueeze(-1)


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Scalar; 0 where no row has weight."""
    return (values * weight).sum() / weight.sum().clamp_min(1.0)


@torch.no_grad()
def is_top(logits: Tensor, target: TargetDistribution) -> Tensor:
    """[N] float32, 1 where the drafter's top token is the target's."""
    return (_largest(logits) == target.top).float()


@fused
def _largest(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


@dataclass(frozen=True, eq=False)
class Agreement:
    """How likely the target accepts the tokens at one position of drafts, row by row.

    Attributes:
        greedy: [N] float32, 1 where both have the same top token.
        sampled: [N] float32, the sum of min(p, q): the probability that a sampled token is
            accepted.
    """

    greedy: Tensor
    sampled: Tensor


@torch.no_grad()
def agreement(logits: Tensor, target: TargetDistribution) -> Agreement:
    """Args as in `distillation`."""
    p = torch.exp(target.logits.float() - target.logsumexp.unsqueeze(-1))
    return Agreement(is_top(logits, target), torch.minimum(p, torch.softmax(logits, -1)).sum(-1))


@dataclass
class ChainAcceptance:
    """Simulated acceptance of drafts, summed over rows of held-out sequences.

    A draft starts after every token of the text. Its position k counts if all positions before it
    were accepted: because the top tokens agree (greedy), or by speculative sampling. The text's own
    tokens follow, whatever was drafted.

    Attributes:
        drafts: number of drafts.
        greedy, sampled: [K], how many drafts were accepted up to position k, or are expected to be.
    """

    drafts: float
    greedy: list[float]
    sampled: list[float]

    def add(self, positions: Sequence[Agreement], weight: Tensor) -> None:
        """Count drafts, given their positions in order and a weight of 0 or 1 for each draft."""
        self.drafts += float(weight.sum())
        greedy, sampled = weight, weight
        for index, position in enumerate(positions):
            greedy, sampled = greedy * position.greedy, sampled * position.sampled
            self.greedy[index] += float(greedy.sum())
            self.sampled[index] += float(sampled.sum())

    @property
    def greedy_length(self) -> float:
        """Simulated acceptance length at temperature 0."""
        return 1 + sum(self.greedy) / max(self.drafts, 1.0)

    @property
    def sampled_length(self) -> float:
        """Simulated acceptance length at temperature 1."""
        return 1 + sum(self.sampled) / max(self.drafts, 1.0)

    def rates(self) -> list[float]:
        """For each position, the share of drafts that are accepted up to it greedily."""
        return [count / max(self.drafts, 1.0) for count in self.greedy]
