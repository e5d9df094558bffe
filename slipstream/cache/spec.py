"""The interface of caches, in which layers store what they have computed for earlier tokens.

A kind of cache has a frozen spec with its size, and a pool, which the spec allocates and which owns
the storage of all layers with that spec. A new kind is one more file in this directory; paged keys
and values are in `paged.py`.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from slipstream.kernels.pass_inputs import StateInputs
from slipstream.kernels.preparation import RequestTables

# The cached tensors that the mixer of a layer reads and writes: (keys, values) for attention.
LayerCache = Any


@dataclass(frozen=True)
class CacheSizes:
    """The sizes of a pool.

    Attributes:
        num_blocks, block_size: number of blocks in each layer, and tokens in each block.
        num_slots: maximum number of running requests, plus one slot for padding.
        num_drafts: maximum number of a request's draft tokens that may wait to be included in its
            state.
        num_checkpoints: number of copies of states besides those of the slots.
        rereads: see `StatePlaces`.
        num_window_blocks: number of blocks of layers with a window, without the null block, a
            block of zeros that follows them. 0: these layers keep all tokens, in `num_blocks`
            blocks.
    """

    num_blocks: int
    block_size: int
    num_slots: int
    device: torch.device
    num_window_blocks: int = 0
    num_drafts: int = 0
    num_checkpoints: int = 0
    rereads: int = 0


class CachePool(Protocol):
    """The storage of all layers of one spec. `BlockManager` allocates its blocks to requests."""

    @property
    def layers(self) -> Sequence[LayerCache]:
        """The cache of each layer, as its mixer takes it."""

    def keep_path(
        self, tables: RequestTables, slots: Tensor, roots: Tensor, path: Tensor, counts: Tensor
    ) -> None:
        """Move the entries of accepted nodes of token trees to the slots that a chain would have.

        Args:
            slots, roots: [R] int64, the request's slot, and the index of the root among its tokens.
            path: [R, W] int64: node path[r, i] becomes token roots[r] + i.
            counts: [R] int64, below W: the last i that is moved.
        """


class StatePool(CachePool, Protocol):
    """A pool with a state for each request, instead of blocks or in addition to them."""

    def begin(self, slots: Sequence[int], places: Sequence[int]) -> None:
        """Initialise the states of these slots with the states in `places` (checkpoints); -1: with
        the state before the first token."""


class CacheSpec(Hashable, Protocol):
    """The cache of one layer as data; layers with equal specs share a pool."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes in blocks for each token."""

    @property
    def bytes_per_request(self) -> int:
        """Bytes of a state for each slot, whatever the length of its request."""

    @property
    def bytes_per_draft_token(self) -> int:
        """Bytes for each draft token of a slot that waits to be included in a state."""

    @property
    def window(self) -> int | None:
        """The sliding window in tokens, the token itself included; None: there is none."""

    def allocate(self, num_layers: int, sizes: CacheSizes) -> CachePool:
        """A pool for `num_layers` layers of this spec; a `StatePool` if requests have states."""


@dataclass(frozen=True)
class SharedCache:
    """The cache of a layer that stores nothing and reads the cache of another layer.

    Attributes:
        kv_source: index in the layout of the layer whose cache is read; it is before this one.
    """

    kv_source: int
    window: int | None = None

    bytes_per_token = 0
    bytes_per_request = 0
    bytes_per_draft_token = 0


@dataclass(frozen=True)
class CacheLayout:
    """The caches of the layers of one model, in order.

    Attributes:
        extra_bytes_per_token: bytes per token that a drafter stores besides its layers' caches.
    """

    specs: tuple[CacheSpec | SharedCache, ...]
    extra_bytes_per_token: int = 0

    @property
    def bytes_per_token(self) -> int:
        return self.extra_bytes_per_token + sum(spec.bytes_per_token for spec in self.specs)

    @property
    def _windowed(self) -> list[CacheSpec | SharedCache]:
        """The specs of paged layers with a window."""
        return [it for it in self.specs if it.bytes_per_token and it.window is not None]

    @property
    def windowed_bytes_per_token(self) -> int:
        return sum(spec.bytes_per_token for spec in self._windowed)

    def window(self, longest: int) -> int | None:
        """The largest window of any layer; None if no layer has one, or if the window is at least
        `longest` tokens."""
        largest = max((spec.window or 0 for spec in self._windowed), default=None)
        return largest if largest is not None and largest < longest else None

    @property
    def bytes_per_request(self) -> int:
        return sum(spec.bytes_per_request for spec in self.specs)

    def state_bytes(self, num_drafts: int) -> int:
        """Bytes of states for each slot, with `num_drafts` draft tokens that wait."""
        waiting = sum(spec.bytes_per_draft_token for spec in self.specs)
        return self.bytes_per_request + num_drafts * waiting

    @property
    def blocks_resume(self) -> bool:
        """Whether the blocks of a prefix suffice to resume after it, so that the prefix index may
        share them."""
        return self.bytes_per_request == 0


