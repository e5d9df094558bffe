"""Assigns blocks of the KV cache to requests. The storage itself is elsewhere."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, KeysView, Sequence
from dataclasses import dataclass, field

from slipstream.cache.block_pool import BlockPool
from slipstream.cache.state_places import NO_PLACE, StatePlaces
from slipstream.cache.window_blocks import WindowBlocks
from slipstream.core.batch import LastCheckpoint
from slipstream.core.spans import Span, extra_key


@dataclass(slots=True, eq=False)
class _Table:
    """The blocks of one request.

    The first `num_final` blocks are full of committed tokens. They are in the prefix index (or have
    the content of a block that is), may be shared, and are neither written nor freed before the
    request ends. `digests` names their contents.
    """

    blocks: list[int]
    digests: list[bytes] = field(default_factory=list)

    @property
    def num_final(self) -> int:
        return len(self.digests)


LookUp = Callable[["BlockManager"], list[int]]


class BlockManager:
    """Allocates the blocks of the KV cache, and shares blocks with equal content.

    Args:
        num_blocks: blocks in the cache.
        block_size: tokens in a block.
        enable_prefix_caching: keep the blocks of ended requests for later ones with the same
            prefix.
        window: blocks of layers with a sliding window, if those have their own blocks.
        states: checkpoints of recurrent states, if layers have such states and prefixes are cached.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        window: WindowBlocks | None = None,
        states: StatePlaces | None = None,
    ) -> None:
        assert block_size > 0, f"block_size must be at least 1, not {block_size}"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._window, self._states = window, states
        self._other_parts = [kept for kept in (window, states) if kept is not None]
        self.num_queried_tokens = 0  # prompt tokens looked up when their request was admitted
        self.num_hit_tokens = 0  # how many of them were found
        self.reset()

    def reset(self) -> None:
        """Empty all blocks and forget all tables."""
        self._pool = BlockPool(self.num_blocks)
        self._tables: dict[str, _Table] = {}
        for kept in self._other_parts:
            kept.reset()

    def forget_prefixes(self) -> None:
        """Empty the prefix index; tables stay as they are.

        Blocks that a running request fills later are found only after a prefix that is computed
        again with the same content.
        """
        self._pool.forget_contents()
        for kept in self._other_parts:
            kept.forget_contents()

    @property
    def num_available(self) -> int:
        """Number of blocks that can be allocated now: free and evictable ones."""
        return self._pool.num_available

    @property
    def num_all_blocks(self) -> int:
        """Number of blocks in the caches of all data parallel ranks together."""
        return self.num_blocks

    @property
    def usage(self) -> float:
        """The share of blocks in use; with window blocks, the larger of the two shares."""
        used = 1.0 - self.num_available / self.num_blocks
        if self._window is None:
            return used
        return max(used, 1.0 - self._window.num_available / self._window.num_blocks)

    @property
    def request_ids(self) -> KeysView[str]:
        return self._tables.keys()

    def rank_of(self, request_id: str) -> int:
        """The data parallel rank whose cache has the request's blocks; else 0."""
        del request_id
        return 0

    def in_same_cache(self, request_id: str) -> Collection[str]:
        """The requests whose blocks are in the same rank's cache as this one's, itself included."""
        del request_id
        return self._tables.keys()

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table(self, request_id: str) -> Sequence[int]:
        """The blocks of a request, in order: a live view, valid until the table next changes."""
        return self._tables[request_id].blocks

    def window_table(self, request_id: str) -> Sequence[int]:
        """A request's blocks of layers with a window, a live view; empty without such blocks."""
        return () if self._window is None else self._window.table(request_id)

    def capacity(self, request_id: str) -> int:
        """Maximum number of tokens that the table could cover with all available blocks."""
        blocks = len(self._tables[request_id].blocks) + self.num_available
        if self._window is not None:
            blocks = min(blocks, self._window.reach(request_id))
        return blocks * self.block_size

    def num_final_tokens(self, request_id: str) -> int:
        """Leading tokens in blocks that are never written again while the request lives."""
        return self._tables[request_id].num_final * self.block_size

    def places(self, look_up: LookUp) -> Iterator[tuple[int, "BlockManager", list[int]]]:
        """The places for a new request, the best first: (rank, its block manager, the cached prefix
        that `look_up` finds there)."""
        yield 0, self, look_up(self)

    def match_prefix(
        self, namespace: str, token_ids: Sequence[int], spans: Sequence[Span] = ()
    ) -> list[int]:
        """The longest cached prefix of these tokens, with these spans, as a chain of blocks.

        It leaves at least one token, since a request needs a row to predict from. Nothing is
        reserved: the blocks may be evicted until `admit` takes them.
        """
        found: list[int] = []
        if not self.enable_prefix_caching:
            return found
        index = self._pool.index
        digest = index.root(namespace)
        for number in range((len(token_ids) - 1) // self.block_size):
            digest = self._child(digest, token_ids, spans, number)
            block = index.block_of(digest)
            if block is None:
                break
            found.append(block)
        return found

    def resumable(self, blocks: Sequence[int]) -> list[int]:
        """The longest prefix of the blocks that `match_prefix` found at whose end a request can
        resume, which depends on window blocks and checkpoints of states."""
        digests, last = self._digests(blocks), -1
        while len(digests) != last:
            last = len(digests)
            for kept in self._other_parts:
                del digests[kept.longest_prefix(digests) :]
        return [*blocks[:last]]

    def can_admit(self, prefix_blocks: Sequence[int], num_tokens: int, reserve: int = 0) -> bool:
        """Whether a table that begins with `prefix_blocks` could cover `num_tokens` tokens, with
        `reserve` blocks still available after that."""
        fresh = self.blocks_for(num_tokens) - len(prefix_blocks)
        revived = sum(self._pool.is_evictable(block) for block in prefix_blocks)
        if fresh + revived + reserve > self.num_available:
            return False
        if self._window is None:
            return True
        wanted = self.blocks_for(num_tokens)
        return self._window.can_admit(self._digests(prefix_blocks), wanted, reserve)

    def admit(
        self,
        request_id: str,
        prefix_blocks: Sequence[int] = (),
        num_queried_tokens: int = 0,
        num_tokens: int = 0,
        num_shared: int = 0,
        rank: int = 0,
    ) -> None:
        """Start a table with the blocks that `resumable` returned.

        Args:
            num_queried_tokens: prompt tokens to count in the hit statistics; 0 counts neither
                these nor the hits.
            num_tokens: number of tokens of the request.
            num_shared: number of blocks that `match_prefix` found.
            rank: a rank from `places`.
        """
        del rank
        assert request_id not in self._tables, f"request {request_id} already has a table"
        digests = self._digests(prefix_blocks)
        for block in prefix_blocks:
            self._pool.share(block)
        if self._window is not None:
            self._window.admit(request_id, digests)
        if self._states is not None:
            self._states.admit(request_id, digests, num_tokens, num_shared)
        self._tables[request_id] = _Table(list(prefix_blocks), digests)
        if num_queried_tokens and self.enable_prefix_caching:
            self.num_queried_tokens += num_queried_tokens
            self.num_hit_tokens += len(prefix_blocks) * self.block_size

    def grow(self, request_id: str, num_tokens: int, num_written: int | None = None) -> bool:
        """Make the table cover `num_tokens` tokens; False, without changes, if there are not
        enough blocks.

        Args:
            num_written: how many of the tokens may be written before the table grows again; None:
                all. The table of layers with a window covers these only.
        """
        blocks, window = self._tables[request_id].blocks, self._window
        wanted = self.blocks_for(num_tokens)
        missing = wanted - len(blocks)
        if missing > self.num_available:
            return False
        if window is not None:
            reached = wanted if num_written is None else self.blocks_for(num_written)
            if window.missing(request_id, reached) > window.num_available:
                return False
            window.grow(request_id, wanted, reached)
        for _ in range(missing):
            blocks.append(self._pool.take())
        return True

    def rewind(self, request_id: str, num_tokens: int, num_written: int | None = None) -> None:
        """Free the blocks after those that `num_tokens` tokens need; `num_written`: see `grow`."""
        table = self._tables[request_id]
        keep = self.blocks_for(num_tokens)
        # Final blocks have committed tokens, which are never undone. The blocks that are freed
        # here had draft tokens; none of them is shared or indexed.
        assert keep >= table.num_final, f"{request_id}: cannot rewind into final blocks"
        while len(table.blocks) > keep:
            self._pool.release(table.blocks.pop())
        if self._window is not None:
            reached = keep if num_written is None else self.blocks_for(num_written)
            self._window.rewind(request_id, keep, reached)

    def slide(self, request_id: str, num_computed: int) -> None:
        """Free the blocks before all windows of rows from token `num_computed` on; earlier
        rows are never computed again."""
        if self._window is not None:
            self._window.slide(request_id, num_computed)

    def index(
        self,
        request_id: str,
        namespace: str,
        token_ids: Sequence[int],
        num_tokens: int,
        spans: Sequence[Span] = (),
    ) -> None:
        """Add the full blocks among the first `num_tokens` tokens to the prefix index.

        These tokens must be committed and computed: from now on their blocks may be shared. If
        another block has the same content, that one stays in the index. A request keeps the
        namespace that its prefix was matched in.
        """
        if not self.enable_prefix_caching:
            return
        table = self._tables[request_id]
        num_full = num_tokens // self.block_size
        assert num_tokens <= len(token_ids), f"{request_id}: more tokens than there are"
        assert num_full <= len(table.blocks), f"{request_id}: tokens without a block"
        for number in range(table.num_final, num_full):
            parent = table.digests[-1] if number else self._pool.index.root(namespace)
            digest = self._child(parent, token_ids, spans, number)
            self._pool.index.add(digest, table.blocks[number])
            if self._window is not None:
                self._window.add_to_index(request_id, number, digest)
            table.digests.append(digest)
        if self._states is not None:
            self._states.index(request_id, table.digests)

    def free(self, request_id: str, slot: int = -1) -> None:
        """End a table. Its indexed blocks stay in the index until they are evicted.

        Args:
            slot: the request's slot, which may be given to another one now.
        """
        if self._states is not None:
            self._states.end(request_id, self._tables[request_id].digests, slot)
        # Tail first: a block is useful only together with those before it, so it should be
        # evicted before them.
        for block in reversed(self._tables.pop(request_id).blocks):
            self._pool.release(block)
        for kept in self._other_parts:
            kept.free(request_id)

    # ------------------------------------------------------------------ states of requests

    @property
    def num_checkpoints(self) -> int:
        """Number of checkpoints of states from which a prefix can be resumed."""
        return 0 if self._states is None else self._states.num_checkpoints

    def checkpoint(self, request_id: str) -> int:
        """The place of the checkpoint from which an admitted request resumes; -1 if there is
        none."""
        return NO_PLACE if self._states is None else self._states.latest(request_id)

    def chunk_end(self, request_id: str, start: int, end: int) -> int:
        return end if self._states is None else self._states.chunk_end(request_id, start, end)

    def plan_checkpoint(
        self, request_id: str, most_tokens: int, num_before: int | None = None
    ) -> int:
        if self._states is None:
            return NO_PLACE
        return self._states.plan(request_id, most_tokens, num_before)

    def commit_states(self, request_id: str, num_tokens: int, num_accepted: int) -> None:
        if self._states is not None:
            self._states.commit(request_id, num_tokens, num_accepted)

    def take_last_checkpoints(self) -> tuple[LastCheckpoint, ...]:
        return () if self._states is None else self._states.take_last()

    # ------------------------------------------------------------------ invariants

    def check_invariants(self) -> None:
        """Raise AssertionError unless tables, free blocks and the index agree about every block."""
        self._pool.check_invariants(
            Counter(block for table in self._tables.values() for block in table.blocks)
        )
        num_final = {name: table.num_final for name, table in self._tables.items()}
        for kept in self._other_parts:
            kept.check_invariants(num_final)
        for request_id, table in self._tables.items():
            self._check_table(request_id, table)

    def _check_table(self, request_id: str, table: _Table) -> None:
        assert len(set(table.blocks)) == len(table.blocks), f"{request_id}: a block comes twice"
        assert 0 <= table.num_final <= len(table.blocks), f"{request_id}: final blocks are missing"
        for block in table.blocks[table.num_final :]:
            self._pool.check_owned(block)  # it will still be written

    def _child(
        self, parent: bytes, token_ids: Sequence[int], spans: Sequence[Span], number: int
    ) -> bytes:
        """The digest of one full block after the prefix `parent`."""
        first, end = number * self.block_size, (number + 1) * self.block_size
        extra = extra_key(spans, first, end) if spans else b""
        return self._pool.index.child(parent, token_ids[first:end], extra)

    def _digests(self, blocks: Sequence[int]) -> list[bytes]:
        found = [self._pool.index.digest_of(block) for block in blocks]
        digests = [digest for digest in found if digest is not None]
        assert len(digests) == len(blocks), "only indexed blocks can be shared"
        return digests
