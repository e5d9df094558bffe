"""BlockManager: tables, sharing, eviction."""

import pytest

from slipstream.cache.block_manager import BlockManager

SIZE = 4


def manager(num_blocks: int = 8, caching: bool = True) -> BlockManager:
    return BlockManager(num_blocks, SIZE, caching)


def run_through(blocks: BlockManager, name: str, tokens: list[int], namespace: str = "") -> None:
    """A request that computes its tokens and ends."""
    blocks.admit(name, blocks.match_prefix(namespace, tokens))
    assert blocks.grow(name, len(tokens))
    blocks.index(name, namespace, tokens, len(tokens))
    blocks.check_invariants()
    blocks.free(name)
    blocks.check_invariants()


def test_blocks_for_rounds_up() -> None:
    blocks = manager()
    assert [blocks.blocks_for(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_grow_covers_the_tokens_and_keeps_what_is_there() -> None:
    blocks = manager()
    blocks.admit("a")
    assert blocks.grow("a", 5)
    first = list(blocks.table("a"))
    assert len(first) == 2
    assert blocks.grow("a", 3)
    assert list(blocks.table("a")) == first
    assert blocks.grow("a", 9)
    assert list(blocks.table("a"))[:2] == first
    assert blocks.num_available == 5
    blocks.check_invariants()


def test_grow_is_all_or_nothing() -> None:
    blocks = manager(num_blocks=3)
    blocks.admit("a")
    assert blocks.grow("a", 4)
    assert not blocks.grow("a", 16)
    assert len(blocks.table("a")) == 1
    assert blocks.num_available == 2
    assert blocks.grow("a", 12)


def test_capacity_counts_held_and_available_blocks() -> None:
    blocks = manager(num_blocks=3)
    blocks.admit("a")
    blocks.admit("b")
    blocks.grow("a", 4)
    blocks.grow("b", 4)
    assert blocks.capacity("a") == 8
    assert blocks.grow("a", 8)
    assert not blocks.grow("a", 9)


def test_rewind_gives_back_the_blocks_after_it() -> None:
    blocks = manager()
    blocks.admit("a")
    blocks.grow("a", 16)
    blocks.rewind("a", 5)
    assert len(blocks.table("a")) == 2
    assert blocks.num_available == 6
    blocks.check_invariants()


def test_rewind_into_final_blocks_is_an_error() -> None:
    blocks = manager()
    blocks.admit("a")
    blocks.grow("a", 8)
    blocks.index("a", "", list(range(8)), 8)
    blocks.rewind("a", 8)
    with pytest.raises(AssertionError, match="final"):
        blocks.rewind("a", 4)


def test_a_prefix_is_found_and_shared() -> None:
    blocks = manager()
    blocks.admit("a")
    blocks.grow("a", 9)
    blocks.index("a", "", list(range(9)), 9)
    found = blocks.match_prefix("", [*range(9), 99])
    assert found == list(blocks.table("a"))[:2]
    blocks.admit("b", found)
    blocks.grow("b", 10)
    assert list(blocks.table("b"))[:2] == found
    assert blocks.table("b")[2] != blocks.table("a")[2]
    blocks.check_invariants()
    blocks.free("a")
    assert list(blocks.table("b"))[:2] == found
    blocks.check_invariants()


def test_one_token_always_remains_to_be_computed() -> None:
    blocks = manager()
    tokens = list(range(8))
    run_through(blocks, "a", tokens)
    assert len(blocks.match_prefix("", tokens)) == 1
    assert len(blocks.match_prefix("", [*tokens, 8])) == 2
    assert blocks.match_prefix("", tokens[:4]) == []
    assert blocks.match_prefix("", tokens[:1]) == []


def test_matching_stops_at_the_first_difference() -> None:
    blocks = manager()
    run_through(blocks, "a", list(range(12)))
    assert len(blocks.match_prefix("", [0, 1, 2, 3, 4, 5, 6, 99, 8, 9, 10, 11, 12])) == 1
    assert blocks.match_prefix("", [9, 1, 2, 3, 4, 5, 6, 7, 8]) == []


def test_matching_changes_nothing() -> None:
    blocks = manager(num_blocks=2)
    run_through(blocks, "a", list(range(8)))
    blocks.match_prefix("", list(range(9)))
    blocks.admit("b")
    assert blocks.grow("b", 8)
    blocks.check_invariants()
    assert blocks.match_prefix("", list(range(9))) == []


def test_only_full_blocks_of_computed_tokens_are_indexed() -> None:
    blocks = manager()
    tokens = list(range(12))
    blocks.admit("a")
    blocks.grow("a", 12)
    blocks.index("a", "", tokens, 7)
    assert len(blocks.match_prefix("", tokens)) == 1
    assert blocks.num_final_tokens("a") == 4
    blocks.index("a", "", tokens, 8)
    assert len(blocks.match_prefix("", tokens)) == 2
    blocks.check_invariants()


def test_each_token_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = manager()
    hashed: list[int] = []
    child = blocks._pool.index.child

    def spy(parent: bytes, token_ids: list[int], extra: bytes) -> bytes:
        hashed.extend(token_ids)
        return child(parent, token_ids, extra)

    monkeypatch.setattr(blocks._pool.index, "child", spy)
    tokens = list(range(14))
    blocks.admit("a")
    blocks.grow("a", 14)
    for done in range(15):
        blocks.index("a", "", tokens, done)
    assert hashed == tokens[:12]


def test_a_hit_continues_the_chain_without_hashing_it_again() -> None:
    blocks = manager()
    tokens = list(range(12))
    run_through(blocks, "a", tokens[:8])
    blocks.admit("b", blocks.match_prefix("", tokens))
    blocks.grow("b", 12)
    blocks.index("b", "", tokens, 12)
    assert list(blocks.match_prefix("", [*tokens, 12])) == list(blocks.table("b"))


def test_of_two_equal_blocks_the_first_stays_indexed() -> None:
    blocks = manager()
    tokens = list(range(9))
    for name in "ab":
        blocks.admit(name)
        blocks.grow(name, 9)
    blocks.index("a", "", tokens, 4)
    blocks.index("b", "", tokens, 8)
    blocks.check_invariants()
    first, second = blocks.match_prefix("", tokens)
    assert first == blocks.table("a")[0]
    assert second == blocks.table("b")[1]
    blocks.free("b")
    blocks.check_invariants()
    # b's copy of the first block was of no use to anyone: it is free, not evictable.
    assert list(blocks._pool._evictable) == [second]


def test_namespaces_do_not_share_blocks() -> None:
    blocks = manager()
    tokens = list(range(9))
    run_through(blocks, "a", tokens, "drafter")
    assert blocks.match_prefix("", tokens) == []
    assert len(blocks.match_prefix("drafter", tokens)) == 2


def test_nothing_is_evicted_while_a_free_block_is_left() -> None:
    blocks = manager(num_blocks=3)
    run_through(blocks, "a", list(range(5)))
    blocks.admit("b")
    blocks.grow("b", 8)
    assert len(blocks.match_prefix("", list(range(5)))) == 1
    blocks.grow("b", 12)
    assert blocks.match_prefix("", list(range(5))) == []
    blocks.check_invariants()


def test_the_tail_of_a_freed_request_is_evicted_first() -> None:
    blocks = manager(num_blocks=3)
    tokens = list(range(13))
    run_through(blocks, "a", tokens[:12])
    for left in (2, 1, 0):
        name = f"b{left}"
        blocks.admit(name)
        blocks.grow(name, 1)
        assert len(blocks.match_prefix("", tokens)) == left
        blocks.check_invariants()


def test_the_least_recently_used_request_is_evicted_first() -> None:
    blocks = manager(num_blocks=3)
    run_through(blocks, "old", [1] * 4)
    run_through(blocks, "new", [2] * 4)
    run_through(blocks, "old again", [1] * 5)  # a hit, and the free block
    blocks.admit("other")
    assert blocks.grow("other", 8)
    assert len(blocks.match_prefix("", [1] * 5)) == 1
    assert blocks.match_prefix("", [2] * 5) == []


def test_a_block_in_use_is_never_evicted() -> None:
    blocks = manager(num_blocks=2)
    run_through(blocks, "a", list(range(4)))
    blocks.admit("b", blocks.match_prefix("", list(range(5))))
    assert blocks.num_available == 1
    blocks.admit("c")
    assert not blocks.grow("c", 8)
    assert blocks.grow("c", 4)
    assert len(blocks.match_prefix("", list(range(5)))) == 1
    blocks.check_invariants()


def test_can_admit_counts_the_hits_that_are_still_evictable() -> None:
    blocks = manager(num_blocks=3)
    tokens = list(range(9))
    run_through(blocks, "a", tokens[:8])
    found = blocks.match_prefix("", tokens)
    assert blocks.can_admit(found, 9)
    assert blocks.can_admit(found, 12)
    assert not blocks.can_admit(found, 13)
    assert not blocks.can_admit(found, 9, reserve=1)
    blocks.admit("b", found)
    assert blocks.can_admit(found, 12)  # shared with a running request: they cost nothing
    assert not blocks.can_admit([], 8)


def test_caching_off_keeps_nothing() -> None:
    blocks = manager(caching=False)
    run_through(blocks, "a", list(range(8)))
    assert blocks.match_prefix("", list(range(9))) == []
    assert len(blocks._pool._free) == 8


def test_forgotten_prefixes_are_not_found_while_their_request_goes_on() -> None:
    blocks, tokens = manager(), list(range(13))
    run_through(blocks, "ended", [90, 91, 92, 93, 94])
    blocks.admit("running")
    assert blocks.grow("running", 13)
    blocks.index("running", "", tokens, 8)
    table = list(blocks.table("running"))
    blocks.forget_prefixes()
    assert blocks.match_prefix("", tokens) == blocks.match_prefix("", [90, 91, 92, 93, 94]) == []
    assert list(blocks.table("running")) == table
    blocks.index("running", "", tokens, 12)
    assert blocks.match_prefix("", tokens) == []
    blocks.check_invariants()
    blocks.free("running")
    run_through(blocks, "again", tokens)
    assert len(blocks.match_prefix("", tokens)) == 3
    assert blocks.num_available == blocks.num_blocks


def test_hit_statistics_count_what_admit_was_told() -> None:
    blocks = manager()
    tokens = list(range(9))
    blocks.admit("a", blocks.match_prefix("", tokens), num_queried_tokens=9)
    blocks.grow("a", 9)
    blocks.index("a", "", tokens, 9)
    blocks.admit("b", blocks.match_prefix("", tokens), num_queried_tokens=9)
    blocks.admit("c", blocks.match_prefix("", tokens))
    assert (blocks.num_queried_tokens, blocks.num_hit_tokens) == (18, 8)


def test_one_table_per_request() -> None:
    blocks = manager()
    blocks.admit("a")
    with pytest.raises(AssertionError, match="already"):
        blocks.admit("a")
    assert blocks.request_ids == {"a"}


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (lambda blocks: blocks._pool._references.__setitem__(0, 2), "reference count"),
        (lambda blocks: blocks._pool._free.pop(), "no place"),
        (lambda blocks: blocks._pool._free.append(0), "no place"),
        (lambda blocks: blocks._pool.index.add(b"x", 7), "free block is indexed"),
        (lambda blocks: blocks._pool.index.add(b"x", 2), "indexed too early"),
        (lambda blocks: blocks._pool.index.remove(5), "not indexed"),
        (lambda blocks: blocks._pool.index._digest_of.pop(0), "one-to-one"),
    ],
)
def test_check_invariants_notices(harm: object, complaint: str) -> None:
    blocks = manager()
    blocks.admit("gone")
    blocks.admit("a")
    blocks.grow("a", 12)
    blocks.index("a", "", list(range(12)), 8)  # blocks 0 and 1 final, 2 not
    blocks.grow("gone", 12)  # 3, 4 and 5
    blocks.index("gone", "", [9] * 12, 12)
    blocks.free("gone")
    blocks.check_invariants()
    assert callable(harm)
    harm(blocks)
    with pytest.raises(AssertionError, match=complaint):
        blocks.check_invariants()
