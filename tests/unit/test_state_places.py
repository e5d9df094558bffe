"""Which checkpoints of states are kept, for how long, and what is found of them."""

from collections import Counter
from random import Random

import pytest

from slipstream.cache.prefix_index import PrefixIndex
from slipstream.cache.state_places import NO_PLACE, StatePlaces
from slipstream.core.batch import LastCheckpoint
from tests.unit.test_bookkeeping_properties import World, limits

SIZE = 4
CHAIN = [PrefixIndex.root("")]
for number in range(20):
    CHAIN.append(PrefixIndex.child(CHAIN[-1], [number]))
CHAIN = CHAIN[1:]


def places(num_places: int = 8, interval: int = 4, rereads: int = 0) -> StatePlaces:
    return StatePlaces(num_places, SIZE, interval, rereads)


def begin(states: StatePlaces, name: str, num_tokens: int, shared: int = 0) -> int:
    """The number of blocks after which the request is resumed."""
    found = states.longest_prefix(CHAIN[: (num_tokens - 1) // SIZE])
    states.admit(name, CHAIN[:found], num_tokens, max(found, shared))
    return found


def go_on(states: StatePlaces, name: str, num_tokens: int) -> int:
    """Run a step up to this number of tokens, and index its blocks; returns the planned place."""
    place = states.plan(name, num_tokens)
    states.commit(name, num_tokens)
    states.index(name, CHAIN[: num_tokens // SIZE])
    states.check_invariants({it: num_tokens // SIZE for it in states._requests})
    return place


def found(states: StatePlaces) -> list[int]:
    """The edges that have a checkpoint."""
    return [
        edge for edge in range(1, 20) if states._pool.index.block_of(CHAIN[edge - 1]) is not None
    ]


def test_a_checkpoint_moves_on_and_stays_where_it_is_of_use() -> None:
    states = places()
    assert begin(states, "a", 6) == 0
    assert go_on(states, "a", 6) != NO_PLACE
    assert found(states) == [1]
    assert go_on(states, "a", 7) == NO_PLACE
    for num_tokens in range(8, 4 * 14 + 1):
        go_on(states, "a", num_tokens)
    # The end of the prompt, intervals of 4 blocks, and the last one.
    assert found(states) == [1, 4, 8, 12, 14]
    states.free("a")
    assert found(states) == [1, 4, 8, 12, 14]
    assert begin(states, "b", 4 * 10 + 1) == 8
    assert begin(states, "c", 4 * 14 + 1) == 14
    assert states.latest("b") != states.latest("c")


def test_a_pass_keeps_its_last_edge_alone() -> None:
    states = places()
    begin(states, "a", 40)
    go_on(states, "a", 39)
    assert found(states) == [9]
    assert states.longest_prefix(CHAIN[:8]) == 0


def test_a_token_that_is_computed_again_is_not_in_the_checkpoint() -> None:
    states = places(rereads=1)
    begin(states, "a", 40)
    assert go_on(states, "a", 6) != NO_PLACE  # after token 3
    assert states.plan("a", 7) != NO_PLACE  # the 7th is the last of two blocks but for one token
    states.commit("a", 7)
    states.index("a", CHAIN[:1])
    assert found(states) == [1]
    states.plan("a", 8)
    states.commit("a", 8)
    states.index("a", CHAIN[:2])
    assert found(states) == [2]


def test_equal_requests_share_a_checkpoint() -> None:
    states = places()
    for name in ("a", "b"):
        begin(states, name, 5)
        go_on(states, name, 5)
    assert states.latest("a") == states.latest("b")
    assert states._pool.num_available == 7
    go_on(states, "a", 12)
    states.free("b")
    assert found(states) == [1, 3]


def test_who_needs_a_place_takes_the_one_used_the_longest_ago() -> None:
    states = places(num_places=3, interval=1)
    begin(states, "a", 13)
    for num_tokens in (4, 8, 12):
        go_on(states, "a", num_tokens)
    assert found(states) == [1, 2, 3]
    states.free("a")
    assert begin(states, "b", 6) == 1  # used just now
    go_on(states, "b", 17)
    assert found(states) == [1, 3, 4]
    states.forget_contents()
    assert found(states) == []
    states.free("b")
    assert states._pool.num_available == 3


def test_without_a_place_a_request_goes_on_without_a_checkpoint() -> None:
    states = places(num_places=1)
    begin(states, "a", 5)
    go_on(states, "a", 5)
    begin(states, "b", 30)
    assert go_on(states, "b", 29) == NO_PLACE
    assert found(states) == [1]


def test_a_step_under_way_never_writes_a_checkpoint_that_is_there() -> None:
    states = places()
    begin(states, "a", 6)
    kept = go_on(states, "a", 6)
    states.plan("a", 7)  # with 3 drafts, after which another step is planned
    ahead = states.plan("a", 11, num_before=7)
    assert ahead not in (NO_PLACE, kept)
    states.commit("a", 7)
    states.index("a", CHAIN[:1])
    states.free("a")  # that step is surplus
    assert found(states) == [1]
    begin(states, "b", 6)
    assert states.latest("b") == kept
    states.check_invariants({"b": 1})


def test_a_prompt_is_cut_where_others_part_from_it() -> None:
    states = places()
    begin(states, "a", 40)
    go_on(states, "a", 40)
    assert begin(states, "b", 27, shared=6) == 0
    assert states.chunk_end("b", 0, 27) == 24
    go_on(states, "b", 24)
    assert states.chunk_end("b", 24, 27) == 27
    go_on(states, "b", 27)
    assert found(states) == [6, 10]
    assert begin(states, "c", 29, shared=7) == 6
    assert states.chunk_end("c", 24, 29) == 28


def test_small_caches_meet_all_of_it() -> None:
    """Checkpoints are resumed after preemptions and in pipelines too; see `World`."""
    world = World(limits(4, 16, 3), 12, 2, True, pipelined=True, places=8, interval=2, rereads=1)
    rng = Random(0)
    for number in range(12):
        world.add([1] * (number % 5) + [number % 2], 12, 3, 0, False)
        for _ in range(number):
            world.step(rng)
    while world.unfinished:
        world.step(rng)
    for name in ("resumed", "saved", "preempted", "ahead", "surplus"):
        assert world.seen[name], name
    assert world.seen["not saved"] < world.seen["saved"] / 8


def test_the_next_step_writes_the_last_checkpoint_of_a_request_that_ended() -> None:
    states = places()
    begin(states, "a", 6)
    go_on(states, "a", 6)
    states.plan("a", 10)
    states.commit("a", 7, num_accepted=3)  # of the 10 tokens, 3 wait
    states.end("a", CHAIN[:2], slot=5)
    states.free("a")
    assert found(states) == [1, 2]
    begin(states, "b", 9)
    assert states.take_last() == (LastCheckpoint(slot=5, count=1, place=states.latest("b")),)
    states.end("b", CHAIN[:2], slot=5)  # nothing waits
    assert states.take_last() == ()


def test_without_replays_only_a_step_in_flight_writes_a_last_checkpoint() -> None:
    states = StatePlaces(8, SIZE, interval=4, rereads=0, replays=False)
    begin(states, "a", 6)
    go_on(states, "a", 6)
    states.plan("a", 10)
    states.commit("a", 7, num_accepted=3)
    states.end("a", CHAIN[:2], slot=5)
    states.free("a")
    assert states.take_last() == ()
    assert found(states) == [1]


def test_a_step_in_flight_writes_the_last_checkpoint_of_a_request_that_ended() -> None:
    states = places()
    begin(states, "a", 6)
    go_on(states, "a", 6)
    states.plan("a", 7)
    ahead = states.plan("a", 11, num_before=7)
    states.commit("a", 7, num_accepted=3)
    states.end("a", CHAIN[:2], slot=5)
    states.free("a")
    assert states.take_last() == ()
    assert found(states) == [1, 2]
    begin(states, "b", 9)
    assert states.latest("b") == ahead


def test_a_step_in_flight_behind_the_end_of_a_text_leaves_no_checkpoint() -> None:
    """The edge is after a stop condition, among discarded tokens."""
    states = places()
    begin(states, "a", 6)
    go_on(states, "a", 6)
    states.plan("a", 7)
    states.plan("a", 15, num_before=7)
    states.commit("a", 7, num_accepted=5)
    states.end("a", CHAIN[:2], slot=5)
    states.free("a")
    assert states.take_last() == ()
    assert found(states) == [1]


@pytest.mark.parametrize("rereads", [0, 1])
def test_states_of_checkpoints_that_are_written_last(rereads: int) -> None:
    """Whoever resumes from them begins with the right states; see `World`."""
    seen = Counter[str]()
    for seed in range(20):
        world = World(
            *(limits(4, 16, 7), 40, 4, True, seed % 2 == 0),
            places=20,
            interval=2,
            rereads=rereads,
        )
        rng = Random(seed)
        for number in range(12):
            world.add([1] * (number % 5) + [number % 2], 12, 7, 0, False)
            world.step(rng, world.unfinished[:1] if number % 3 == 0 else ())
        while world.unfinished:
            world.step(rng)
        seen += world.seen
    assert seen["saved last"] > 4
    assert seen["resumed"] > 10
