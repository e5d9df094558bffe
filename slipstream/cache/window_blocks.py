"""Blocks of layers with a sliding window, which are freed as soon as no row sees them any more.

Layers without a window and all layers of drafters share the blocks of `BlockManager`. The target's
layers with a window have blocks of a second pool, and each request a second table for them. That
table also has an entry for each `block_size` tokens, but holds a block only where one is needed:

    0 ...... first .................. num_computed ....... len(entries) * block_size
    | given back | the window of the next row | rows of the coming pass |

Every row of the next pass is at num_computed or behind it (also rejected drafts, nodes of trees and
steps ahead), or one token in front of it directly after a prefix hit. So nothing in front of that
token's window is read. Entries there are the null block, a block of zeros that is never written,
since kernels may load whole tiles and mask them. Prompts take blocks chunk by chunk, so the rest of
a window's blocks is reserved for requests that were admitted (`_promise`).

Blocks that are freed stay in a prefix index of their own, least recently used first. A request can
resume at the end of a prefix whose last window is still there; older blocks are not needed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.cache.block_pool import BlockPool


def most_blocks_held(window: int, block_size: int) -> int:
    """The most blocks that a request holds between two steps: a window that begins and ends
    anywhere, and a block for the next row."""
    return -(-window // block_size) + 2


@dataclass(slots=True, eq=False)
class _Table:
    """The blocks of one request: `entries` before `first` are the null block, `wanted` blocks would
    hold all known tokens, and `owed` blocks are reserved for it."""

    entries: list[int]
    first: int
    wanted: int
    owed: int = 0


class WindowBlocks:
    """The tables of all requests for layers with a window.

    Args:
        num_blocks: number of blocks without the null block, which has the number `num_blocks`.
        window: the most tokens that a row of any of these layers sees, itself included.
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
        self._owed = 0

    def forget_contents(self) -> None:
        """See `BlockPool`."""
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
        """Whether a request of `num_blocks` blocks can begin behind a prefix that `longest_prefix`
        found, with `reserve` blocks left over that are not reserved for others."""
        found = self._found(digests)
        revived = sum(self._pool.is_evictable(block) for block in found)
        fresh = min(num_blocks, self._most_held) - len(found)
        return fresh + revived + reserve <= self.num_available - self._owed

    def admit(self, request_id: str, digests: Sequence[bytes]) -> None:
        """Start a table behind a prefix that `longest_prefix` found."""
        found, first = self._found(digests), self._first_seen(len(digests))
        for block in found:
            self._pool.share(block)
        self._tables[request_id] = _Table([self.null] * first + found, first, len(digests))

    def reach(self, request_id: str) -> int:
        """The most entries that the table could have, without blocks reserved for others."""
        table = self._tables[request_id]
        return len(table.entries) + max(0, self.num_available - (self._owed - table.owed))

    def missing(self, request_id: str, num_blocks: int) -> int:
        """How many blocks the table needs to have `num_blocks` entries."""
        return num_blocks - len(self._tables[request_id].entries)

    def grow(self, request_id: str, wanted: int, num_blocks: int) -> None:
        """Give the table `num_blocks` entries, for which there are blocks; and reserve the rest of
        a window, of the `wanted` blocks that would hold all known tokens."""
        table = self._tables[request_id]
        while len(table.entries) < num_blocks:
            table.entries.append(self._pool.take())
        table.wanted = max(table.wanted, wanted)
        self._promise(table)

    def rewind(self, request_id: str, wanted: int, num_blocks: int) -> None:
        """Free the entries behind the first `num_blocks`; `wanted` would hold all known tokens."""
        table = self._tables[request_id]
        assert num_blocks >= table.first, f"{request_id}: cannot rewind in front of the window"
        while len(table.entries) > num_blocks:
            self._pool.release(table.entries.pop())
        table.wanted = min(table.wanted, wanted)
        self._promise(table)

    def slide(self, request_id: str, num_computed: int) -> None:
        """Free the blocks that no row from token `num_computed` on sees."""
        table = self._tables[request_id]
        first = max(0, num_computed - self._window + 1) // self._block_size
        while table.first < min(first, len(table.entries)):
            self._pool.release(table.entries[table.first])
            table.entries[table.first] = self.null
            table.first += 1
        self._promise(table)

    def add_to_index(self, request_id: str, number: int, digest: bytes) -> None:
        """Put entry `number`, which is full of committed tokens, into the index if it is held."""
        table = self._tables[request_id]
        if number >= table.first:
            self._pool.index.add(digest, table.entries[number])

    def free(self, request_id: str) -> None:
        """End a table, the tail first."""
        table = self._tables.pop(request_id)
        self._owed -= table.owed
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
        assert self._owed == sum(table.owed for _, table in tables), "a promise is lost"
        for request_id, table in tables:
            own = table.entries[table.first :]
            assert len(set(own)) == len(own), f"{request_id}: a block comes twice"
            assert set(table.entries[: table.first]) <= {self.null}, f"{request_id}: given back"
            for block in table.entries[max(table.first, num_final[request_id]) :]:
                self._pool.check_owned(block)

    def _first_seen(self, num_blocks: int) -> int:
        """The first block that is needed to resume behind `num_blocks` full ones, whose last token
        may be computed again."""
        return max(0, num_blocks * self._block_size - self._window) // self._block_size

    def _found(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks of a prefix that are needed to resume behind it."""
        found = [self._pool.index.block_of(it) for it in digests[self._first_seen(len(digests)) :]]
        blocks = [block for block in found if block is not None]
        assert len(blocks) == len(found), "only indexed blocks can be shared"
        return blocks

    def _promise(self, table: _Table) -> None:
        """Reserve the blocks that the table lacks for the window of its known tokens."""
        held = len(table.entries) - table.first
        owed = max(0, min(table.wanted, self._most_held) - held)
        self._owed += owed - table.owed
        table.owed = owed
