"""The blocks of data parallel ranks, each of which has its own cache and requests."""

from collections.abc import Callable, Collection, Iterator, KeysView, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

from slipstream.cache.block_manager import BlockManager, LookUp
from slipstream.core.batch import LastCheckpoint

F = TypeVar("F", bound=Callable[..., Any])


def _on_its_rank(method: F) -> F:
    """Make a method call the block manager of the request's rank."""

    @wraps(method)
    def on_its_rank(self: "PerRankBlocks", request_id: str, *args: Any, **kwargs: Any) -> Any:
        return method(self._of(request_id), request_id, *args, **kwargs)

    return cast(F, on_its_rank)


class PerRankBlocks(BlockManager):
    """One block manager for each rank; a request has all its blocks on one rank.

    A request is placed on the rank with the fewest requests that has room for it; among equals on
    the rank with its longest cached prefix, then on the one with the most available blocks. Blocks
    in tables have the numbers that they have on their rank.

    Args:
        ranks: the block managers of the ranks, with equal settings. `num_blocks` is that of each.
    """

    def __init__(self, ranks: Sequence[BlockManager]) -> None:
        self._ranks, self._on = tuple(ranks), dict[str, int]()
        first = ranks[0]
        super().__init__(first.num_blocks, first.block_size, first.enable_prefix_caching)

    def reset(self) -> None:
        self._on.clear()
        for blocks in self._ranks:
            blocks.reset()

    def forget_prefixes(self) -> None:
        for blocks in self._ranks:
            blocks.forget_prefixes()

    @property
    def num_available(self) -> int:
        """Number of blocks that can be allocated now, on all ranks together."""
        return sum(blocks.num_available for blocks in self._ranks)

    @property
    def num_all_blocks(self) -> int:
        return sum(blocks.num_blocks for blocks in self._ranks)

    @property
    def usage(self) -> float:
        """The mean of the ranks' fractions of blocks in use."""
        return sum(blocks.usage for blocks in self._ranks) / len(self._ranks)

    @property
    def request_ids(self) -> KeysView[str]:
        return self._on.keys()

    def rank_of(self, request_id: str) -> int:
        return self._on[request_id]

    def in_same_cache(self, request_id: str) -> Collection[str]:
        return self._of(request_id).request_ids

    # ------------------------------------------------------------------ a request comes

    def places(self, look_up: LookUp) -> Iterator[tuple[int, BlockManager, list[int]]]:
        counts = [len(blocks.request_ids) for blocks in self._ranks]
        for count in sorted(set(counts)):
            equals = [rank for rank, number in enumerate(counts) if number == count]
            found = [(rank, self._ranks[rank], look_up(self._ranks[rank])) for rank in equals]
            yield from sorted(found, key=lambda it: (-len(it[2]), -it[1].num_available))

    def admit(
        self,
        request_id: str,
        prefix_blocks: Sequence[int] = (),
        num_queried_tokens: int = 0,
        num_tokens: int = 0,
        num_shared: int = 0,
        rank: int = 0,
    ) -> None:
        self._on[request_id], blocks = rank, self._ranks[rank]
        blocks.admit(request_id, prefix_blocks, num_queried_tokens, num_tokens, num_shared)
        self.num_queried_tokens = sum(blocks.num_queried_tokens for blocks in self._ranks)
        self.num_hit_tokens = sum(blocks.num_hit_tokens for blocks in self._ranks)

    # ------------------------------------------------------------------ a request is there

    def _of(self, request_id: str) -> BlockManager:
        return self._ranks[self._on[request_id]]

    table = _on_its_rank(BlockManager.table)
    window_table = _on_its_rank(BlockManager.window_table)
    capacity = _on_its_rank(BlockManager.capacity)
    num_final_tokens = _on_its_rank(BlockManager.num_final_tokens)
    grow = _on_its_rank(BlockManager.grow)
    rewind = _on_its_rank(BlockManager.rewind)
    slide = _on_its_rank(BlockManager.slide)
    index = _on_its_rank(BlockManager.index)
    checkpoint = _on_its_rank(BlockManager.checkpoint)
    chunk_end = _on_its_rank(BlockManager.chunk_end)
    plan_checkpoint = _on_its_rank(BlockManager.plan_checkpoint)
    commit_states = _on_its_rank(BlockManager.commit_states)

    def free(self, request_id: str, slot: int = -1) -> None:
        self._ranks[self._on.pop(request_id)].free(request_id, slot)

    def take_last_checkpoints(self) -> tuple[LastCheckpoint, ...]:
        taken = [(rank, blocks.take_last_checkpoints()) for rank, blocks in enumerate(self._ranks)]
        return tuple(replace(last, rank=rank) for rank, each in taken for last in each)

    @property
    def num_checkpoints(self) -> int:
        return sum(blocks.num_checkpoints for blocks in self._ranks)

    def check_invariants(self) -> None:
        """Raise AssertionError unless each rank's blocks agree, and each request is on one."""
        for rank, blocks in enumerate(self._ranks):
            blocks.check_invariants()
            assert set(blocks.request_ids) == {name for name, it in self._on.items() if it == rank}
