"""Recipes that compute a loss for each draft position, in order.

An autoregressive head reads its own hidden states from the second draft position on, so it is also
trained on them: training-time test (EAGLE-3, Li et al. 2025, arXiv 2503.01840, section 3.2;
FastMTP does likewise).
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.speculative.heads.feature_rows import FeatureNetwork
from slipstream.train.batches import TrainingBatch
from slipstream.train.dense import DenseContext
from slipstream.train.losses import Agreement, agreement, distillation, is_top, weighted_mean
from slipstream.train.recipe import BatchLoss, Config, Recipe
from slipstream.train.target import TargetDistribution


@dataclass(frozen=True, eq=False)
class DraftPosition:
    """One draft position of a batch with N rows.

    Attributes:
        logits: [N, Vd] float32, the drafter's logits.
        target: the target's predictions for the same tokens.
        weight: [N] float32, 0 for rows after the sequence's end or not to be learned.
    """

    logits: Tensor
    target: TargetDistribution
    weight: Tensor


class ChainRecipe(Recipe[Config]):
    """Trains draft positions in order; the loss of position k has the weight decay^k."""

    @abstractmethod
    def positions(self, batch: TrainingBatch) -> Iterable[DraftPosition]:
        """The draft positions in order."""

    def random_positions(
        self, batch: TrainingBatch, generator: torch.Generator
    ) -> Iterable[DraftPosition]:
        """The draft positions to train; kinds that sample them override this."""
        return self.positions(batch)

    def training_loss(self, batch: TrainingBatch, generator: torch.Generator) -> BatchLoss:
        total = torch.zeros((), device=batch.token_ids.device)
        accuracy, weights = [], 0.0
        for index, one in enumerate(self.random_positions(batch, generator)):
            loss = distillation(one.logits, one.target, one.weight, self.argmax_weight)
            share = self.decay**index
            total = total + share * loss
            weights += share
            accuracy.append(weighted_mean(is_top(one.logits, one.target), one.weight))
        return BatchLoss(total / weights, torch.stack(accuracy))

    def evaluate(self, batch: TrainingBatch) -> tuple[list[Agreement], Tensor]:
        """See `Recipe`; the weight of a draft is the product of its positions' weights."""
        found, weight = [], torch.ones((), device=batch.token_ids.device)
        for one in self.positions(batch):
            found.append(agreement(one.logits, one.target))
            weight = weight * one.weight
        return found, weight


def unroll(
    network: FeatureNetwork, num_layers: int, batch: TrainingBatch, count: int
) -> Iterator[DraftPosition]:
    """The first `count` positions of drafts after all tokens, with teacher forcing."""
    size, length = batch.shape
    device = batch.token_ids.device

    def but_last(states: Tensor) -> Tensor:
        return states[:, :-1].flatten(0, 1)

    states = batch.states
    features = network.project(but_last(states.hidden), [*map(but_last, states.streams)])
    context = DenseContext(size, num_layers, is_chain=True)
    for position in range(count):
        # A row has token t and the feature of t - 1; at position k both are k tokens later.
        token = torch.arange(1, length, device=device) + position
        exists = token < length
        token = token.clamp_max(length - 1)
        ids = batch.token_ids[:, token].flatten()
        normed, features = network(ids, features, context.rows(token), context.caches)
        weight = (batch.weight[:, token] * exists).flatten()
        target = batch.predictions.rows(batch.index(token))
        yield DraftPosition(network.head(normed), target, weight)
