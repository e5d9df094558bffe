"""Recurrent states, which have a fixed size for each request, whatever its number of tokens.

A state cannot drop a token, so it includes only committed tokens: accepted draft tokens are
included by the pass after the one that verified them (`StateInputs`). Until then their rows are
stored, as they are before the recurrence. If no such pass follows, since the request has ended, a
checkpoint may include them (`DeltaNet.save`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from slipstream.cache.spec import CacheSizes
from slipstream.kernels.delta_net import DeltaCache
from slipstream.kernels.preparation import RequestTables


@dataclass(frozen=True)
class RecurrentSpec:
    """A causal convolution of channels, then a recurrence with gates.

    Attributes:
        state: shape of the state, [heads, ...]; states are float32.
        window: number of rows before the current one that the convolution reads.
        channels, gates: sizes of a row.
        dtype: dtype of rows and gates.
    """

    state: tuple[int, ...]
    window: int
    channels: int
    gates: int
    dtype: torch.dtype

    bytes_per_token = 0

    @property
    def bytes_per_request(self) -> int:
        """Bytes of a state, which is also the size of a checkpoint."""
        window = self.window * self.channels * self.dtype.itemsize
        return prod(self.state) * torch.float32.itemsize + window

    @property
    def bytes_per_draft_token(self) -> int:
        return (self.channels + self.gates) * self.dtype.itemsize

    def allocate(self, num_layers: int, sizes: CacheSizes) -> "RecurrentPool":
        return RecurrentPool(self, num_layers, sizes)


class RecurrentPool:
    """States of several layers: a place for each slot, then the places of checkpoints.

    Attributes:
        states: [layers, places, *state].
        windows: [layers, places, window, channels].
        layers: the cache of each layer: views of these, and the rows of draft tokens.
    """

    def __init__(self, spec: RecurrentSpec, num_layers: int, sizes: CacheSizes) -> None:
        places = num_layers, sizes.num_slots + sizes.num_checkpoints
        drafts = num_layers, sizes.num_slots, sizes.num_drafts
        device, dtype = sizes.device, spec.dtype
        self.states = torch.zeros((*places, *spec.state), device=device)
        self.windows = torch.zeros(
            (*places, spec.window, spec.channels), dtype=dtype, device=device
        )
        drafted = torch.zeros((*drafts, spec.channels), dtype=dtype, device=device)
        gates = torch.zeros((*drafts, spec.gates), dtype=dtype, device=device)
        self.layers: list[DeltaCache] = [
            DeltaCache(*layer)
            for layer in zip(self.states, self.windows, drafted, gates, strict=True)
        ]

    def keep_path(
        self, tables: RequestTables, slots: Tensor, roots: Tensor, path: Tensor, counts: Tensor
    ) -> None:
        """Not supported: engines do not draft trees for these layers."""
        raise AssertionError("a state follows one chain of tokens")

    def begin(self, slots: Sequence[int], places: Sequence[int]) -> None:
        for slot, place in zip(slots, places, strict=True):
            for kept in (self.states, self.windows):
                kept[:, slot] = kept[:, place] if place >= 0 else 0
