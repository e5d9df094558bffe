"""What PARD and P-EAGLE share in training: passes over known tokens and chains of masks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.train.batches import Batch
from slipstream.train.losses import Agreement, agreement, distillation
from slipstream.train.places import ParallelRows, dropped_rows, sampled_rows
from slipstream.train.recipe import Lesson

DROP_RATE = 0.7  # of chains, from place to place, where nothing else is asked for
_TEST_STEP = 8  # tokens between two chains that are validated

# Logits [B, Q, Vd] of rows, which are the same in every sequence of the batch.
Network = Callable[[Batch, ParallelRows], Tensor]


@dataclass(frozen=True)
class ParallelLesson:
    """How chains of masks are learned.

    Attributes:
        first: token that has a row.
        places: K.
        rate: see `dropped_rows`.
        decay: place i counts by decay^i.
    """

    first: int
    places: int
    rate: float
    decay: float
    argmax_weight: float

    def learn(self, network: Network, batch: Batch, generator: torch.Generator) -> Lesson:
        """One pass; all rows together."""
        size, length = batch.shape
        host_rows = dropped_rows(self.first, length, self.places, self.rate, generator)
        rows = _on(host_rows, batch.token_ids.device)
        logits = network(batch, rows)
        index = _index(size, length, rows.positions)
        depth = rows.depth.repeat(size)
        weight = batch.follows.flatten()[index]
        loss = distillation(
            logits.flatten(0, 1),
            batch.wanted.rows(index),
            batch.best_column[index],
            weight * self.decay**depth,
            self.argmax_weight,
        )
        equal = logits.detach().flatten(0, 1).argmax(-1) == batch.best_column[index]
        counts = [weight * (depth == place) for place in range(self.places)]
        shares = [(equal * count).sum() / count.sum().clamp_min(1.0) for count in counts]
        return Lesson(loss, torch.stack(shares))

    def test(self, network: Network, batch: Batch) -> tuple[list[Agreement], Tensor]:
        """Drafts behind some of the tokens."""
        size, length = batch.shape
        host_rows, host_ends = sampled_rows(self.first, length, self.places, _TEST_STEP)
        device = batch.token_ids.device
        rows, ends = _on(host_rows, device), host_ends.to(device)
        logits = network(batch, rows)
        known = length - self.first
        chain = known + torch.arange(len(ends), device=device) * (self.places - 1)
        found = []
        weight = torch.ones(size * len(ends), device=device)
        for place in range(self.places):
            row = ends - self.first if place == 0 else chain + place - 1
            index = _index(size, length, ends + place)
            found.append(
                agreement(
                    logits[:, row].flatten(0, 1), batch.wanted.rows(index), batch.best_column[index]
                )
            )
            weight = weight * batch.follows.flatten()[index]
        return found, weight


def _on(rows: ParallelRows, device: torch.device) -> ParallelRows:
    return ParallelRows(rows.anchor.to(device), rows.depth.to(device))


def _index(size: int, length: int, positions: Tensor) -> Tensor:
    """Rows of a batch [B * S] at these positions [Q] of every sequence, [B * Q]."""
    sequence = torch.arange(size, device=positions.device).unsqueeze(1) * length
    return (sequence + positions).flatten()
