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

from slipstream.kernels.preparation import RequestTables

# What the mixer of a layer reads and writes: (keys, values) for attention.
LayerCache = Any


@dataclass(frozen=True)
class CacheSizes:
    """How much a pool has room for.

    Attributes:
        num_blocks, block_size: blocks that all layers share, and tokens in each.
        num_slots: requests that run at once, and one slot for padding.
        num_window_blocks: blocks that layers with a window share in place of those; one more
            stands behind them, of zeros, for tokens that no row sees any more. 0: these layers
            keep all tokens.
    """

    num_blocks: int
    block_size: int
    num_slots: int
    device: torch.device
    num_window_blocks: int = 0


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

    def begin(self, slots: Sequence[int]) -> None:
        """Requests without computed tokens take these slots, new ones or preempted ones. (Where
        layers keep states no prefix is shared, so no request begins with computed tokens.)"""

    def commit(self, slots: Tensor, num_rows: Tensor) -> None:
        """Roll the states forward by the first num_rows[r] rows of the last pass; the rows behind
        them were refused. slots, num_rows: [R] int64."""


class CacheSpec(Hashable, Protocol):
    """The cache of one layer as data; layers with equal specs share a pool."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes in blocks, for every token."""

    @property
    def bytes_per_request(self) -> int:
        """Bytes of a state, for every slot, however long its request is."""

    @property
    def window(self) -> int | None:
        """How many tokens a row reads of what is in blocks, itself included; None: all."""

    def allocate(self, num_layers: int, sizes: CacheSizes) -> CachePool:
        """A pool for so many layers of this spec; a `StatePool` where requests have states."""


@dataclass(frozen=True)
class CacheLayout:
    """What the layers of one model keep, in their order.

    Attributes:
        dtype: of the stored numbers.
        extra_bytes_per_token: that a drafter keeps of a token beside its layers' caches.
    """

    specs: tuple[CacheSpec, ...]
    dtype: torch.dtype
    extra_bytes_per_token: int = 0

    @property
    def bytes_per_token(self) -> int:
        return self.extra_bytes_per_token + sum(spec.bytes_per_token for spec in self.specs)

    @property
    def windowed_bytes_per_token(self) -> int:
        """Those of layers with a window."""
        return sum(spec.bytes_per_token for spec in self.specs if spec.window is not None)

    def window(self, longest: int) -> int | None:
        """The largest window of any layer, where it is smaller than the `longest` request."""
        largest = max((spec.window for spec in self.specs if spec.window is not None), default=None)
        return largest if largest is not None and largest < longest else None

    @property
    def bytes_per_request(self) -> int:
        return sum(spec.bytes_per_request for spec in self.specs)

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
        counts = Counter(layout.specs)
        pools = {spec: spec.allocate(count, sizes) for spec, count in counts.items()}
        self._pools = list(pools.values())
        self._states = [
            cast(StatePool, pool) for spec, pool in pools.items() if spec.bytes_per_request
        ]
        own = {spec: iter(pool.layers) for spec, pool in pools.items()}
        self.layers: list[LayerCache] = [next(own[spec]) for spec in layout.specs]

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

    def begin(self, slots: Sequence[int]) -> None:
        """See `StatePool.begin`."""
        for pool in self._states:
            pool.begin(slots)

    def commit(self, slots: Tensor, num_rows: Tensor) -> None:
        """See `StatePool.commit`. Paged kinds need nothing: the count of tokens on the device says
        which slots hold something, and refused rows are written over."""
        for pool in self._states:
            pool.commit(slots, num_rows)
