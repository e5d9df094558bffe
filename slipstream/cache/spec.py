"""What layers keep of the tokens that they have seen: kinds of caches.

A kind is a frozen spec, which tells its bytes, and the pool that it allocates, which owns the
storage of all layers of that spec. A new kind is one file beside this one; paged keys and values
stand in `paged.py`.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from slipstream.kernels.pass_inputs import StateInputs
from slipstream.kernels.preparation import RequestTables

# What the mixer of a layer reads and writes: (keys, values) for attention.
LayerCache = Any


@dataclass(frozen=True)
class CacheSizes:
    """How much a pool has room for.

    Attributes:
        num_blocks, block_size: blocks that all layers share, and tokens in each.
        num_slots: requests that run at once, and one slot for padding.
        num_drafts: draft tokens of a request that wait to be taken into its states.
        num_checkpoints: states that are kept beside those of slots.
        rereads: see `StatePlaces`.
        num_window_blocks: blocks that layers with a window share in place of those; one more
            stands behind them, of zeros, for tokens that no row sees any more. 0: these layers
            keep all tokens.
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
    """The storage of some layers of one kind. Blocks and slots are named by others."""

    @property
    def layers(self) -> Sequence[LayerCache]:
        """What the mixer of each layer takes."""

    def keep_path(
        self, tables: RequestTables, slots: Tensor, roots: Tensor, path: Tensor, counts: Tensor
    ) -> None:
        """Move what is kept of the accepted nodes of token trees to where a chain has it.

        Args:
            slots, roots: [R] int64, the request's slot, and which of its tokens is the root.
            path: [R, W] int64: node path[r, i] becomes token roots[r] + i.
            counts: [R] int64, below W: the last i that matters.
        """


class StatePool(CachePool, Protocol):
    """A pool that keeps a state of each request beside or in place of blocks."""

    def begin(self, slots: Sequence[int], places: Sequence[int]) -> None:
        """Requests take these slots, new ones or preempted ones, each with the state of one of the
        pool's places, a checkpoint; -1: without computed tokens."""


class CacheSpec(Hashable, Protocol):
    """The cache of one layer as data; layers with equal specs share a pool."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes in blocks, for every token."""

    @property
    def bytes_per_request(self) -> int:
        """Bytes of a state, for every slot, however long its request is."""

    @property
    def bytes_per_draft_token(self) -> int:
        """Bytes that wait to be taken into a state, for every slot and each of its draft tokens."""

    @property
    def window(self) -> int | None:
        """How many tokens a row reads of what is in blocks, itself included; None: all."""

    def allocate(self, num_layers: int, sizes: CacheSizes) -> CachePool:
        """A pool for so many layers of this spec; a `StatePool` where requests have states."""


@dataclass(frozen=True)
class SharedCache:
    """The cache of a layer that keeps nothing and reads what another one keeps.

    Attributes:
        lender: which of the layers in the layout that is; it stands before this one.
    """

    lender: int
    window: int | None = None

    bytes_per_token = 0
    bytes_per_request = 0
    bytes_per_draft_token = 0


@dataclass(frozen=True)
class CacheLayout:
    """What the layers of one model keep, in their order.

    Attributes:
        dtype: of the stored numbers.
        extra_bytes_per_token: that a drafter keeps of a token beside its layers' caches.
    """

    specs: tuple[CacheSpec | SharedCache, ...]
    dtype: torch.dtype
    extra_bytes_per_token: int = 0

    @property
    def bytes_per_token(self) -> int:
        return self.extra_bytes_per_token + sum(spec.bytes_per_token for spec in self.specs)

    @property
    def _windowed(self) -> list[CacheSpec | SharedCache]:
        """Those with a window on what is in blocks; windows of states are of another kind."""
        return [it for it in self.specs if it.bytes_per_token and it.window is not None]

    @property
    def windowed_bytes_per_token(self) -> int:
        """Those of layers with a window."""
        return sum(spec.bytes_per_token for spec in self._windowed)

    def window(self, longest: int) -> int | None:
        """The largest window of any layer, where it is smaller than the `longest` request."""
        largest = max((spec.window or 0 for spec in self._windowed), default=None)
        return largest if largest is not None and largest < longest else None

    @property
    def bytes_per_request(self) -> int:
        return sum(spec.bytes_per_request for spec in self.specs)

    def state_bytes(self, num_drafts: int) -> int:
        """Bytes for every slot, with so many draft tokens that wait to be taken into its states."""
        waiting = sum(spec.bytes_per_draft_token for spec in self.specs)
        return self.bytes_per_request + num_drafts * waiting

    @property
    def blocks_resume(self) -> bool:
        """Whether the blocks of a prefix are all that a request needs to go on behind it, so that
        the prefix index may share them."""
        return self.bytes_per_request == 0


class ModelCache:
    """The caches of one model's layers.

    Attributes:
        layers: one for each layer of the layout, as its mixer takes it.
        has_windows: layers with a window have blocks of their own.
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
        # Of each slot, draft tokens of its last pass that were accepted and are in no state yet.
        self._pending = torch.zeros(sizes.num_slots, dtype=torch.int64, device=sizes.device)
        own = {spec: iter(pool.layers) for spec, pool in pools.items()}
        self.layers: list[LayerCache] = []
        for spec in layout.specs:
            if isinstance(spec, SharedCache):
                self.layers.append(self.layers[spec.lender])
            else:
                self.layers.append(next(own[spec]))

    def keep_path(
        self, tables: RequestTables, slots: Tensor, roots: Tensor, path: Tensor, counts: Tensor
    ) -> None:
        """See `CachePool.keep_path`."""
        for pool in self._pools:
            pool.keep_path(tables, slots, roots, path, counts)

    @property
    def has_states(self) -> bool:
        """Whether any layer keeps a state of each request."""
        return bool(self._states)

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
        """How states move on in a pass; None where no layer keeps any.

        Args:
            starts: [R] int64, the token of each request's first row.
            num_known: see `StateInputs`.
            saved: [R] int64, the checkpoint that becomes of the state behind the last edge of a
                block that this pass gets to; -1: none does. None: of no request.
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
        """So many draft tokens of the last pass stay; [R] int64 each. Paged kinds need nothing: the
        count of tokens on the device says which slots hold something, and refused rows are written
        over."""
        if self._states:
            self._pending.index_copy_(0, slots, num_accepted)
