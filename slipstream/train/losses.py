"""What a draft loses against the target, and how far it would be accepted."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.train.target import Wanted


def distillation(
    logits: Tensor, wanted: Wanted, best_column: Tensor, weight: Tensor, argmax_weight: float
) -> Tensor:
    """The mean loss over rows, a scalar.

    KL(p, q) of the target's p and the drafter's q over the draft vocabulary (Hinton et al. 2015,
    arXiv 1503.02531), mixed with the cross-entropy of the target's first choice, which is all that
    greedy decoding asks for.

    Args:
        logits: [N, Vd] float32, the drafter's.
        best_column: [N] int64, the column of the target's first choice; -1 where the draft
            vocabulary is without it: such a row does not count.
        weight: [N] float32, of the rows.
        argmax_weight: of the cross-entropy, from 0 to 1.
    """
    weight = weight * (best_column >= 0)
    logs = torch.log_softmax(logits, -1)
    p = torch.softmax(wanted.logits.float(), -1)
    # xlogy gives 0 log 0 = 0, and no gradient runs through p.
    divergence = (torch.xlogy(p, p) - p * logs).sum(-1)
    first = -logs.gather(-1, best_column.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    mixed = (1 - argmax_weight) * divergence + argmax_weight * first
    return (mixed * weight).sum() / weight.sum().clamp_min(1.0)


class Columns:
    """The draft vocabulary: which column of a drafter's logits stands for which token.

    Attributes:
        token_ids: [Vd] int64, rising; None: all tokens.
    """

    def __init__(self, token_ids: Tensor | None, vocab_size: int) -> None:
        self.token_ids = token_ids
        self._column: Tensor | None = None
        if token_ids is not None:
            column = token_ids.new_full((vocab_size,), -1)
            column[token_ids] = torch.arange(len(token_ids), device=token_ids.device)
            self._column = column

    def of(self, tokens: Tensor) -> Tensor:
        """The column of each token; -1 for those that are not drafted."""
        return tokens if self._column is None else self._column[tokens]


@dataclass(frozen=True, eq=False)
class Agreement:
    """How one place of a draft fares against the target, row by row.

    Attributes:
        greedy: [N] float32, 1 where the first choices are equal.
        sampled: [N] float32, the sum of min(p, q): the chance that a sampled token is accepted.
    """

    greedy: Tensor
    sampled: Tensor


@torch.no_grad()
def agreement(logits: Tensor, wanted: Wanted, best_column: Tensor) -> Agreement:
    """Args as in `distillation`."""
    greedy = (logits.argmax(-1) == best_column).float()
    p = torch.exp(wanted.logits.float() - wanted.log_total.unsqueeze(-1))
    return Agreement(greedy, torch.minimum(p, torch.softmax(logits, -1)).sum(-1))


@dataclass
class ChainAcceptance:
    """Simulated acceptance of drafts, summed over rows of held-out sequences.

    A draft begins behind every token of the text. Its place k is reached if the places before were
    accepted: with the same first choice (greedy), or by the rule of speculative sampling. Behind
    it stands the text's own token, whatever was drafted.

    Attributes:
        drafts: how many.
        greedy, sampled: [K], how many places k were accepted, or are expected to be.
    """

    drafts: float
    greedy: list[float]
    sampled: list[float]

    @staticmethod
    def none(width: int) -> "ChainAcceptance":
        return ChainAcceptance(0.0, [0.0] * width, [0.0] * width)

    def add(self, places: Sequence[Agreement], weight: Tensor) -> None:
        """Take in drafts that begin at rows with a weight of 1, their places in order."""
        self.drafts += float(weight.sum())
        greedy, sampled = weight, weight
        for index, place in enumerate(places):
            greedy, sampled = greedy * place.greedy, sampled * place.sampled
            self.greedy[index] += float(greedy.sum())
            self.sampled[index] += float(sampled.sum())

    @property
    def greedy_length(self) -> float:
        """Simulated AL at temperature 0."""
        return 1 + sum(self.greedy) / max(self.drafts, 1.0)

    @property
    def sampled_length(self) -> float:
        """Simulated AL at temperature 1."""
        return 1 + sum(self.sampled) / max(self.drafts, 1.0)

    def rates(self) -> list[float]:
        """Of place k: accepted greedily, as a share of all drafts."""
        return [count / max(self.drafts, 1.0) for count in self.greedy]
