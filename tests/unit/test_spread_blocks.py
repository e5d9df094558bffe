"""SpreadBlocks: where requests go, and what they find and lose there."""

from slipstream.cache.block_manager import BlockManager
from slipstream.cache.spread_blocks import SpreadBlocks
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.shares import last_beside

SIZE, BLOCKS = 4, 6


def spread(ranks: int = 2) -> SpreadBlocks:
    return SpreadBlocks([BlockManager(BLOCKS, SIZE, True) for _ in range(ranks)])


def admit(blocks: SpreadBlocks, name: str, tokens: list[int]) -> int:
    """The rank of a request that comes and has computed its tokens."""
    prefix = blocks.resumable(blocks.match_prefix("", tokens))
    assert blocks.can_admit(prefix, len(tokens))
    blocks.admit(name, prefix, len(tokens), len(tokens), len(prefix))
    assert blocks.grow(name, len(tokens))
    blocks.index(name, "", tokens, len(tokens))
    blocks.check_invariants()
    return blocks.rank_of(name)


def test_requests_go_to_the_rank_with_the_fewest() -> None:
    blocks = spread(3)
    ranks = [admit(blocks, name, [number] * 5) for number, name in enumerate("abcde")]
    assert ranks == [0, 1, 2, 0, 1]
    blocks.free("b")
    blocks.free("e")
    assert admit(blocks, "f", [9] * 5) == 1
    assert blocks.request_ids == {*"acdf"}
    assert blocks.num_available == 3 * BLOCKS - 4 * 2
    assert (blocks.num_blocks, blocks.num_all_blocks) == (BLOCKS, 3 * BLOCKS)


def test_among_equals_the_longest_prefix_counts_and_then_room() -> None:
    blocks = spread()
    tokens = list(range(12))
    assert admit(blocks, "a", [7] * 5) == 0
    assert admit(blocks, "b", tokens) == 1
    blocks.free("a")
    blocks.free("b")
    assert admit(blocks, "c", [*tokens, 5]) == 1
    assert blocks.table("c")[:3] == blocks._ranks[1].table("c")[:3]
    assert max(blocks.table("c")) < BLOCKS  # numbers on the rank
    assert blocks.num_hit_tokens == 12
    assert admit(blocks, "d", [*tokens, 6]) == 0  # though the prefix is on the other rank
    assert blocks.num_hit_tokens == 12
    blocks.forget_prefixes()
    assert blocks.match_prefix("", tokens) == []


def test_room_is_counted_on_the_rank_alone() -> None:
    """A reserve too: a block for each request that runs there."""
    blocks = spread()
    assert admit(blocks, "a", [1] * (SIZE * BLOCKS - SIZE)) == 0
    assert blocks.can_admit([], SIZE * BLOCKS, reserve=1)  # on rank 1, where nobody runs
    assert admit(blocks, "b", [2] * SIZE * BLOCKS) == 1
    assert blocks.capacity("a") == SIZE * BLOCKS
    assert not blocks.grow("b", SIZE * BLOCKS + 1)
    assert blocks.can_admit([], SIZE, reserve=0)
    assert not blocks.can_admit([], SIZE, reserve=2)
    blocks.reset()
    assert blocks.num_available == 2 * BLOCKS
    assert not blocks.request_ids


def test_who_makes_room_is_on_the_same_rank() -> None:
    blocks = spread()
    running = [request(name) for name in "abcd"]
    for number, name in enumerate("abcd"):
        admit(blocks, name, [number] * 5)
    assert last_beside(running, "a", blocks).request_id == "c"
    assert last_beside(running, "b", blocks).request_id == "d"
    assert last_beside(running, "d", blocks).request_id == "d"


def request(name: str) -> Request:
    return Request(
        request_id=name,
        token_ids=[1],
        params=SamplingParams(),
        seed=0,
        stop_token_ids=frozenset(),
        max_tokens=4,
        num_speculative_tokens=0,
        arrival=0,
    )
