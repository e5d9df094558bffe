"""Who holds which block of the KV cache. Numbers only: the storage itself lives elsewhere."""

from collections import Counter, OrderedDict
from collections.abc import KeysView, Sequence
from dataclasses import dataclass

from slipstream.cache.prefix_index import PrefixIndex


@dataclass(slots=True, eq=False)
class _Table:
    """The blocks of one request.

    The first `num_final` blocks are full of committed tokens: they may be shared, are in the
    prefix index (or equal a block that is), and are never written or given back before the
    request ends. `tip` is the digest of the last of them.
    """

    blocks: list[int]
    num_final: int = 0
    tip: bytes = b""


class BlockManager:
    """Hands out the blocks of the KV cache and shares those with equal content.

    Every block is in exactly one place:

        free        nothing worth keeping in it
        evictable   in the prefix index, in no table; least recently used first
        referenced  in one table, or in several that share a prefix

    Args:
        num_blocks: blocks in the cache.
        block_size: tokens in a block.
        enable_prefix_caching: keep the blocks of ended requests for later ones that begin alike.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        assert num_blocks > 0, f"num_blocks must be at least 1, not {num_blocks}"
        assert block_size > 0, f"block_size must be at least 1, not {block_size}"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_queried_tokens = 0  # prompt tokens looked up when their request was admitted
        self.num_hit_tokens = 0  # how many of them were found
        self.reset()

    def reset(self) -> None:
        """Empty all blocks and forget all tables."""
        self._free = list(reversed(range(self.num_blocks)))  # a stack; block 0 goes first
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * self.num_blocks
        self._tables: dict[str, _Table] = {}
        self._index = PrefixIndex()

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free ones and evictable ones."""
        return len(self._free) + len(self._evictable)

    @property
    def request_ids(self) -> KeysView[str]:
        """The requests that have a table."""
        return self._tables.keys()

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def table(self, request_id: str) -> Sequence[int]:
        """The blocks of a request, in order: a live view, valid until the table next changes."""
        return self._tables[request_id].blocks

    def capacity(self, request_id: str) -> int:
        """The most tokens that the table could cover if it took every available block."""
        held = len(self._tables[request_id].blocks)
        return (held + self.num_available) * self.block_size

    def num_final_tokens(self, request_id: str) -> int:
        """Leading tokens in blocks that are never written again while the request lives."""
        return self._tables[request_id].num_final * self.block_size

    def match_prefix(self, namespace: str, token_ids: Sequence[int]) -> list[int]:
        """The longest chain of indexed blocks that these tokens begin with.

        One token at least is left over, since a request needs a row to predict from. Changes
        nothing: the blocks are only safe once `admit` has taken them.
        """
        found: list[int] = []
        if not self.enable_prefix_caching:
            return found
        digest = self._index.root(namespace)
        for number in range((len(token_ids) - 1) // self.block_size):
            digest = self._index.child(digest, self._content(token_ids, number))
            block = self._index.block_of(digest)
            if block is None:
                break
            found.append(block)
        return found

    def can_admit(self, prefix_blocks: Sequence[int], num_tokens: int, reserve: int = 0) -> bool:
        """Whether a table that begins with `prefix_blocks` could cover `num_tokens` tokens, with
        `reserve` blocks still available after that."""
        fresh = self.blocks_for(num_tokens) - len(prefix_blocks)
        revived = sum(block in self._evictable for block in prefix_blocks)
        return fresh + revived + reserve <= self.num_available

    def admit(
        self, request_id: str, prefix_blocks: Sequence[int] = (), num_queried_tokens: int = 0
    ) -> None:
        """Start a table with the blocks that `match_prefix` found.

        Args:
            num_queried_tokens: prompt tokens to count in the hit statistics; 0 counts neither
                these nor the hits.
        """
        assert request_id not in self._tables, f"request {request_id} already has a table"
        table = _Table(list(prefix_blocks), len(prefix_blocks))
        for block in prefix_blocks:
            self._share(block)
        if prefix_blocks:
            tip = self._index.digest_of(prefix_blocks[-1])
            assert tip is not None, "only indexed blocks can be shared"
            table.tip = tip
        self._tables[request_id] = table
        if num_queried_tokens and self.enable_prefix_caching:
            self.num_queried_tokens += num_queried_tokens
            self.num_hit_tokens += len(prefix_blocks) * self.block_size

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Make the table cover `num_tokens` tokens; False, and nothing changes, if blocks lack."""
        blocks = self._tables[request_id].blocks
        missing = self.blocks_for(num_tokens) - len(blocks)
        if missing > self.num_available:
            return False
        for _ in range(missing):
            blocks.append(self._take())
        return True

    def rewind(self, request_id: str, num_tokens: int) -> None:
        """Give back the blocks behind those that `num_tokens` tokens need."""
        table = self._tables[request_id]
        keep = self.blocks_for(num_tokens)
        # Final blocks hold committed tokens, which nobody takes back: what goes are blocks that
        # held drafts, none of them shared or indexed.
        assert keep >= table.num_final, f"{request_id}: cannot rewind into final blocks"
        while len(table.blocks) > keep:
            self._release(table.blocks.pop())

    def index(
        self, request_id: str, namespace: str, token_ids: Sequence[int], num_tokens: int
    ) -> None:
        """Enter the full blocks among the first `num_tokens` tokens into the prefix index.

        These tokens must be committed and computed: from here on their blocks may be shared. When
        another block has the same content already, that one stays the entry. A request keeps to
        one namespace, the one that its prefix was matched in.
        """
        if not self.enable_prefix_caching:
            return
        table = self._tables[request_id]
        num_full = num_tokens // self.block_size
        assert num_tokens <= len(token_ids), f"{request_id}: more tokens than there are"
        assert num_full <= len(table.blocks), f"{request_id}: tokens without a block"
        for number in range(table.num_final, num_full):
            parent = table.tip if number else self._index.root(namespace)
            table.tip = self._index.child(parent, self._content(token_ids, number))
            self._index.add(table.tip, table.blocks[number])
            table.num_final = number + 1

    def free(self, request_id: str) -> None:
        """End a table. What is in the index stays there until its block is needed."""
        # Tail first: a block is of use only together with those in front of it, so it should be
        # evicted before them.
        for block in reversed(self._tables.pop(request_id).blocks):
            self._release(block)

    def check_invariants(self) -> None:
        """Raise AssertionError unless every block is in its one right place."""
        self._index.check_invariants()
        held = Counter(block for table in self._tables.values() for block in table.blocks)
        counted = {block: count for block, count in enumerate(self._references) if count}
        assert counted == held, "a reference count is not the number of tables that hold the block"
        places = Counter([*self._free, *self._evictable, *held])
        assert places == Counter(range(self.num_blocks)), "a block is in no place or in two"
        assert all(block not in self._index for block in self._free), "a free block is indexed"
        assert all(block in self._index for block in self._evictable), "evictable but not indexed"
        for request_id, table in self._tables.items():
            self._check_table(request_id, table)

    def _check_table(self, request_id: str, table: _Table) -> None:
        assert len(set(table.blocks)) == len(table.blocks), f"{request_id}: a block comes twice"
        assert 0 <= table.num_final <= len(table.blocks), f"{request_id}: final blocks are missing"
        for block in table.blocks[table.num_final :]:
            # Such a block will still be written.
            assert block not in self._index, f"{request_id}: block {block} is indexed too early"
            assert self._references[block] == 1, f"{request_id}: block {block} is shared too early"

    def _content(self, token_ids: Sequence[int], number: int) -> Sequence[int]:
        """The tokens of one full block."""
        return token_ids[number * self.block_size : (number + 1) * self.block_size]

    def _take(self) -> int:
        """A block without content, for one table."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            self._index.remove(block)
        self._references[block] = 1
        return block

    def _share(self, block: int) -> None:
        self._evictable.pop(block, None)
        self._references[block] += 1

    def _release(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block]:
            return
        if block in self._index:
            self._evictable[block] = None
        else:
            self._free.append(block)