class ModelCache:
    """The caches of one model's layers.

    Attributes:
        layers: the cache of each layer of the layout, as its mixer takes it.
        has_windows: layers with a window have their own blocks.
    """

    def __init__(self, layout: CacheLayout, sizes: CacheSizes) -> None:
        self.has_windows = sizes.num_window_blocks > 0
        self._sizes = sizes
        counts = Counter(it for it in layout.specs if not isinstance(it, SharedCache))
        pools = {spec: spec.allocate(count, sizes) for spec, count in counts.items()}
        self._pools = list(pools.values())
        self._states = [
            cast(StatePool, pool) for spec, pool in pools.items() if spec.bytes_per_request
        ]
        # For each slot, the accepted draft tokens of its last pass, which no state includes yet.
        self._pending = torch.zeros(sizes.num_slots, dtype=torch.int64, device=sizes.device)
        own = {spec: iter(pool.layers) for spec, pool in pools.items()}
        self.layers: list[LayerCache] = []
        for spec in layout.specs:
            if isinstance(spec, SharedCache):
                self.layers.append(self.layers[spec.kv_source])
            else:
                self.layers.append(next(own[spec]))

    def keep_path(
        self, tables: RequestTables, slots: Tensor, roots: Tensor, path: Tensor, counts: Tensor
    ) -> None:
        for pool in self._pools:
            pool.keep_path(tables, slots, roots, path, counts)

    @property
    def has_states(self) -> bool:
        """Whether any layer has a state for each request."""
        return bool(self._states)

    @property
    def num_waiting(self) -> int:
        """The most accepted draft tokens of a request that its states do not include."""
        return self._sizes.num_drafts if self._states else 0

    def places_of(self, checkpoints: Sequence[int]) -> list[int]:
        """The places of checkpoints in the pools, where they follow those of the slots."""
        return [self._sizes.num_slots + it for it in checkpoints]

    def begin(self, slots: Sequence[int], checkpoints: Sequence[int]) -> None:
        """See `StatePool.begin`; checkpoints are counted from 0."""
        places = [-1 if it < 0 else self._sizes.num_slots + it for it in checkpoints]
        for pool in self._states:
            pool.begin(slots, places)
        if self._states:
            self._pending[list(slots)] = 0

    def state_inputs(
        self, slots: Tensor, starts: Tensor, num_known: Tensor, saved: Tensor | None
    ) -> StateInputs | None:
        """The state inputs of a pass; None if no layer has states.

        Args:
            starts: [R] int64, the index of each request's first row.
            num_known: see `StateInputs`.
            saved: [R] int64, the checkpoint to which the state at the last edge of a block in this
                pass is saved; -1: it is not saved. None: no request saves one.
        """
        if not self._states:
            return None
        pending = self._pending[slots]
        if saved is None or not self._sizes.num_checkpoints:
            nowhere = torch.full_like(slots, -1)
            return StateInputs(slots, num_known, pending, nowhere, slots)
        size, rereads = self._sizes.block_size, self._sizes.rereads
        edges = (starts + num_known + rereads) // size * size - rereads
        save_at = torch.where(saved < 0, -1, edges)
        return StateInputs(slots, num_known, pending, save_at, saved + self._sizes.num_slots)

    def commit(self, slots: Tensor, num_accepted: Tensor) -> None:
        """Store the numbers of accepted draft tokens of the last pass; [R] int64 each. Paged caches
        do not need them: the number of tokens on the device determines which slots are valid, and
        rejected rows are overwritten."""
        if self._states:
            self._pending.index_copy_(0, slots, num_accepted)
