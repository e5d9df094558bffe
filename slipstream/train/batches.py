"""Batches of sequences, with the target's states and predictions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from slipstream.train.sequences import Sequences
from slipstream.train.target import Target, TargetDistribution, TargetStates
from slipstream.train.vocabulary import DraftVocabulary


@dataclass(eq=False)
class TrainingBatch:
    """Some sequences on the device.

    Attributes:
        token_ids: [B, S] int64.
        learned: [B, S] bool, tokens that a drafter should learn to predict.
        states: the target's hidden states and predictions for these sequences.
    """

    token_ids: Tensor
    learned: Tensor
    states: TargetStates
    target: Target
    vocabulary: DraftVocabulary

    @property
    def shape(self) -> tuple[int, int]:
        batch, length = self.token_ids.shape
        return batch, length

    @cached_property
    def predictions(self) -> TargetDistribution:
        """The target's prediction after each token, [B * S] rows."""
        return self.target.distribution(self.states.hidden.flatten(0, 1), self.vocabulary)

    @cached_property
    def weight(self) -> Tensor:
        """[B, S] float32: 1 where the next token is one to be learned."""
        weight = torch.zeros_like(self.learned)
        weight[:, :-1] = self.learned[:, 1:]
        return weight.float()

    def index(self, tokens: Tensor) -> Tensor:
        """[B * Q], the rows of [B * S] of these tokens [Q] of every sequence."""
        size, length = self.shape
        sequence = torch.arange(size, device=tokens.device).unsqueeze(1) * length
        return (sequence + tokens).flatten()

    def shifted(self, rows: Tensor, count: int) -> Tensor:
        """rows [B * S] -> [B * S], each row the one `count` tokens later, or 0 after the end."""
        size, length = self.shape
        moved = torch.zeros_like(rows).view(size, length)
        if count < length:
            moved[:, : length - count] = rows.view(size, length)[:, count:]
        return moved.flatten()


def numbered_generator(seed: int, number: int) -> torch.Generator:
    """Random numbers of one epoch, or of one batch, of a run with this seed."""
    return torch.Generator().manual_seed((seed * 1_000_003 + number) % (1 << 64))


class FeatureSource(Protocol):
    """Sequences, and the target's pass over them."""

    @property
    def sequences(self) -> Sequences: ...

    def states(self, index: Tensor) -> TargetStates:
        """States of the sequences with these numbers [B], on the device."""


class OnlineFeatures:
    """Runs the target over every batch."""

    def __init__(self, sequences: Sequences, target: Target, stream_layers: Sequence[int]) -> None:
        self.sequences = sequences
        self._target, self._stream_layers = target, tuple(stream_layers)

    def states(self, index: Tensor) -> TargetStates:
        ids = self.sequences.token_ids[index].to(self._target.device, non_blocking=True)
        return self._target.states(ids.long(), self._stream_layers)


class Batches:
    """The order of the sequences: shuffled in every epoch, and fixed by seed and step."""

    def __init__(
        self,
        source: FeatureSource,
        target: Target,
        vocabulary: DraftVocabulary,
        size: int,
        seed: int,
    ) -> None:
        self._source, self._target, self._vocabulary = source, target, vocabulary
        self._size, self._seed = min(size, len(source.sequences)), seed

    @property
    def tokens_per_batch(self) -> int:
        return self._size * self._source.sequences.length

    def at(self, number: int) -> TrainingBatch:
        """Batch `number` of the run, whatever was read before; an epoch has only whole batches."""
        count = len(self._source.sequences)
        epoch, index = divmod(number, count // self._size)
        order = torch.randperm(count, generator=numbered_generator(self._seed, epoch))
        return self._batch(order[index * self._size : (index + 1) * self._size])

    def in_order(self) -> Iterator[TrainingBatch]:
        """Every sequence once."""
        numbers = torch.arange(len(self._source.sequences))
        yield from map(self._batch, torch.split(numbers, self._size))

    def _batch(self, index: Tensor) -> TrainingBatch:
        chosen = self._source.sequences.at(index)
        return TrainingBatch(
            chosen.token_ids.to(self._target.device, non_blocking=True).long(),
            chosen.learned.to(self._target.device, non_blocking=True),
            self._source.states(index),
            self._target,
            self._vocabulary,
        )
