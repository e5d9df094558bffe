"""Blocks of layers with a sliding window, which are freed when they are before all windows.

Layers without a window and all layers of drafters share the blocks of `BlockManager`. The target's
layers with a window have blocks of a second pool, and each request has a second table for them.
That table also has an entry for each `block_size` tokens, but a block only where one is needed:

    0 ...... first .................. num_computed ....... len(entries) * block_size
    |   freed    | the window of the next row | rows of the next pass   |

Every row of the next pass is at num_computed or after it (also rejected drafts, nodes of trees and
steps ahead), or one token before it directly after a prefix hit. So no token before that row's
window is read. Entries there are the null block, a block of zeros that is never written, since
kernels may load whole tiles and mask them. Prompts get blocks chunk by chunk, so the rest of a
window's blocks is reserved for requests that were admitted (`_reserve`).

Freed blocks stay in a prefix index for these layers, least recently used first. A request can
resume at the end of a prefix whose last window is still there; older blocks are not needed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.cache.block_pool import BlockPool


def most_blocks_held(window: int, block_size: int) -> int:
    """Maximum number of blocks of a request between two steps: those of a window that begins and
    ends within blocks, and a block for the next row."""
    return -(-window // block_size) + 2


@dataclass(slots=True, eq=False)
class _Table:
    """The blocks of one request: `entries` before `first` are the null block, `wanted` is the
    number of blocks for all known tokens, and `reserved` the number of blocks reserved for it."""

    entries: list[int]
    first: int
    wanted: int
    reserved: int = 0


class WindowBlocks:
    """The tables of all requests for layers with a window.

    Args:
        num_blocks: number of blocks without the null block, which has the number `num_blocks`.
        window: the largest window of these layers, the token itself included.
    """

    def __init__(self, num_blocks: int, block_size: int, window: int) -> None:
        self.num_blocks, self.null = num_blocks, num_blocks
        self._block_size, self._window = block_size, window
        self._most_held = most_blocks_held(window, block_size)
        assert num_blocks >= self._most_held, "one request must always get on"
        self.reset()

    def reset(self) -> None:
        """Empty all blocks and forget all tables."""
        self._pool = BlockPool(self.num_blocks)
        self._tables: dict[str, _Table] = {}
        self._reserved = 0

    def forget_contents(self) -> None:
        self._pool.forget_contents()

    @property
    def num_available(self) -> int:
        return self._pool.num_available

    def table(self, request_id: str) -> Sequence[int]:
        """A live view of a request's entries."""
        return self._tables[request_id].entries

    def longest_prefix(self, digests: Sequence[bytes]) -> int:
        """The number of leading blocks of this chain after which a request can resume."""
        longest = run = 0
        for count, digest in enumerate(digests, start=1):
            run = 0 if self._pool.index.block_of(digest) is None else run + 1
            if run >= count - self._first_seen(count):
                longest = count
        return longest

    def can_admit(self, digests: Sequence[bytes], num_blocks: int, reserve: int) -> bool:
        """Whether a request of `num_blocks` blocks can begin after a prefix that `longest_prefix`
        found, such that `reserve` more blocks are available that are not reserved for others."""
        found = self._found(digests)
        revived = sum(self._pool.is_evictable(block) for block in found)
        fresh = min(num_blocks, self._most_held) - len(found)
        return fresh + revived + reserve <= self.num_available - self._reserved

    def admit(self, request_id: str, digests: Sequence[bytes]) -> None:
        """Start a table with a prefix that `longest_prefix` found."""
        found, first = self._found(digests), self._first_seen(len(digests))
        for block in found:
            self._pool.share(block)
        self._tables[request_id] = _Table([self.null] * first + found, first, len(digests))

    def reach(self, request_id: str) -> int:
        """Maximum number of entries of the table, without blocks that are reserved for others."""
        table = self._tables[request_id]
        return len(table.entries) + max(0, self.num_available - (self._reserved - table.reserved))

    def missing(self, request_id: str, num_blocks: int) -> int:
        """Number of blocks that the table needs to get `num_blocks` entries."""
        return num_blocks - len(self._tables[request_id].entries)

    def grow(self, request_id: str, wanted: int, num_blocks: int) -> None:
        """Extend the table to `num_blocks` entries, for which blocks must be available; and reserve
        the rest of a window, out of the `wanted` blocks for all known tokens."""
        table = self._tables[request_id]
        while len(table.entries) < num_blocks:
            table.entries.append(self._pool.take())
        table.wanted = max(table.wanted, wanted)
        self._reserve(table)

    def rewind(self, request_id: str, wanted: int, num_blocks: int) -> None:
        """Free the entries after the first `num_blocks`; `wanted`: see `grow`."""
        table = self._tables[request_id]
        assert num_blocks >= table.first, f"{request_id}: cannot rewind in front of the window"
        while len(table.entries) > num_blocks:
            self._pool.release(table.entries.pop())
        table.wanted = min(table.wanted, wanted)
        self._reserve(table)

    def slide(self, request_id: str, num_computed: int) -> None:
        """Free the blocks before all windows of rows from token `num_computed` on."""
        table = self._tables[request_id]
        first = max(0, num_computed - self._window + 1) // self._block_size
        while table.first < min(first, len(table.entries)):
            self._pool.release(table.entries[table.first])
            table.entries[table.first] = self.null
            table.first += 1
        self._reserve(table)

    def add_to_index(self, request_id: str, number: int, digest: bytes) -> None:
        """Add entry `number`, which is full of committed tokens, to the index if it has a block."""
        table = self._tables[request_id]
        if number >= table.first:
            self._pool.index.add(digest, table.entries[number])

    def free(self, request_id: str) -> None:
        """End a table, the tail first."""
        table = self._tables.pop(request_id)
        self._reserved -= table.reserved
        for block in reversed(table.entries[table.first :]):
            self._pool.release(block)

    def check_invariants(self, num_final: dict[str, int]) -> None:
        """Raise AssertionError unless all blocks are in their places.

        Args:
            num_final: leading entries of each request that are never written again.
        """
        assert num_final.keys() == self._tables.keys(), "a request has only one of two tables"
        tables = self._tables.items()
        held = Counter(block for _, table in tables for block in table.entries[table.first :])
        self._pool.check_invariants(held)
        assert self._reserved == sum(table.reserved for _, table in tables), "a reservation is lost"
        for request_id, table in tables:
            own = table.entries[table.first :]
            assert len(set(own)) == len(own), f"{request_id}: a block comes twice"
            assert set(table.entries[: table.first]) <= {self.null}, f"{request_id}: given back"
            for block in table.entries[max(table.first, num_final[request_id]) :]:
                self._pool.check_owned(block)

    def _first_seen(self, num_blocks: int) -> int:
        """The first block that is needed to resume after `num_blocks` full ones, whose last token
        may be computed again."""
        return max(0, num_blocks * self._block_size - self._window) // self._block_size

    def _found(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks of a prefix that are needed to resume after it."""
        found = [self._pool.index.block_of(it) for it in digests[self._first_seen(len(digests)) :]]
        blocks = [block for block in found if block is not None]
        assert len(blocks) == len(found), "only indexed blocks can be shared"
        return blocks

    def _reserve(self, table: _Table) -> None:
        """Reserve the blocks that the table still needs for the window of its known tokens."""
        held = len(table.entries) - table.first
        reserved = max(0, min(table.wanted, self._most_held) - held)
        self._reserved += reserved - table.reserved
        table.reserved = reserved
