"""Drafts whose positions are predicted in one pass: the training of PARD and P-EAGLE.

They learn from rows of known tokens and, after every token, from a chain of mask rows. Row i of a
chain stands i tokens after its anchor. Only some rows are trained: of the chains that keep row
i - 1, a random share keeps row i (COD, conditional drop of tokens: PARD, arXiv 2504.18583;
P-EAGLE, arXiv 2602.01469).
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from slipstream.train.batches import TrainingBatch
from slipstream.train.losses import Agreement, agreement, distillation, is_top, weighted_mean
from slipstream.train.recipe import BatchLoss, Config, Recipe

LEAST_SHARE = 0.2  # of the chains, at any depth
_DROP_RATE = 0.7
_EVALUATION_STEP = 8  # tokens between two chains that are evaluated


@dataclass(frozen=True, eq=False)
class ParallelRows:
    """The rows of one sequence, equal for all sequences of a batch.

    Attributes:
        anchor: [Q] int64, the token that the row's chain follows; of a known token itself.
        depth: [Q] int64, its index in the chain; 0 for known tokens, which come first.
    """

    anchor: Tensor
    depth: Tensor

    @property
    def positions(self) -> Tensor:
        """[Q], the positions of the rows in the sequence."""
        return self.anchor + self.depth

    @property
    def mask(self) -> Tensor:
        """[Q, Q] bool: a row sees the known tokens up to its anchor, and its chain up to itself."""
        known = self.depth == 0
        before = known & (self.anchor <= self.anchor.unsqueeze(1))
        own = (self.anchor == self.anchor.unsqueeze(1)) & (self.depth <= self.depth.unsqueeze(1))
        return before | (own & ~known)

    def to(self, device: torch.device) -> "ParallelRows":
        return ParallelRows(
            self.anchor.to(device, non_blocking=True), self.depth.to(device, non_blocking=True)
        )


def dropped_rows(
    first: int, length: int, count: int, rate: float, generator: torch.Generator
) -> ParallelRows:
    """Known tokens from `first` on, and chains of at most `count` - 1 mask rows after them.

    A share rate^i of the tokens, but at least `LEAST_SHARE`, keeps row i.
    """
    tokens = torch.arange(first, length)
    anchors, depths = [tokens], [torch.zeros_like(tokens)]
    kept = tokens
    for depth in range(1, count):
        kept = kept[kept + depth < length]
        wanted = max(rate**depth, LEAST_SHARE) * len(tokens)
        chosen = torch.randperm(len(kept), generator=generator)[: max(1, round(wanted))]
        kept = kept[chosen.sort().values]
        anchors.append(kept)
        depths.append(torch.full_like(kept, depth))
    return ParallelRows(torch.cat(anchors), torch.cat(depths))


def sampled_rows(first: int, length: int, count: int, step: int) -> tuple[ParallelRows, Tensor]:
    """Known tokens with whole chains after every `step`-th of them, and those tokens [A]."""
    tokens = torch.arange(first, length)
    anchors = torch.arange(first, length - count + 1, step)
    depths = torch.arange(1, count)
    anchor = torch.cat((tokens, anchors.repeat_interleave(count - 1)))
    depth = torch.cat((torch.zeros_like(tokens), depths.repeat(len(anchors))))
    return ParallelRows(anchor, depth), anchors


class ParallelRecipe(Recipe[Config]):
    """Trains all draft positions in one pass; position i counts decay^i.

    Attributes:
        FIRST: the first token that has a row.
    """

    FIRST: ClassVar[int] = 0

    @abstractmethod
    def logits(self, batch: TrainingBatch, rows: ParallelRows) -> Tensor:
        """[B, Q, Vd]."""

    def training_loss(self, batch: TrainingBatch, generator: torch.Generator) -> BatchLoss:
        size, length = batch.shape
        count, rate = self.num_draft_tokens, self.plan.settings.drop_rate or _DROP_RATE
        rows = dropped_rows(self.FIRST, length, count, rate, generator)
        rows = rows.to(batch.token_ids.device)
        logits = self.logits(batch, rows).flatten(0, 1)
        index = batch.index(rows.positions)
        depth = rows.depth.repeat(size)
        target, weight = batch.predictions.rows(index), batch.weight.flatten()[index]
        loss = distillation(logits, target, weight * self.decay**depth, self.argmax_weight)
        equal = is_top(logits, target)
        shares = [weighted_mean(equal, weight * (depth == position)) for position in range(count)]
        return BatchLoss(loss, torch.stack(shares))

    def evaluate(self, batch: TrainingBatch) -> tuple[list[Agreement], Tensor]:
        """Drafts after some of the tokens."""
        size, length = batch.shape
        count, device = self.num_draft_tokens, batch.token_ids.device
        rows, anchors = sampled_rows(self.FIRST, length, count, _EVALUATION_STEP)
        anchors = anchors.to(device)
        logits = self.logits(batch, rows.to(device))
        known = length - self.FIRST
        chain = known + torch.arange(len(anchors), device=device) * (count - 1)
        found = []
        weight = torch.ones(size * len(anchors), device=device)
        for position in range(count):
            row = anchors - self.FIRST if position == 0 else chain + position - 1
            index = batch.index(anchors + position)
            chosen = logits[:, row].flatten(0, 1)
            found.append(agreement(chosen, batch.predictions.rows(index)))
            weight = weight * batch.weight.flatten()[index]
        return found, weight
