"""The blocks of one cache: free ones, used ones, and cached ones that may be evicted."""

from collections import Counter, OrderedDict

from slipstream.cache.prefix_index import PrefixIndex


class BlockPool:
    """Allocates blocks by number. Every block is in exactly one of three states:

        free        its content is not needed
        evictable   in the prefix index, but in no table; least recently used first
        referenced  in one table, or in several that share a prefix

    Attributes:
        index: the prefix index, which maps contents to blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, f"num_blocks must be at least 1, not {num_blocks}"
        self.num_blocks = num_blocks
        self.index = PrefixIndex()
        self._free = list(reversed(range(num_blocks)))  # a stack; block 0 goes first
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks

    @property
    def num_available(self) -> int:
        """Number of blocks that can be allocated now: free and evictable ones."""
        return len(self._free) + len(self._evictable)

    def is_evictable(self, block: int) -> bool:
        return block in self._evictable

    def take(self) -> int:
        """Allocate a block for one table."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            self.index.remove(block)
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference of one more table to an indexed block."""
        self._evictable.pop(block, None)
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Remove the reference of a table; an indexed block is cached until it is evicted."""
        self._references[block] -= 1
        if self._references[block]:
            return
        if block in self.index:
            self._evictable[block] = None
        else:
            self._free.append(block)

    def forget(self, block: int) -> bool:
        """Remove the block from the index if only one table has it; returns whether that is so."""
        alone = self._references[block] == 1
        if alone and block in self.index:
            self.index.remove(block)
        return alone

    def forget_contents(self) -> None:
        """Empty the index: evictable blocks become free, and blocks in tables when released."""
        self.index.clear()
        self._free.extend(self._evictable)
        self._evictable.clear()

    def check_owned(self, block: int) -> None:
        """Raise AssertionError unless only one table has the block, so that it may be written."""
        assert block not in self.index, f"block {block} is indexed too early"
        assert self._references[block] == 1, f"block {block} is shared too early"

    def check_invariants(self, held: Counter[int]) -> None:
        """Raise AssertionError unless every block is in exactly one state, which is right.

        Args:
            held: number of tables that have each block.
        """
        self.index.check_invariants()
        counted = {block: count for block, count in enumerate(self._references) if count}
        assert counted == held, "a reference count is not the number of tables that hold the block"
        places = Counter([*self._free, *self._evictable, *held])
        assert places == Counter(range(self.num_blocks)), "a block is in no place or in two"
        assert all(block not in self.index for block in self._free), "a free block is indexed"
        assert all(block in self.index for block in self._evictable), "evictable but not indexed"
