"""Chains of drafting heads over whole sequences: training-time test.

A head that drafts token by token meets its own hidden states from the second place on, so it learns
from them too (EAGLE-3, Li et al. 2025, arXiv 2503.01840, section 3.2; FastMTP does the same).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.kernels.pass_inputs import PassInputs
from slipstream.layers.embedding import LanguageModelHead
from slipstream.layers.stack import LayerCache
from slipstream.train.batches import Batch
from slipstream.train.dense import ChainKeys, dense_rows, no_caches
from slipstream.train.losses import Agreement, agreement, distillation
from slipstream.train.recipe import Lesson
from slipstream.train.target import Wanted


class ChainNetwork(Protocol):
    """The network of a head that drafts in a chain."""

    @property
    def head(self) -> LanguageModelHead: ...

    def project(self, hidden: Tensor, streams: Sequence[Tensor]) -> Tensor:
        """[T, H] features of the target's pass."""

    def __call__(
        self,
        token_ids: Tensor,
        features: Tensor,
        inputs: PassInputs,
        caches: Sequence[LayerCache],
    ) -> tuple[Tensor, Tensor]:
        """(what enters the lm_head, next features), [T, H]."""


@dataclass(frozen=True, eq=False)
class Place:
    """One place of the drafts behind all tokens, [N] rows.

    Attributes:
        logits: [N, Vd] float32.
        weight: [N] float32, 0 where the sequence ends before the place or nothing is to be learned.
    """

    logits: Tensor
    wanted: Wanted
    best_column: Tensor
    weight: Tensor


def unroll(network: ChainNetwork, num_layers: int, batch: Batch, count: int) -> Iterator[Place]:
    """The places of a chain, in order. Behind place k stands the text's own token."""
    size, length = batch.shape
    device = batch.token_ids.device

    def but_last(states: Tensor) -> Tensor:
        return states[:, :-1].flatten(0, 1)

    features = network.project(but_last(batch.seen.hidden), [*map(but_last, batch.seen.streams)])
    chain = ChainKeys()
    sequence = torch.arange(size, device=device).unsqueeze(1) * length
    for place in range(count):
        # The row of token t takes the feature of t - 1; in place k it has moved on by k tokens.
        token = torch.arange(1, length, device=device) + place
        is_there = token < length
        token = token.clamp_max(length - 1)
        rows = dense_rows(size, token, chain=chain)
        ids = batch.token_ids[:, token].flatten()
        normed, features = network(ids, features, rows, no_caches(num_layers))
        index = (sequence + token).flatten()
        yield Place(
            network.head(normed),
            batch.wanted.rows(index),
            batch.best_column[index],
            (batch.follows[:, token] * is_there).flatten(),
        )


def learn_chain(places: Iterator[Place], decay: float, argmax_weight: float) -> Lesson:
    """The mean of the places' losses, place k counting decay^k."""
    total: Tensor | None = None
    matches, weights = [], 0.0
    for index, place in enumerate(places):
        loss = distillation(
            place.logits, place.wanted, place.best_column, place.weight, argmax_weight
        )
        share = decay**index
        total = share * loss if total is None else total + share * loss
        weights += share
        matches.append(matching(place))
    assert total is not None
    return Lesson(total / weights, torch.stack(matches))


@torch.no_grad()
def matching(place: Place) -> Tensor:
    """The share of rows whose first choice is the target's."""
    equal = (place.logits.argmax(-1) == place.best_column).float()
    return (equal * place.weight).sum() / place.weight.sum().clamp_min(1.0)


def test_chain(places: Iterator[Place]) -> tuple[list[Agreement], Tensor]:
    """How the places fare; a draft counts where all of its places do."""
    found = []
    weight: Tensor | None = None
    for place in places:
        found.append(agreement(place.logits, place.wanted, place.best_column))
        weight = place.weight if weight is None else weight * place.weight
    assert weight is not None
    return found, weight
