"""Draft models: small language models that learn to say what the target says.

Self-distillation (Zhou et al. 2023, arXiv 2310.08461): KL against the target's distribution at
every token, best over text that the target wrote itself (`--generate`).
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.train.batches import Batch
from slipstream.train.dense import dense_rows, no_caches
from slipstream.train.language_model import SHAPE_OPTIONS, build_language_model, planned
from slipstream.train.losses import Agreement, Columns, agreement, distillation
from slipstream.train.places import shifted
from slipstream.train.recipe import Lesson, Order, Workshop

OPTIONS = SHAPE_OPTIONS
LEARNING_RATE = 5e-4
METHOD: dict[str, Any] = {"method": "draft_model"}

PLACES = 4


class DraftRecipe:
    """A draft model in training; see `Recipe`."""

    stream_layers: tuple[int, ...] = ()

    def __init__(self, workshop: Workshop) -> None:
        settings = workshop.settings
        self._places = workshop.order.places
        self._argmax_weight = settings.argmax_weight
        self.model = build_language_model(workshop)
        self.trained, self.export = self.model.trained, self.model.export
        self._vocab_size = workshop.target.config.vocab_size
        self.columns = Columns(None, self._vocab_size)

    def logits(self, batch: Batch) -> Tensor:
        """[B * S, V] of the target's tokens (a drafter may have rows that stand for none)."""
        size, length = batch.shape
        rows = dense_rows(size, torch.arange(length, device=batch.token_ids.device))
        network = self.model.network
        caches = no_caches(self.model.shape.num_layers)
        hidden, _ = network(batch.token_ids.flatten(), rows, caches)
        return network.head(hidden)[:, : self._vocab_size]

    def learn(self, batch: Batch, generator: torch.Generator) -> Lesson:
        del generator  # nothing is left to chance
        logits, weight = self.logits(batch), batch.follows.flatten()
        loss = distillation(logits, batch.wanted, batch.best_column, weight, self._argmax_weight)
        equal = (logits.detach().argmax(-1) == batch.best_column).float()
        share = (equal * weight).sum() / weight.sum().clamp_min(1.0)
        return Lesson(loss, share.unsqueeze(0))

    def test(self, batch: Batch) -> tuple[list[Agreement], Tensor]:
        found = agreement(self.logits(batch), batch.wanted, batch.best_column)
        places = [
            Agreement(
                shifted(found.greedy, batch.shape, place),
                shifted(found.sampled, batch.shape, place),
            )
            for place in range(self._places)
        ]
        weight = torch.ones_like(found.greedy)
        for place in range(self._places):
            weight = weight * shifted(batch.follows.flatten(), batch.shape, place)
        return places, weight


def check(order: Order) -> None:
    """Sizes that make no language model, or a checkpoint of another vocabulary."""
    planned(order)


def build(workshop: Workshop) -> DraftRecipe:
    """A new draft model for the target, or one that goes on from `--init`."""
    return DraftRecipe(workshop)
