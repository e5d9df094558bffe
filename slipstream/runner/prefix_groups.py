"""Chooses the requests of a step whose common leading blocks attention reads once for all of them.

Attention over few rows reads a request's context for this request alone, so blocks that requests
share are read as often as there are requests. `Paging.shared` names one group of requests and the
blocks that these have in common; the others are computed as before. A step with a group launches
up to two more kernels for each layer and writes partial sums, so a group has to save more than
that: it has at least `LEAST_MEMBERS` requests, (requests - 1) * tokens is at least `LEAST_SAVED`,
and the group is the one for which this is largest, by whole pieces of `PIECE` tokens.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from slipstream.core.batch import Batch, ScheduledRequest
from slipstream.core.request import Request
from slipstream.runner.device_state import num_equal

# Found on an H200 with 8 KV heads of 128 numbers: 8 requests that share 4,096 tokens are faster by
# a tenth, two that share 16,384 slower by half.
LEAST_SAVED = 24576
LEAST_MEMBERS = 4
PIECE = 512  # tokens; a group has at least so many, as fewer are too little for many programs
MOST_KNOWN = 1 << 16  # beginnings, before those of ended requests are forgotten


class PrefixGroup(NamedTuple):
    """Some requests of a batch that share their first tokens.

    Attributes:
        tokens: number of tokens in the blocks that all of them have.
        members: their indices in the batch, rising.
    """

    tokens: int = 0
    members: tuple[int, ...] = ()

    def columns(self, requests: int) -> list[list[int]]:
        """`SharedBlocks.tokens` and `SharedBlocks.members` as two rows of `requests` numbers."""
        tokens = [0] * requests
        for member in self.members:
            tokens[member] = self.tokens
        missing = requests - len(self.members)
        return [tokens, [1 + member for member in self.members] + [0] * missing]


class PrefixGroups:
    """Finds the group of each step; only when other requests decode, as the full blocks of running
    requests stay as they are."""

    def __init__(self, block_size: int) -> None:
        self._block_size, self._piece = block_size, max(1, PIECE // block_size)
        # Numbers beginnings of block tables, of whole pieces: by the number of what is before the
        # last piece, and its blocks. So equal numbers are equal beginnings.
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        self._beginnings: dict[Request, list[int]] = {}  # the numbers of 1, 2, ... pieces
        self._requests: list[Request] = []
        self._group: PrefixGroup | None = None

    def of(self, batch: Batch) -> PrefixGroup | None:
        """The group of a step in which all requests decode; None: none is worth it."""
        if not batch.is_decode:
            for item in batch.admitted:  # it may have been preempted, and get other blocks now
                self._beginnings.pop(item.request, None)
            self._requests = []
            return None
        requests = [item.request for item in batch.requests]
        if requests != self._requests:
            self._requests, self._group = requests, self._found(batch.requests)
        return self._group

    def _found(self, items: Sequence[ScheduledRequest]) -> PrefixGroup | None:
        if len(self._numbers) > MOST_KNOWN:
            self._numbers, self._beginnings = {}, {}
        firsts = Counter(block for it in items for block in it.block_table[:1])
        known, self._beginnings = self._beginnings, {}
        groups: dict[int, list[int]] = defaultdict(list)
        most, members, blocks = 0, [0], 0
        for index, item in enumerate(items):
            if not item.block_table or firsts[item.block_table[0]] == 1:
                continue
            numbers = known.get(item.request) or self._beginnings_of(item.block_table)
            self._beginnings[item.request] = numbers
            for pieces, number in enumerate(numbers, 1):
                group = groups[number]
                group.append(index)
                if (len(group) - 1) * pieces > most:
                    most, members, blocks = (len(group) - 1) * pieces, group, pieces * self._piece
        # All may have some of the next piece, too.
        after = [items[index].block_table[blocks : blocks + self._piece] for index in members]
        tokens = (blocks + min(num_equal(after[0], it) for it in after)) * self._block_size
        if len(members) < LEAST_MEMBERS or (len(members) - 1) * tokens < LEAST_SAVED:
            return None
        return PrefixGroup(tokens, tuple(members))

    def _beginnings_of(self, table: Sequence[int]) -> list[int]:
        numbers, last, size = [], -1, self._piece
        for first in range(0, len(table) - size + 1, size):
            piece = last, tuple(table[first : first + size])
            last = self._numbers.setdefault(piece, len(self._numbers))
            numbers.append(last)
        return numbers
