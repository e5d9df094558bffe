"""Chooses the requests of a step whose common leading blocks attention reads once for all of them.

Attention over few rows reads a request's context for this request alone, so blocks that requests
share are read as often as there are requests. `Paging.shared` names one group of requests and the
blocks that these have in common; the others are computed as before. A step with a group launches
up to two more kernels for each layer and writes partial sums, so a group has to save more than
that: (requests - 1) * tokens is at least `LEAST_SAVED`, and the group is the one for which it is
largest.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from slipstream.core.batch import Batch
from slipstream.core.request import Request
from slipstream.runner.device_state import num_equal

# Of keys and values of 4 KB a token in a layer, an H200 reads so many from its L2 cache in 12 us.
LEAST_SAVED = 16384
LEAST_TOKENS = 512  # fewer leave little to divide among programs


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
    """Finds the group of each step. Steps with the same requests have the same group, since the
    full blocks of running requests stay as they are."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._requests: list[Request] = []
        self._group: PrefixGroup | None = None

    def of(self, batch: Batch) -> PrefixGroup | None:
        """The group of a step in which all requests decode; None: none is worth it."""
        requests = [item.request for item in batch.requests] if batch.is_decode else []
        if requests != self._requests:
            tables = [item.block_table for item in batch.requests] if requests else []
            self._requests, self._group = requests, prefix_group(tables, self._block_size)
        return self._group


def prefix_group(tables: Sequence[Sequence[int]], block_size: int) -> PrefixGroup | None:
    """The group of the block tables for which most reads are saved; None: no group saves enough."""
    order = sorted(range(len(tables)), key=lambda index: [*tables[index]])
    # In this order a group is a run, and shares as much as its least similar neighbours do. So it
    # is the largest rectangle under the numbers of blocks that neighbours share.
    common = [num_equal(tables[one], tables[other]) for one, other in pairwise(order)]
    most, found = LEAST_SAVED, None
    rising: list[tuple[int, int]] = []  # (first, blocks) of runs that may go on
    for index, blocks in enumerate([*common, 0]):
        first = index
        while rising and rising[-1][1] >= blocks:
            first, height = rising.pop()
            tokens = height * block_size
            if tokens >= LEAST_TOKENS and (index - first) * tokens >= most:
                most = (index - first) * tokens
                found = PrefixGroup(tokens, tuple(sorted(order[first : index + 1])))
        rising.append((first, blocks))
    return found
