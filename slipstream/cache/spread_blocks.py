"""Blocks of several ranks, each of which has a cache and requests of its own."""

from collections.abc import Collection, Iterator, KeysView, Sequence

from slipstream.cache.block_manager import BlockManager, LookUp
from slipstream.core.spans import Span


class SpreadBlocks(BlockManager):
    """One block manager for each rank; a request has all its blocks on one rank.

    A request goes to the rank with the fewest that has room for it, and among equals to the one
    that has the longest prefix of it, or else the most room. Prefixes are looked up on one of
    `places`, and tables name blocks by their numbers there.

    Args:
        ranks: managers of the ranks, all of the same form. `num_blocks` is the number of each.
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
        """Blocks that can be handed out now, on all ranks together."""
        return sum(blocks.num_available for blocks in self._ranks)

    @property
    def num_all_blocks(self) -> int:
        return sum(blocks.num_blocks for blocks in self._ranks)

    @property
    def usage(self) -> float:
        """The mean of the ranks' shares in use."""
        return sum(blocks.usage for blocks in self._ranks) / len(self._ranks)

    @property
    def request_ids(self) -> KeysView[str]:
        return self._on.keys()

    def rank_of(self, request_id: str) -> int:
        return self._on[request_id]

    def beside(self, request_id: str) -> Collection[str]:
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
        blocks = self._ranks[rank]
        self._on[request_id] = rank
        blocks.admit(request_id, prefix_blocks, num_queried_tokens, num_tokens, num_shared)
        if num_queried_tokens and self.enable_prefix_caching:
            self.num_queried_tokens += num_queried_tokens
            self.num_hit_tokens += len(prefix_blocks) * self.block_size

    # ------------------------------------------------------------------ a request is there

    def _of(self, request_id: str) -> BlockManager:
        return self._ranks[self._on[request_id]]

    def table(self, request_id: str) -> Sequence[int]:
        return self._of(request_id).table(request_id)

    def window_table(self, request_id: str) -> Sequence[int]:
        return self._of(request_id).window_table(request_id)

    def capacity(self, request_id: str) -> int:
        return self._of(request_id).capacity(request_id)

    def num_final_tokens(self, request_id: str) -> int:
        return self._of(request_id).num_final_tokens(request_id)

    def grow(self, request_id: str, num_tokens: int, num_written: int | None = None) -> bool:
        return self._of(request_id).grow(request_id, num_tokens, num_written)

    def rewind(self, request_id: str, num_tokens: int) -> None:
        self._of(request_id).rewind(request_id, num_tokens)

    def slide(self, request_id: str, num_computed: int) -> None:
        self._of(request_id).slide(request_id, num_computed)

    def index(
        self,
        request_id: str,
        namespace: str,
        token_ids: Sequence[int],
        num_tokens: int,
        spans: Sequence[Span] = (),
    ) -> None:
        self._of(request_id).index(request_id, namespace, token_ids, num_tokens, spans)

    def free(self, request_id: str) -> None:
        self._of(request_id).free(request_id)
        del self._on[request_id]

    # ------------------------------------------------------------------ states of requests

    @property
    def num_checkpoints(self) -> int:
        return sum(blocks.num_checkpoints for blocks in self._ranks)

    def checkpoint(self, request_id: str) -> int:
        return self._of(request_id).checkpoint(request_id)

    def chunk_end(self, request_id: str, start: int, end: int) -> int:
        return self._of(request_id).chunk_end(request_id, start, end)

    def plan_checkpoint(
        self, request_id: str, num_tokens: int, drafts_in_flight: int | None = None
    ) -> int:
        return self._of(request_id).plan_checkpoint(request_id, num_tokens, drafts_in_flight)

    def take_in(self, request_id: str, num_tokens: int) -> None:
        self._of(request_id).take_in(request_id, num_tokens)

    def check_invariants(self) -> None:
        """Raise AssertionError unless each rank's blocks agree, and each request is on one."""
        for rank, blocks in enumerate(self._ranks):
            blocks.check_invariants()
            assert set(blocks.request_ids) == {name for name, it in self._on.items() if it == rank}
