"""The prefix index: finds full blocks by the tokens of their prefix."""

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

    The content of a block is identified by a digest of its own tokens and the digest of the block
    before it, so a digest identifies a whole prefix. The first block's parent is the digest of
    a namespace: the layers that are stored for each token (only the target's, or a certain
    drafter's as well), the adapter and the cache salt. Equal digests are taken as equal prefixes:
    at 128 bits, accidental collisions are negligible.
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @staticmethod
    def root(namespace: str) -> bytes:
        """The parent digest of the first block of every prefix in `namespace`."""
        return blake2b(namespace.encode(), digest_size=DIGEST_BYTES, person=_ROOT).digest()

    @staticmethod
    def child(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
        """The digest of the block with `token_ids` after the prefix `parent`.

        Args:
            extra: see `extra_key`. It cannot be mistaken for tokens, since all blocks of an index
                have equally many.
        """
        content = parent + struct.pack(f"<{len(token_ids)}I", *token_ids) + extra
        return blake2b(content, digest_size=DIGEST_BYTES, person=_BLOCK).digest()

    def add(self, digest: bytes, block: int) -> bool:
        """Add a block to the index; returns False if another block has this content already."""
        assert block not in self._digest_of, f"block {block} already has content in the index"
        if digest in self._block_of:
            return False
        self._block_of[digest] = block
        self._digest_of[block] = digest
        return True

    def remove(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]

    def clear(self) -> None:
        """Remove all blocks."""
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
