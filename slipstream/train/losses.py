"""The loss of drafts against the target, and their simulated acceptance."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
        weight: [N] float32; rows whose top token the draft vocabulary lacks count 0.
        argmax_weight: of the cross-entropy, from 0 to 1.
    """
    weight = weight * (target.top >= 0)
    logs = torch.log_softmax(logits, -1)
    p = torch.softmax(target.logits.float(), -1)
    # xlogy gives 0 log 0 = 0, and no gradient runs through p.
    divergence = (torch.xlogy(p, p) - p * logs).sum(-1)
    first = -logs.gather(-1, target.top.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    mixed = (1 - argmax_weight) * divergence + argmax_weight * first
    return weighted_mean(mixed, weight)


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Scalar; 0 where no row has weight."""
    return (values * weight).sum() / weight.sum().clamp_min(1.0)


@torch.no_grad()
def top_accuracy(logits: Tensor, target: TargetDistribution, weight: Tensor) -> Tensor:
    """Scalar, the share of rows whose top token is the target's."""
    return weighted_mean((logits.argmax(-1) == target.top).float(), weight)


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
    greedy = (logits.argmax(-1) == target.top).float()
    p = torch.exp(target.logits.float() - target.logsumexp.unsqueeze(-1))
    return Agreement(greedy, torch.minimum(p, torch.softmax(logits, -1)).sum(-1))


@dataclass
class ChainAcceptance:
    """Simulated acceptance of drafts, summed over rows of held-out sequences.

    A draft starts after every token of the text. Its position k counts if all positions before it
    were accepted: because the top tokens agree (greedy), or by speculative sampling. The text's own
    tokens follow, whatever was drafted.

    Attributes:
        drafts: their number.
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
