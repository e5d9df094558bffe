"""PrefixIndex: names of contents, and the one-to-one map from contents to blocks."""

import pytest

from slipstream.cache.prefix_index import DIGEST_BYTES, PrefixIndex


def test_digest_depends_on_every_token_and_on_the_whole_prefix() -> None:
    root = PrefixIndex.root("")
    first = PrefixIndex.child(root, [1, 2])
    digests = {
        root,
        first,
        PrefixIndex.child(root, [2, 1]),
        PrefixIndex.child(root, [1, 3]),
        PrefixIndex.child(first, [1, 2]),
        PrefixIndex.child(PrefixIndex.child(root, [3, 4]), [1, 2]),
    }
    assert len(digests) == 6
    assert {len(digest) for digest in digests} == {DIGEST_BYTES}


def test_equal_prefixes_have_equal_digests() -> None:
    assert PrefixIndex.child(PrefixIndex.root("a"), [7, 8]) == PrefixIndex.child(
        PrefixIndex.root("a"), (7, 8)
    )


def test_namespaces_share_nothing() -> None:
    target_only, with_drafter = PrefixIndex.root(""), PrefixIndex.root("drafter")
    assert target_only != with_drafter
    assert PrefixIndex.child(target_only, [1]) != PrefixIndex.child(with_drafter, [1])


def test_token_ids_of_four_bytes_are_told_apart() -> None:
    root = PrefixIndex.root("")
    assert PrefixIndex.child(root, [2**32 - 1]) != PrefixIndex.child(root, [2**16 - 1])
    assert PrefixIndex.child(root, [1, 0]) != PrefixIndex.child(root, [256])


def test_the_first_block_with_a_content_stays_its_entry() -> None:
    index = PrefixIndex()
    digest = PrefixIndex.child(PrefixIndex.root(""), [1])
    assert index.add(digest, 4)
    assert not index.add(digest, 5)
    assert index.block_of(digest) == 4
    assert index.digest_of(4) == digest
    assert index.digest_of(5) is None
    assert 4 in index
    assert 5 not in index
    index.check_invariants()


def test_a_removed_block_is_forgotten_both_ways() -> None:
    index = PrefixIndex()
    digest = PrefixIndex.child(PrefixIndex.root(""), [1])
    index.add(digest, 4)
    index.remove(4)
    assert index.block_of(digest) is None
    assert index.digest_of(4) is None
    assert len(index) == 0
    assert index.add(digest, 5)
    index.check_invariants()


def test_a_block_cannot_get_a_second_content() -> None:
    index = PrefixIndex()
    root = PrefixIndex.root("")
    index.add(PrefixIndex.child(root, [1]), 0)
    with pytest.raises(AssertionError, match="block 0"):
        index.add(PrefixIndex.child(root, [2]), 0)
