"""Drafts whose positions are predicted in order, each with its own loss.

A head that drafts token by token reads its own hidden states from the second position on, so it is
trained on them too: training-time test (EAGLE-3, Li et al. 2025, arXiv 2503.01840, section 3.2;
FastMTP trains the same way).
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.cache.spec import LayerCache
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.layers.embedding import LanguageModelHead
from slipstream.train.batches import Batch
from slipstream.train.dense import DenseContext
from slipstream.train.losses import Agreement, agreement, distillation, top_accuracy
from slipstream.train.recipe import BatchLoss, Config, Recipe
from slipstream.train.target import TargetDistribution


class ChainNetwork(Protocol):
    """The network of a head that drafts token by token."""

    @property
    def head(self) -> LanguageModelHead: ...

    def project(self, hidden: Tensor, streams: Sequence[Tensor]) -> Tensor:
        """[T, H] features of the target's pass."""

    def __call__(
        self, token_ids: Tensor, features: Tensor, inputs: PassInputs, caches: Sequence[LayerCache]
    ) -> tuple[Tensor, Tensor]:
        """(what enters the lm_head, next features), [T, H]."""


@dataclass(frozen=True, eq=False)
class DraftPosition:
    """One position of the drafts of a batch, [N] rows.

    Attributes:
        logits: [N, Vd] float32, the drafter's.
        weight: [N] float32, 0 where the sequence ends before it or nothing is to be learned.
    """

    logits: Tensor
    target: TargetDistribution
    weight: Tensor


class ChainRecipe(Recipe[Config]):
    """Trains draft positions in order; the loss of position k counts decay^k."""

    @abstractmethod
    def positions(self, batch: Batch) -> Iterable[DraftPosition]:
        """The draft positions in order."""

    def random_positions(self, batch: Batch, generator: torch.Generator) -> Iterable[DraftPosition]:
        """The positions to train, for kinds that draw them at random."""
        del generator
        return self.positions(batch)

    def training_loss(self, batch: Batch, generator: torch.Generator) -> BatchLoss:
        total = torch.zeros((), device=batch.token_ids.device)
        accuracy, weights = [], 0.0
        for index, one in enumerate(self.random_positions(batch, generator)):
            loss = distillation(one.logits, one.target, one.weight, self.argmax_weight)
            share = self.decay**index
            total = total + share * loss
            weights += share
            accuracy.append(top_accuracy(one.logits, one.target, one.weight))
        return BatchLoss(total / weights, torch.stack(accuracy))

    def evaluate(self, batch: Batch) -> tuple[list[Agreement], Tensor]:
        """A draft counts if all of its positions do."""
        found, weight = [], torch.ones((), device=batch.token_ids.device)
        for one in self.positions(batch):
            found.append(agreement(one.logits, one.target))
            weight = weight * one.weight
        return found, weight


def unroll(
    network: ChainNetwork, num_layers: int, batch: Batch, count: int
) -> Iterator[DraftPosition]:
    """The first `count` positions of drafts after all tokens, over the text's own tokens."""
    size, length = batch.shape
    device = batch.token_ids.device

    def but_last(states: Tensor) -> Tensor:
        return states[:, :-1].flatten(0, 1)

    states = batch.states
    features = network.project(but_last(states.hidden), [*map(but_last, states.streams)])
    context = DenseContext(size, num_layers, is_chain=True)
    for position in range(count):
        # The row of token t takes the feature of t - 1; at position k it has moved on by k tokens.
        token = torch.arange(1, length, device=device) + position
        exists = token < length
        token = token.clamp_max(length - 1)
        ids = batch.token_ids[:, token].flatten()
        normed, features = network(ids, features, context.rows(token), context.caches)
        weight = (batch.weight[:, token] * exists).flatten()
        target = batch.predictions.rows(batch.index(token))
        yield DraftPosition(network.head(normed), target, weight)
