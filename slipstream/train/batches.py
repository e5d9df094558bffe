"""Batches of sequences with what the target makes of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from slipstream.train.losses import Columns
from slipstream.train.sequences import Sequences
from slipstream.train.target import Seen, Target, Wanted


@dataclass(eq=False)
class Batch:
    """Some sequences on the device.

    Attributes:
        token_ids: [B, S] int64.
        learned: [B, S] bool, tokens that a drafter should learn to guess.
        seen: the target's pass over them.
    """

    token_ids: Tensor
    learned: Tensor
    seen: Seen
    target: Target
    columns: Columns

    @property
    def shape(self) -> tuple[int, int]:
        batch, length = self.token_ids.shape
        return batch, length

    @cached_property
    def wanted(self) -> Wanted:
        """What the target says behind each token, [B * S] rows."""
        return self.target.says(self.seen.hidden.flatten(0, 1), self.columns.token_ids)

    @cached_property
    def best_column(self) -> Tensor:
        """[B * S] int64, where its first choice stands in the draft vocabulary; -1: nowhere."""
        return self.columns.of(self.wanted.best)

    @cached_property
    def follows(self) -> Tensor:
        """[B, S] float32: 1 where the token behind is one to be learned."""
        behind = torch.zeros_like(self.learned)
        behind[:, :-1] = self.learned[:, 1:]
        return behind.float()


class FeatureSource(Protocol):
    """Sequences, and the target's pass over them."""

    @property
    def sequences(self) -> Sequences: ...

    def seen(self, index: Tensor) -> Seen:
        """Of the sequences [B] with these numbers, on the device."""


class OnlineFeatures:
    """Runs the target over every batch."""

    def __init__(self, sequences: Sequences, target: Target, stream_layers: Sequence[int]) -> None:
        self.sequences = sequences
        self._target, self._stream_layers = target, tuple(stream_layers)

    def seen(self, index: Tensor) -> Seen:
        ids = self.sequences.token_ids[index].to(self._target.device)
        return self._target.read(ids.long(), self._stream_layers)


class Batches:
    """The order in which sequences are shown: a new one every epoch, fixed by seed and step."""

    def __init__(
        self, source: FeatureSource, target: Target, columns: Columns, size: int, seed: int
    ) -> None:
        self._source, self._target, self._columns = source, target, columns
        self._size, self._seed = min(size, len(source.sequences)), seed

    @property
    def per_epoch(self) -> int:
        """Whole batches of an epoch."""
        return len(self._source.sequences) // self._size

    @property
    def tokens_per_batch(self) -> int:
        """Of a whole one."""
        return self._size * self._source.sequences.length

    def at(self, number: int) -> Batch:
        """The batch `number` of the run, whichever came before."""
        epoch, place = divmod(number, self.per_epoch)
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        order = torch.randperm(len(self._source.sequences), generator=generator)
        return self._batch(order[place * self._size : (place + 1) * self._size])

    def in_order(self) -> Iterator[Batch]:
        """Every sequence once."""
        numbers = torch.arange(len(self._source.sequences))
        yield from map(self._batch, torch.split(numbers, self._size))

    def _batch(self, index: Tensor) -> Batch:
        chosen = self._source.sequences.at(index)
        return Batch(
            chosen.token_ids.to(self._target.device).long(),
            chosen.learned.to(self._target.device),
            self._source.seen(index),
            self._target,
            self._columns,
        )
