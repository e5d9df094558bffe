"""PerRankBlocks: where requests go, and what they find and lose there."""

from slipstream.cache.block_manager import BlockManager
from slipstream.cache.per_rank_blocks import PerRankBlocks
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.step_form import StepLimits
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.shares import last_on_rank, room_for

SIZE, BLOCKS = 4, 6


def spread(ranks: int = 2) -> PerRankBlocks:
    return PerRankBlocks([BlockManager(BLOCKS, SIZE, True) for _ in range(ranks)])


def admit(blocks: PerRankBlocks, name: str, tokens: list[int]) -> int | None:
    """The rank of a request that comes and has computed its tokens; None: there is no room."""
    room = room_for(blocks, request(name, tokens), "")
    if room is None:
        return None
    blocks.admit(name, room.prefix, len(tokens), len(tokens), room.num_shared, room.rank)
    assert blocks.grow(name, len(tokens))
    blocks.index(name, "", tokens, len(tokens))
    blocks.check_invariants()
    assert blocks.rank_of(name) == room.rank
    return room.rank


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
    for _, _, found in blocks.places(lambda it: it.match_prefix("", tokens)):
        assert found == []


def test_the_next_rank_that_has_room_is_taken() -> None:
    """First the less busy ones, each with the prefix that it has itself."""
    blocks, tokens = spread(3), [5] * 8
    assert admit(blocks, "a", tokens) == 0
    for rank, name in ((1, "b"), (2, "c")):
        assert admit(blocks, name, [rank] * SIZE * (BLOCKS - 1)) == rank
    assert admit(blocks, "d", [3]) == 0  # though the others have as many requests
    assert admit(blocks, "e", [4]) == 0  # and here fewer: a block is left for each that runs
    assert admit(blocks, "f", [*tokens, 6]) is None
    blocks.free("d")
    assert admit(blocks, "f", [*tokens, 6]) == 0
    assert blocks.table("f")[:2] == blocks.table("a")[:2]
    assert blocks.num_hit_tokens == 8
    assert admit(blocks, "g", [7]) is None
    blocks.free("b")
    assert admit(blocks, "g", [7]) == 1


def test_the_first_that_waits_does_not_wait_for_a_full_rank() -> None:
    limits = StepLimits(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=24,
        drafter_max_model_len=24,
        num_speculative_tokens=0,
        drafts_at_prefill=False,
        cache_identity="",
    )
    queue = Scheduler(limits, spread())
    lengths = (SIZE * (BLOCKS - 1), 2, 2, 5, 2)
    for number, (name, length) in enumerate(zip("abcde", lengths, strict=True)):
        queue.add(request(name, [number] * length))
    placed = {item.request.request_id: item.rank for item in queue.schedule().requests}
    # "d" has no room beside "a", where fewer run, and goes to the other; "e" has none anywhere.
    assert placed == {"a": 0, "b": 1, "c": 1, "d": 1}
    assert [it.request_id for it in queue.waiting] == ["e"]
    queue.check_invariants()


def test_room_is_counted_on_the_rank_alone() -> None:
    """A block stays free for each request that runs there."""
    blocks = spread()
    assert admit(blocks, "a", [1] * (SIZE * BLOCKS - SIZE)) == 0
    assert admit(blocks, "b", [2] * SIZE * BLOCKS) == 1  # where nobody runs
    assert blocks.capacity("a") == SIZE * BLOCKS
    assert not blocks.grow("b", SIZE * BLOCKS + 1)
    assert admit(blocks, "c", [3]) is None
    blocks.free("a")
    assert admit(blocks, "c", [3]) == 0
    blocks.reset()
    assert blocks.num_available == 2 * BLOCKS
    assert not blocks.request_ids


def test_who_makes_room_is_on_the_same_rank() -> None:
    blocks = spread()
    running = [request(name, [1]) for name in "abcd"]
    for number, name in enumerate("abcd"):
        admit(blocks, name, [number] * 5)
    assert last_on_rank(running, "a", blocks).request_id == "c"
    assert last_on_rank(running, "b", blocks).request_id == "d"
    assert last_on_rank(running, "d", blocks).request_id == "d"


def request(name: str, tokens: list[int]) -> Request:
    return Request(
        request_id=name,
        token_ids=tokens,
        params=SamplingParams(),
        seed=0,
        stop_token_ids=frozenset(),
        max_tokens=4,
        num_speculative_tokens=0,
        arrival=ord(name),
    )
