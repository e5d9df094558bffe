"""Finds full blocks by the tokens that they hold."""

import struct
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16

# Roots and blocks are hashed under different names, so that no namespace string can be made to
# look like a block.
_ROOT = b"slipstream.root"
_BLOCK = b"slipstream.block"


class PrefixIndex:
    """A one-to-one map between the content of full blocks and block ids.

    The content of a block is named by a digest over its own tokens and the digest of the block in
    front of it, so one digest stands for a whole prefix. The first block's parent is the digest of
    a namespace: what is stored per token (only the target's layers, or a certain drafter's as
    well), and the cache salt. Equal digests are taken as equal prefixes: at 128 bits, chance
    collisions are negligible.
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @staticmethod
    def root(namespace: str) -> bytes:
        """The digest in front of the first block of every chain in `namespace`."""
        return blake2b(namespace.encode(), digest_size=DIGEST_BYTES, person=_ROOT).digest()

    @staticmethod
    def child(parent: bytes, token_ids: Sequence[int], beside: bytes = b"") -> bytes:
        """The digest of the block that holds `token_ids` behind the prefix `parent`.

        Args:
            beside: see `content_beside`; blocks of one index have equally many tokens, so it cannot
                be taken for some of them.
        """
        content = parent + struct.pack(f"<{len(token_ids)}I", *token_ids) + beside
        return blake2b(content, digest_size=DIGEST_BYTES, person=_BLOCK).digest()

    def add(self, digest: bytes, block: int) -> bool:
        """Enter a block that is not in the index; False if another holds this content already."""
        assert block not in self._digest_of, f"block {block} already has content in the index"
        if digest in self._block_of:
            return False
        self._block_of[digest] = block
        self._digest_of[block] = digest
        return True

    def remove(self, block: int) -> None:
        """Forget an indexed block."""
        del self._block_of[self._digest_of.pop(block)]

    def clear(self) -> None:
        """Forget all blocks."""
        self._block_of.clear()
        self._digest_of.clear()

    def block_of(self, digest: bytes) -> int | None:
        return self._block_of.get(digest)

    def digest_of(self, block: int) -> bytes | None:
        return self._digest_of.get(block)

    def __contains__(self, block: int) -> bool:
        return block in self._digest_of

    def __len__(self) -> int:
        return len(self._digest_of)

    def check_invariants(self) -> None:
        """Raise AssertionError unless the two maps are each other's inverse."""
        inverse = {digest: block for block, digest in self._digest_of.items()}
        assert inverse == self._block_of, "the prefix index is not one-to-one"
        assert len(inverse) == len(self._digest_of), "two blocks share one digest"
