"""Scheduler: who takes part in a step, and what a commit changes."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from slipstream.cache.block_manager import BlockManager
from slipstream.cache.window_blocks import WindowBlocks, most_blocks_held
from slipstream.core.batch import Batch, Committed, DraftPlan, StepReport
from slipstream.core.errors import UsageError
from slipstream.core.request import FinishReason, Request, RequestStatus
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.spans import Span
from slipstream.core.step_form import StepLimits
from slipstream.engine.draft_policy import Candidate
from slipstream.engine.scheduler import Scheduler

SIZE = 4
EOS = 1000


def scheduler(num_blocks: int = 100, caching: bool = True, **limits: Any) -> Scheduler:
    chosen: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "drafter_max_model_len": 64,
        "num_speculative_tokens": 3,
        "drafts_at_prefill": False,
        "cache_identity": "drafter",
        "by_priority": True,
    }
    return Scheduler(StepLimits(**(chosen | limits)), BlockManager(num_blocks, SIZE, caching))


def request(
    name: str, prompt: int | Sequence[int], max_tokens: int = 16, drafts: int = 3, **params: Any
) -> Request:
    """A request named like "a" or "b7"; its first letter is its place in the queue.

    A prompt given as a number has that many tokens, unlike those of other requests.
    """
    arrival, priority = ord(name[0]), params.pop("priority", 0)
    salt = params.pop("cache_salt", "")
    tokens = [arrival] * prompt if isinstance(prompt, int) else list(prompt)
    stops = frozenset({EOS, *params.get("stop_token_ids", ())})
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Request(
        *(name, tokens, sampling, 0, stops, max_tokens, drafts, arrival),
        priority=priority,
        cache_salt=salt,
    )


def abort(engine: Scheduler, name: str) -> None:
    found = next(it for it in (*engine.running, *engine.waiting) if it.request_id == name)
    engine.finish(found, FinishReason.ABORT)


def plan(batch: Batch) -> dict[str, tuple[int, int, int]]:
    """request id -> (start, new tokens, draft tokens), in batch order."""
    return {
        item.request.request_id: (item.start, item.num_new_tokens, item.num_draft_tokens)
        for item in batch.requests
    }


def commit(
    engine: Scheduler, batch: Batch, gains: Mapping[str, Sequence[int]] | None = None
) -> None:
    """Commit the given tokens (of which all but the last are accepted drafts), or else one token
    per request that reaches the end."""
    committed = []
    for item in batch.requests:
        tokens: Sequence[int] = (7,) if item.reaches_end else ()
        tokens = tuple((gains or {}).get(item.request.request_id, tokens))
        accepted = max(0, len(tokens) - 1)
        computed = item.start + item.num_new_tokens + accepted
        committed.append(Committed(tokens, item.num_draft_tokens, accepted, computed))
    engine.commit(batch, committed)
    engine.check_invariants()


def step(engine: Scheduler, gains: Mapping[str, Sequence[int]] | None = None) -> Batch:
    batch = engine.schedule()
    engine.check_invariants()
    commit(engine, batch, gains)
    return batch


def step_plan(
    engine: Scheduler, gains: Mapping[str, Sequence[int]] | None = None
) -> dict[str, tuple[int, int, int]]:
    """One step, and what was planned for it."""
    batch = engine.schedule()
    planned = plan(batch)
    commit(engine, batch, gains)
    return planned


def ids(requests: Sequence[Request]) -> list[str]:
    return [each.request_id for each in requests]


# ---------------------------------------------------------------------- add


def test_a_prompt_must_leave_room_for_one_token() -> None:
    engine = scheduler(max_model_len=8)
    engine.add(request("a", 7, max_tokens=1))
    with pytest.raises(UsageError, match=r"8 tokens, but max_model_len is 8.*7 prompt tokens"):
        engine.add(request("b", 8, max_tokens=1))
    small = scheduler(max_model_len=8, cache_bounds_length=True)
    with pytest.raises(UsageError, match=r"the KV cache holds no more.*kv_cache_memory"):
        small.add(request("b", 8, max_tokens=1))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        scheduler().add(request("a", 0))


def test_a_request_that_no_cache_state_could_hold_is_refused() -> None:
    engine = scheduler(num_blocks=5)
    engine.add(request("a", 10, max_tokens=10))
    with pytest.raises(UsageError, match=r"6 blocks.*21 tokens.*5 blocks.*20 tokens.*max_tokens"):
        engine.add(request("b", 10, max_tokens=11))


def test_max_model_len_bounds_what_a_request_may_need() -> None:
    engine = scheduler(num_blocks=5, max_model_len=20)
    engine.add(request("a", 10, max_tokens=50))
    step(engine)


def test_more_drafts_than_the_engine_makes_are_refused() -> None:
    for limits, remedy in (
        ({}, "at most 3 tokens a step; .* a larger num_speculative_tokens"),
        ({"adaptive": True}, 'with a num_speculative_tokens of 4 in place of "auto".* up to 3'),
        ({"num_speculative_tokens": 0}, "start the engine with a drafter"),
    ):
        with pytest.raises(UsageError, match=f"is 4, .*{remedy}"):
            scheduler(**limits).add(request("a", 4, drafts=4))


def test_a_live_request_id_cannot_be_used_twice() -> None:
    engine = scheduler()
    engine.add(request("a", 4))
    with pytest.raises(UsageError, match="'a' is in use"):
        engine.add(request("a", 5))
    abort(engine, "a")
    engine.add(request("a", 5))
    engine.check_invariants()


def test_a_refused_request_leaves_no_trace() -> None:
    engine = scheduler()
    with pytest.raises(UsageError):
        engine.add(request("a", 0))
    assert not engine.has_unfinished
    engine.check_invariants()


# ---------------------------------------------------------------------- prompts, chunks, drafts


def test_a_prompt_runs_in_one_step_and_then_decodes_with_drafts() -> None:
    engine = scheduler()
    a = request("a", 10)
    engine.add(a)
    first = engine.schedule()
    assert plan(first) == {"a": (0, 10, 0)}
    assert first.requests[0].admitted
    assert (a.status, a.slot) == (RequestStatus.RUNNING, 0)
    commit(engine, first)
    second = engine.schedule()
    assert plan(second) == {"a": (10, 1, 3)}
    assert not second.requests[0].admitted
    assert len(second.requests[0].block_table) * SIZE >= 14


def test_prompt_chunks_fill_what_the_decoding_requests_leave() -> None:
    engine = scheduler(max_num_batched_tokens=12)
    engine.add(request("a", 3))
    step(engine)
    engine.add(request("b", 30))
    assert step_plan(engine) == {"a": (3, 1, 3), "b": (0, 8, 0)}
    assert step_plan(engine) == {"a": (4, 1, 3), "b": (8, 8, 0)}


def test_every_running_request_gets_a_token_before_any_gets_drafts() -> None:
    engine = scheduler(max_num_batched_tokens=4)
    for name in "abcd":
        engine.add(request(name, 1))
    step(engine)
    assert step_plan(engine) == {name: (1, 1, 0) for name in "abcd"}
    abort(engine, "c")
    assert step_plan(engine) == {"a": (2, 1, 1), "b": (2, 1, 0), "d": (2, 1, 0)}


def test_an_early_long_prompt_does_not_starve_those_who_decode() -> None:
    engine = scheduler(max_num_batched_tokens=8)
    engine.add(request("b", 4))
    step(engine)
    engine.add(request("a", 40))  # arrived first, reached the scheduler later
    assert step_plan(engine) == {"a": (0, 4, 0), "b": (4, 1, 3)}
    for _ in range(3):
        planned = step_plan(engine)
        assert list(planned) == ["a", "b"]
        assert planned["b"][1] == 1
        assert planned["a"][1] >= 4


def test_few_rows_are_for_prompts_while_others_decode() -> None:
    engine = scheduler(prompts_beside_decoding=10)
    for name, prompt in (("a", 6), ("b", 40), ("c", 4), ("d", 4)):
        engine.add(request(name, prompt, drafts=0))
    batch = engine.schedule()  # nobody decodes yet
    assert plan(batch) == {"a": (0, 6, 0), "b": (0, 40, 0), "c": (0, 4, 0), "d": (0, 4, 0)}
    commit(engine, batch)
    for name in "bcd":
        abort(engine, name)
    for name, prompt in (("e", 24), ("f", 4), ("g", 4)):
        engine.add(request(name, prompt, drafts=0))
    parts = []
    for _ in range(4):
        batch = engine.schedule()
        parts.append({name: rows for name, (_, rows, _) in plan(batch).items()})
        commit(engine, batch)
    assert parts == [
        {"a": 1, "e": 10},
        {"a": 1, "e": 10},
        {"a": 1, "e": 4, "f": 4, "g": 2},
        {"a": 1, "e": 1, "f": 1, "g": 2},
    ]


@pytest.mark.parametrize(
    ("most", "parts"),
    [
        (10, [10, 3, 20, 10, 10, 7]),
        (1, [*[1] * 13, 20, *[1] * 12, 8, *[1] * 7]),
    ],
)
def test_an_image_is_read_at_once_whatever_prompts_may_have(most: int, parts: list[int]) -> None:
    """And text is not: two images, of 20 and of 8 tokens, in and between texts."""
    engine = scheduler(prompts_beside_decoding=most)
    engine.add(request("a", 6, max_tokens=50, drafts=0))
    commit(engine, engine.schedule())
    seeing = request("b", 60, drafts=0)
    seeing.spans = [
        Span(start, length, b"", (1, length), None, whole=True)
        for start, length in ((13, 20), (45, 8))
    ]
    engine.add(seeing)
    found: list[int] = []
    while seeing.num_computed < 60:
        batch = engine.schedule()
        found.append(plan(batch)["b"][1])
        commit(engine, batch)
    assert found == parts


def test_drafts_take_at_most_half_while_a_prompt_waits_for_rows() -> None:
    engine = scheduler(max_num_batched_tokens=10)
    for name in "abc":
        engine.add(request(name, 2))
    step(engine)
    assert sum(drafts for _, _, drafts in step_plan(engine).values()) == 7
    engine.add(request("d", 30))
    planned = step_plan(engine)
    assert sum(drafts for _, _, drafts in planned.values()) == 3
    assert planned["d"] == (0, 4, 0)


def test_a_step_never_exceeds_the_row_budget() -> None:
    engine = scheduler(max_num_batched_tokens=7)
    for name in "abcd":
        engine.add(request(name, 9))
    for _ in range(20):
        items = step(engine).requests
        assert sum(item.num_new_tokens + item.num_draft_tokens for item in items) <= 7


def test_more_running_requests_than_rows_are_served_in_arrival_order() -> None:
    engine = scheduler(max_num_batched_tokens=2)
    for name in "abc":
        engine.add(request(name, 1, max_tokens=4))
    for _ in range(2):
        step(engine)
    assert engine.num_running == 2
    while engine.has_unfinished:
        step(engine)


def test_a_prompt_chunk_has_no_drafts() -> None:
    engine = scheduler(max_num_batched_tokens=6)
    engine.add(request("a", 8))
    assert step_plan(engine) == {"a": (0, 6, 0)}
    assert step_plan(engine) == {"a": (6, 2, 0)}
    assert step_plan(engine) == {"a": (8, 1, 3)}


def test_a_drafter_that_needs_no_features_drafts_behind_the_prompt() -> None:
    engine = scheduler(max_num_batched_tokens=10, drafts_at_prefill=True)
    engine.add(request("a", 15))
    assert step_plan(engine) == {"a": (0, 10, 0)}
    assert step_plan(engine, {"a": [7, 7]}) == {"a": (10, 5, 3)}
    assert step_plan(engine) == {"a": (16, 1, 3)}


def test_a_prompt_of_one_token_is_not_decoding_yet() -> None:
    engine = scheduler()
    engine.add(request("a", 1))
    assert step_plan(engine) == {"a": (0, 1, 0)}
    assert step_plan(engine) == {"a": (1, 1, 3)}


@pytest.mark.parametrize(
    ("limits", "asked", "max_tokens", "expected"),
    [
        ({}, 2, 16, 2),
        ({}, 0, 16, 0),
        ({}, 3, 4, 2),  # one output token is there, one more follows the drafts
        ({}, 3, 2, 0),
        ({"max_model_len": 12}, 3, 16, 2),
        ({"max_model_len": 10}, 3, 16, 0),
        ({"drafter_max_model_len": 10}, 3, 16, 1),
        ({"drafter_max_model_len": 5}, 3, 16, 0),
        ({"max_num_batched_tokens": 3}, 3, 16, 2),
    ],
)
def test_drafts_stay_within_every_limit(
    limits: dict[str, Any], asked: int, max_tokens: int, expected: int
) -> None:
    engine = scheduler(**limits)
    engine.add(request("a", 8, max_tokens=max_tokens, drafts=asked))
    while engine.running == [] or engine.running[0].num_tokens < 9:
        step(engine)
    assert plan(engine.schedule()) == {"a": (8, 1, expected)}


class ByLength:
    """A policy: one draft token more, the longer a request is; it notes what it is asked."""

    widths, reads_confidences = (0, 1, 2, 3), False

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def plan(self, candidates: Sequence[Candidate]) -> Sequence[DraftPlan]:
        self.asked.extend((it.request.request_id, it.most) for it in candidates)
        return [DraftPlan(min(it.most, it.request.num_tokens % 4)) for it in candidates]

    def observe(self, report: StepReport) -> None:
        raise AssertionError("nobody tells it")


def test_a_policy_decides_how_many_tokens_are_drafted() -> None:
    limits = scheduler().limits
    policy = ByLength()
    engine = Scheduler(limits, BlockManager(100, SIZE, True), policy)
    engine.add(request("a", 5))
    engine.add(request("b", 6, max_tokens=3))
    commit(engine, engine.schedule())
    assert not policy.asked  # this drafter needs the prompt's features
    batch = engine.schedule()
    assert plan(batch) == {"a": (5, 1, 2), "b": (6, 1, 1)}
    assert policy.asked == [("a", 14), ("b", 1)]  # as many as max_tokens leave room for


def test_drafts_shrink_to_the_blocks_that_are_left() -> None:
    engine = scheduler(num_blocks=4, caching=False)
    engine.add(request("a", 6, max_tokens=8))
    engine.add(request("b", 4, max_tokens=8))
    step(engine)
    # a: 7 known tokens in two blocks; b: 5 in two. Nothing is left, so a drafts within its block.
    assert plan(engine.schedule()) == {"a": (6, 1, 1), "b": (4, 1, 3)}


def test_drafts_never_cost_another_request_its_place() -> None:
    engine = scheduler(num_blocks=4, caching=False)
    engine.add(request("a", 7, max_tokens=9))
    engine.add(request("b", 4, max_tokens=9))
    step(engine)
    # b's fifth token takes the last block before a can put drafts into it.
    batch = engine.schedule()
    assert plan(batch) == {"a": (7, 1, 0), "b": (4, 1, 3)}
    assert not batch.preempted


# ---------------------------------------------------------------------- admission


def test_requests_wait_for_slots_and_take_the_smallest_free_one() -> None:
    engine = scheduler(max_num_seqs=2)
    members = {name: request(name, 4) for name in "abcd"}
    for each in members.values():
        engine.add(each)
    step(engine)
    assert (ids(engine.running), ids(engine.waiting)) == (["a", "b"], ["c", "d"])
    abort(engine, "a")
    step(engine)
    assert [members[name].slot for name in "abc"] == [-1, 1, 0]
    assert ids(engine.waiting) == ["d"]


def test_nobody_overtakes_in_the_queue() -> None:
    engine = scheduler(num_blocks=4, caching=False)
    engine.add(request("a", 10, max_tokens=2))
    engine.add(request("b", 10, max_tokens=2))
    engine.add(request("c", 1, max_tokens=2))
    assert list(step_plan(engine)) == ["a"]
    assert ids(engine.waiting) == ["b", "c"]


def test_a_prompt_is_admitted_only_when_all_of_it_has_blocks() -> None:
    engine = scheduler(num_blocks=6, max_num_batched_tokens=4, caching=False)
    engine.add(request("a", 16, max_tokens=1))
    engine.add(request("b", 8, max_tokens=1))
    for _ in range(4):
        assert list(step_plan(engine)) == ["a"]
    assert list(step_plan(engine)) == ["b"]


def test_admission_leaves_a_block_for_each_running_request() -> None:
    engine = scheduler(num_blocks=4, caching=False)
    engine.add(request("a", 8, max_tokens=8))
    step(engine)
    engine.add(request("b", 4, max_tokens=2))
    assert list(step_plan(engine)) == ["a"]
    assert ids(engine.waiting) == ["b"]


def test_a_prefix_hit_skips_the_cached_tokens() -> None:
    engine = scheduler()
    engine.add(request("a", range(10), max_tokens=1))
    step(engine)
    b = request("b", [*range(8), 50, 51])
    engine.add(b)
    assert step_plan(engine) == {"b": (8, 2, 0)}
    assert b.num_cached_tokens == 8


def test_a_hit_that_leaves_one_token_decodes_at_once() -> None:
    engine = scheduler()
    engine.add(request("a", range(9), max_tokens=1))
    step(engine)
    engine.add(request("b", range(9)))
    assert step_plan(engine) == {"b": (8, 1, 3)}


def test_requests_with_and_without_drafts_share_no_blocks() -> None:
    engine = scheduler()
    engine.add(request("a", range(9), max_tokens=1, drafts=0))
    step(engine)
    engine.add(request("b", range(9), max_tokens=1))
    assert step_plan(engine) == {"b": (0, 9, 0)}
    engine.add(request("c", range(9), max_tokens=1, drafts=0))
    assert step_plan(engine) == {"c": (8, 1, 0)}


def test_prompt_logprobs_need_every_row() -> None:
    engine = scheduler()
    engine.add(request("a", range(9), max_tokens=1))
    step(engine)
    b = request("b", range(9), max_tokens=1, prompt_logprobs=1)
    engine.add(b)
    assert step_plan(engine) == {"b": (0, 9, 0)}
    assert b.num_cached_tokens == 0
    assert engine.block_manager.num_queried_tokens == 9


def test_blocks_are_shared_only_as_far_as_the_drafter_has_come() -> None:
    engine = scheduler()
    engine.add(request("a", range(12)))
    batch = engine.schedule()
    engine.commit(batch, [Committed((7,), 0, 0, drafter_computed=5)])
    engine.check_invariants()
    engine.add(request("b", range(12)))
    assert step_plan(engine)["b"] == (4, 8, 0)


def test_a_request_that_never_drafts_shares_all_that_is_computed() -> None:
    engine = scheduler()
    engine.add(request("a", range(12), drafts=0))
    batch = engine.schedule()
    engine.commit(batch, [Committed((7,), 0, 0, drafter_computed=0)])
    engine.add(request("b", range(12), drafts=0))
    assert step_plan(engine)["b"] == (8, 4, 0)


# ---------------------------------------------------------------------- preemption


def preempting() -> tuple[Scheduler, Request, Request]:
    """Two requests in a cache of five blocks; in the next step both need a third block."""
    engine = scheduler(num_blocks=5, caching=False, num_speculative_tokens=0)
    a, b = (request(name, 7, max_tokens=9, drafts=0) for name in "ab")
    engine.add(a)
    engine.add(b)
    step(engine)
    step(engine)
    assert (a.num_tokens, b.num_tokens) == (9, 9)
    return engine, a, b


def test_the_last_arrived_is_preempted_and_starts_anew() -> None:
    engine, a, b = preempting()
    batch = engine.schedule()
    assert plan(batch) == {"a": (8, 1, 0)}
    assert batch.preempted == (b,)
    assert (b.status, b.num_computed, b.slot, b.num_preemptions) == (
        RequestStatus.WAITING,
        0,
        -1,
        1,
    )
    assert b.num_tokens == 9  # what it said stands
    assert b.num_steps == 2
    commit(engine, batch)
    while not a.finished:
        assert list(step_plan(engine)) == ["a"]
    batch = engine.schedule()
    assert plan(batch) == {"b": (0, 9, 0)}
    assert batch.requests[0].admitted
    commit(engine, batch)
    while engine.has_unfinished:
        step(engine)
    assert b.output_token_ids == [7] * 9


def test_a_preempted_request_goes_to_the_front_of_the_queue() -> None:
    engine, _, _ = preempting()
    engine.add(request("c", 1, drafts=0))
    batch = engine.schedule()
    assert ids(engine.waiting) == ["b", "c"]
    assert list(plan(batch)) == ["a"]


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    engine = scheduler(num_blocks=5, caching=False, num_speculative_tokens=0)
    for name in "bc":
        engine.add(request(name, 7, max_tokens=9, drafts=0))
    step(engine)
    step(engine)
    engine.add(request("a", 1, drafts=0))  # arrived first, reached the scheduler later
    batch = engine.schedule()
    assert (ids(batch.preempted), ids(engine.waiting)) == (["c"], ["a", "c"])
    assert list(plan(batch)) == ["b"]
    commit(engine, batch)
    assert list(step_plan(engine)) == ["a", "b"]


def test_a_request_gives_way_itself_when_it_arrived_last() -> None:
    engine = scheduler(num_blocks=6, caching=False, num_speculative_tokens=0)
    a, b = request("a", 11, max_tokens=9, drafts=0), request("b", 7, max_tokens=9, drafts=0)
    engine.add(a)
    engine.add(b)
    step(engine)
    assert (a.num_tokens, b.num_tokens) == (12, 8)
    step(engine)
    # a takes the sixth block for its 13th token; b finds none for its ninth.
    batch = engine.schedule()
    assert batch.preempted == (b,)
    assert list(plan(batch)) == ["a"]


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    engine = scheduler(num_blocks=5, num_speculative_tokens=0)
    a, b = (request(name, 7, max_tokens=9, drafts=0) for name in "ab")
    engine.add(a)
    engine.add(b)
    while not b.num_preemptions:
        step(engine)
    abort(engine, "a")
    batch = engine.schedule()
    (item,) = batch.requests
    assert item.start == 8
    assert b.num_cached_tokens == 0  # of the first admission
    commit(engine, batch)


# ---------------------------------------------------------------------- commit


def started(engine: Scheduler, prompt: int = 4, **options: Any) -> Request:
    """A request whose prompt is computed and that has one output token."""
    a = request("a", prompt, **options)
    engine.add(a)
    step(engine)
    return a


def test_commit_appends_and_counts() -> None:
    engine = scheduler()
    a = started(engine)
    assert (a.num_computed, a.num_tokens, a.num_steps) == (4, 5, 1)
    step(engine, {"a": [10, 11, 12]})
    assert a.output_token_ids == [7, 10, 11, 12]
    assert (a.num_computed, a.num_tokens, a.num_steps) == (7, 8, 2)


def test_a_chunk_that_ends_nowhere_is_no_verification_step() -> None:
    engine = scheduler(max_num_batched_tokens=4)
    a = request("a", 6)
    engine.add(a)
    step(engine)
    assert (a.num_computed, a.num_steps) == (4, 0)
    step(engine)
    assert (a.num_computed, a.num_steps) == (6, 1)


def test_refused_drafts_give_their_blocks_back() -> None:
    engine = scheduler()
    a = started(engine, prompt=6)
    batch = engine.schedule()
    assert plan(batch) == {"a": (6, 1, 3)}
    assert len(engine.block_manager.table("a")) == 3
    commit(engine, batch, {"a": [9]})
    assert a.num_tokens == 8
    assert len(engine.block_manager.table("a")) == 2
    assert engine.block_manager.num_available == 98


def test_accepted_drafts_keep_their_blocks() -> None:
    engine = scheduler()
    a = started(engine, prompt=6)
    step(engine, {"a": [9, 9, 9, 9]})
    assert (a.num_tokens, a.num_computed) == (11, 10)
    assert len(engine.block_manager.table("a")) == 3


def test_an_eos_inside_accepted_drafts_cuts_the_rest() -> None:
    engine = scheduler()
    a = started(engine)
    step(engine, {"a": [10, EOS, 11, 12]})
    assert a.output_token_ids == [7, 10, EOS]
    assert (a.status, a.finish_reason, a.stop_reason) == (
        RequestStatus.FINISHED,
        FinishReason.STOP,
        None,
    )
    assert a.num_computed == a.num_tokens == 7  # the cache holds what is left, EOS included
    assert not engine.has_unfinished


def test_a_stop_token_of_the_user_is_named() -> None:
    engine = scheduler()
    a = started(engine, stop_token_ids=[55])
    step(engine, {"a": [55]})
    assert (a.finish_reason, a.stop_reason) == (FinishReason.STOP, 55)


def test_a_stop_token_before_min_tokens_is_just_a_token() -> None:
    engine = scheduler()
    a = started(engine, min_tokens=3)
    step(engine, {"a": [EOS, EOS]})
    assert not a.finished
    step(engine, {"a": [EOS, 11]})
    assert a.output_token_ids == [7, EOS, EOS, EOS]
    assert a.finish_reason is FinishReason.STOP


def test_max_tokens_ends_the_output() -> None:
    engine = scheduler()
    a = started(engine, max_tokens=4)
    step(engine, {"a": [10, 11, 12]})
    assert a.output_token_ids == [7, 10, 11, 12]
    assert (a.finish_reason, a.stop_reason) == (FinishReason.LENGTH, None)


def test_max_model_len_ends_the_output() -> None:
    engine = scheduler(max_model_len=8)
    a = started(engine)
    step(engine, {"a": [10, 11, 12]})
    assert a.num_tokens == 8
    assert a.finish_reason is FinishReason.LENGTH


def test_a_stop_token_in_the_last_place_counts_as_a_stop() -> None:
    engine = scheduler()
    a = started(engine, max_tokens=2)
    step(engine, {"a": [EOS]})
    assert a.finish_reason is FinishReason.STOP


def test_a_finished_request_gives_everything_back_and_leaves_its_prefix() -> None:
    engine = scheduler(num_blocks=5)
    a = started(engine, prompt=9, max_tokens=1)
    assert a.finished
    assert (engine.num_running, a.slot) == (0, -1)
    assert engine.block_manager.num_available == 5
    assert len(engine.block_manager.match_prefix("drafter", [ord("a")] * 9)) == 2


def test_requests_that_ended_since_schedule_are_skipped() -> None:
    engine = scheduler()
    members = [request(name, 4) for name in "abc"]
    for each in members:
        engine.add(each)
    batch = engine.schedule()
    abort(engine, "a")
    engine.finish(members[1], FinishReason.STOP, "stop string")
    commit(engine, batch)
    assert [len(each.output_token_ids) for each in members] == [0, 0, 1]
    assert members[0].finish_reason is FinishReason.ABORT
    assert members[1].stop_reason == "stop string"


def test_a_new_request_may_take_the_id_of_one_that_ended_in_mid_step() -> None:
    engine = scheduler()
    engine.add(request("a", 4))
    batch = engine.schedule()
    abort(engine, "a")
    again = request("a", 6)
    engine.add(again)
    commit(engine, batch)
    assert again.num_tokens == 6
    assert step_plan(engine) == {"a": (0, 6, 0)}


def test_a_result_that_does_not_fit_the_plan_is_an_error() -> None:
    engine = scheduler()
    engine.add(request("a", 4))
    batch = engine.schedule()
    with pytest.raises(AssertionError, match="planned drafts"):
        engine.commit(batch, [Committed((7, 7), 1, 1, 4)])
    with pytest.raises(AssertionError, match="should hold 1 tokens"):
        engine.commit(batch, [Committed((), 0, 0, 4)])
    with pytest.raises(ValueError, match="zip"):
        engine.commit(batch, [])


# ---------------------------------------------------------------------- finish and abort


def test_finish_works_for_waiting_and_running_requests_and_only_once() -> None:
    engine = scheduler(max_num_seqs=1)
    a, b = request("a", 4), request("b", 4)
    engine.add(a)
    engine.add(b)
    step(engine)
    for each in (a, b):
        engine.finish(each, FinishReason.STOP, "x")
        engine.finish(each, FinishReason.ABORT)
        assert (each.finish_reason, each.stop_reason) == (FinishReason.STOP, "x")
        engine.check_invariants()
    assert not engine.has_unfinished


def test_an_idle_scheduler_plans_an_empty_step() -> None:
    engine = scheduler()
    assert engine.schedule() == Batch(())
    engine.commit(Batch(()), [])
    assert (engine.num_waiting, engine.num_running, engine.has_unfinished) == (0, 0, False)


# ---------------------------------------------------------------------- planning ahead


def decoding(engine: Scheduler, *members: Request) -> Batch:
    """These requests past their prompts, and their next step, planned and not committed."""
    for each in members:
        engine.add(each)
    while any(each.num_output_tokens == 0 for each in members):
        step(engine)
    return engine.schedule()


def plan_ahead(engine: Scheduler, batch: Batch) -> dict[str, tuple[int, int, int]] | None:
    ahead = engine.schedule_ahead(batch)
    engine.check_invariants()
    return None if ahead is None else plan(ahead)


def blocks_held(engine: Scheduler, name: str) -> int:
    return len(engine.block_manager.table(name))


def test_a_step_is_planned_behind_one_whose_results_are_not_known() -> None:
    engine = scheduler()
    a, b = request("a", 5), request("b", 4, drafts=1)
    batch = decoding(engine, a, b)
    assert plan(batch) == {"a": (5, 1, 3), "b": (4, 1, 1)}
    ahead = engine.schedule_ahead(batch)
    assert ahead is not None
    assert plan(ahead) == {"a": (6, 1, 3), "b": (5, 1, 1)}  # at least
    assert ahead.is_decode
    assert ahead.preempted == ()
    # a may have 10 tokens by then, and three drafts after them; b 7 and one.
    assert [len(item.block_table) for item in ahead.requests] == [4, 2]
    commit(engine, batch, {"a": [9, 9, 9, 9], "b": [8]})
    commit(engine, ahead, {"a": [5, 5], "b": [6, 6]})
    assert a.output_token_ids == [7, 9, 9, 9, 9, 5, 5]
    assert b.output_token_ids == [7, 8, 6, 6]
    assert (a.num_tokens, a.num_computed, b.num_tokens, b.num_computed) == (12, 11, 8, 7)


def test_the_next_step_may_be_planned_behind_one_that_was_itself_planned_ahead() -> None:
    engine = scheduler()
    a = request("a", 4, max_tokens=9)
    batch: Batch | None = decoding(engine, a)
    planned = []
    while batch is not None:
        planned.append(plan(batch)["a"])
        ahead = engine.schedule_ahead(batch)
        commit(engine, batch)
        batch = ahead
    # Eight more tokens, one a step; at the end drafts make way for the tokens that surely come.
    drafts = [num_drafts for _, _, num_drafts in planned]
    assert drafts == [3, 3, 3, 3, 3, 2, 1, 0]
    assert a.finish_reason is FinishReason.LENGTH


def test_chunks_of_a_prompt_and_its_first_tokens_are_planned_behind_one_another() -> None:
    engine = scheduler(max_num_batched_tokens=6)
    a = request("a", 13)
    engine.add(a)
    batch: Batch | None = engine.schedule()
    planned: list[tuple[int, int, int]] = []
    while batch is not None and len(planned) < 5:
        planned.append(plan(batch)["a"])
        ahead = engine.schedule_ahead(batch)
        engine.check_invariants()
        commit(engine, batch)
        batch = ahead
    assert planned == [(0, 6, 0), (6, 6, 0), (12, 1, 3), (13, 1, 3), (14, 1, 3)]
    assert a.output_token_ids == [7, 7, 7]


def test_a_prompt_goes_on_beside_others_that_decode() -> None:
    engine = scheduler(max_num_batched_tokens=6)
    engine.add(request("a", 4))
    step(engine)
    engine.add(request("b", 9))
    batch = engine.schedule()
    assert plan(batch) == {"a": (4, 1, 2), "b": (0, 3, 0)}
    assert plan_ahead(engine, batch) == {"a": (5, 1, 2), "b": (3, 3, 0)}


def test_prompts_that_end_with_their_first_token_leave_the_next_step_to_others() -> None:
    engine = scheduler(max_num_batched_tokens=10)
    members = [request(name, 5, max_tokens=1) for name in "abcd"]
    for each in members:
        engine.add(each)
    batch = engine.schedule()
    assert plan(batch) == {"a": (0, 5, 0), "b": (0, 5, 0)}
    ahead = engine.schedule_ahead(batch)
    assert ahead is not None
    assert plan(ahead) == {"c": (0, 5, 0), "d": (0, 5, 0)}
    assert len(ahead.admitted) == 2
    commit(engine, batch)
    assert plan_ahead(engine, ahead) is None
    abort(engine, "c")
    commit(engine, ahead)
    assert [each.num_output_tokens for each in members] == [1, 1, 0, 1]
    assert engine.block_manager.num_available == engine.block_manager.num_blocks


@pytest.mark.parametrize(("salt", "hit"), [("", 8), ("other", 0)])
def test_who_shares_a_prefix_that_is_being_computed_waits_for_it(salt: str, hit: int) -> None:
    engine = scheduler(max_num_batched_tokens=14, num_speculative_tokens=0)
    b = request("b", [*range(8), 77, 78], drafts=0, cache_salt=salt)
    engine.add(request("a", range(14), drafts=0))
    engine.add(b)
    engine.add(request("c", 3, drafts=0))
    batch = engine.schedule()
    assert plan(batch) == {"a": (0, 14, 0)}
    ahead = engine.schedule_ahead(batch)
    assert ahead is not None
    assert list(plan(ahead)) == (["a"] if hit else ["a", "b", "c"])  # c does not overtake b
    commit(engine, batch)
    commit(engine, ahead)
    if hit:
        engine.schedule()
    assert b.num_cached_tokens == hit


def test_nothing_is_planned_where_a_window_lacks_blocks_for_the_next_chunk() -> None:
    window = WindowBlocks(most_blocks_held(8, SIZE) + 4, SIZE, 8)
    engine = scheduler(max_num_batched_tokens=16)
    engine.block_manager = BlockManager(100, SIZE, True, window)
    engine.add(request("a", 60))
    batch = engine.schedule()
    assert plan(batch) == {"a": (0, 16, 0)}
    assert plan_ahead(engine, batch) == {"a": (16, 16, 0)}
    engine = scheduler(max_num_batched_tokens=20)
    window.reset()
    engine.block_manager = BlockManager(100, SIZE, True, window)
    engine.add(request("a", 60))
    batch = engine.schedule()
    assert plan(batch) == {"a": (0, 20, 0)}
    assert plan_ahead(engine, batch) is None
    commit(engine, batch)
    assert plan(engine.schedule()) == {"a": (20, 20, 0)}


def test_what_is_planned_behind_an_admission_of_a_single_token() -> None:
    engine = scheduler()
    engine.add(request("a", range(9), max_tokens=1))
    step(engine)
    engine.add(request("b", range(9)))
    batch = engine.schedule()
    assert plan(batch) == {"b": (8, 1, 3)}
    assert plan_ahead(engine, batch) == {"b": (9, 1, 3)}


def test_who_comes_while_others_decode_is_admitted_ahead_if_a_slot_is_free() -> None:
    engine = scheduler(max_num_seqs=2)
    a = request("a", 4)
    batch = decoding(engine, a)
    engine.add(request("b", 4))
    assert plan_ahead(engine, batch) == {"a": (5, 1, 3), "b": (0, 4, 0)}


def test_who_waits_for_a_slot_holds_nobody_up_until_one_is_free() -> None:
    engine = scheduler(max_num_seqs=2)
    a, b = request("a", 4), request("b", 4)
    batch = decoding(engine, a, b)
    engine.add(request("c", 4))
    ahead = engine.schedule_ahead(batch)
    assert ahead is not None
    commit(engine, batch, {"a": [EOS]})
    assert a.finished
    assert plan_ahead(engine, ahead) == {"b": (6, 1, 3), "c": (0, 4, 0)}  # c has a's slot


def test_nothing_is_planned_where_blocks_lack_and_what_was_taken_comes_back() -> None:
    engine = scheduler(num_blocks=6, caching=False)
    a, b = request("a", 7, max_tokens=9), request("b", 7, max_tokens=9)
    batch = decoding(engine, a, b)
    assert plan(batch) == {"a": (7, 1, 3), "b": (7, 1, 3)}
    assert [blocks_held(engine, name) for name in "ab"] == [3, 3]
    assert engine.block_manager.num_available == 0
    # Behind four more tokens and three drafts a fourth block would be needed.
    assert plan_ahead(engine, batch) is None
    assert (a.steps_in_flight, b.steps_in_flight) == (1, 1)
    commit(engine, batch)
    assert [blocks_held(engine, name) for name in "ab"] == [3, 3]
    abort(engine, "b")
    batch = engine.schedule()
    assert plan(batch) == {"a": (8, 1, 3)}
    assert plan_ahead(engine, batch) == {"a": (9, 1, 3)}


def test_blocks_taken_for_a_plan_that_failed_cost_nobody_their_place() -> None:
    engine = scheduler(num_blocks=7, caching=False)
    a, b = request("a", 7, max_tokens=12), request("b", 7, max_tokens=12)
    batch = decoding(engine, a, b)
    assert plan_ahead(engine, batch) is None
    assert [blocks_held(engine, name) for name in "ab"] == [4, 3]  # until the results are here
    commit(engine, batch)
    assert [blocks_held(engine, name) for name in "ab"] == [3, 3]
    assert not engine.schedule().preempted


def test_who_surely_ends_is_left_out() -> None:
    engine = scheduler(max_model_len=10)
    a = request("a", 4, max_tokens=2)
    b = request("b", 4, max_tokens=3)
    c = request("c", 8)
    d = request("d", 7)
    batch = decoding(engine, a, b, c, d)
    assert list(plan(batch)) == ["a", "b", "c", "d"]
    assert plan_ahead(engine, batch) == {"b": (5, 1, 0), "d": (8, 1, 0)}
    assert [each.steps_in_flight for each in (a, b, c, d)] == [1, 2, 1, 2]
    commit(engine, batch)
    assert (a.finish_reason, c.finish_reason) == (FinishReason.LENGTH, FinishReason.LENGTH)
    assert not b.finished
    assert not d.finished


def test_nothing_is_planned_when_everyone_surely_ends() -> None:
    engine = scheduler()
    assert plan_ahead(engine, decoding(engine, request("a", 4, max_tokens=2))) is None


@pytest.mark.parametrize(
    ("limits", "max_tokens", "expected"),
    [
        ({}, 16, 3),
        ({}, 6, 3),  # one output token is there, one is coming, and one follows the drafts
        ({}, 5, 2),
        ({}, 3, 0),
        ({"max_model_len": 14}, 16, 3),
        ({"max_model_len": 13}, 16, 2),
        ({"max_model_len": 11}, 16, 0),
        ({"drafter_max_model_len": 12}, 16, 2),
        ({"drafter_max_model_len": 10}, 16, 0),
        ({"drafter_max_model_len": 5}, 16, 0),
        ({"max_num_batched_tokens": 3}, 16, 2),
        ({"max_num_batched_tokens": 1}, 16, 0),
    ],
)
def test_drafts_planned_ahead_reckon_with_the_token_that_surely_comes(
    limits: dict[str, Any], max_tokens: int, expected: int
) -> None:
    engine = scheduler(**limits)
    a = request("a", 8, max_tokens=max_tokens)
    assert plan_ahead(engine, decoding(engine, a)) == {"a": (9, 1, expected)}


def test_a_step_planned_ahead_keeps_to_the_row_budget_in_arrival_order() -> None:
    engine = scheduler(max_num_batched_tokens=7)
    members = [request(name, 1) for name in "abc"]
    batch = decoding(engine, *members)
    ahead = engine.schedule_ahead(batch)
    assert ahead is not None
    assert plan(ahead) == {"a": (2, 1, 3), "b": (2, 1, 1), "c": (2, 1, 0)}  # 7 rows


def test_a_table_planned_ahead_ends_with_max_model_len() -> None:
    engine = scheduler(max_model_len=12)
    batch = decoding(engine, request("a", 7))
    ahead = engine.schedule_ahead(batch)
    assert ahead is not None
    # 8 tokens, 3 drafts, one more and 2 drafts would be 14.
    assert plan(ahead) == {"a": (8, 1, 2)}
    assert len(ahead.requests[0].block_table) == 3


def test_nothing_is_rewound_while_a_step_is_under_way() -> None:
    engine = scheduler()
    a = request("a", 6)
    batch = decoding(engine, a)
    ahead = engine.schedule_ahead(batch)
    assert ahead is not None
    assert blocks_held(engine, "a") == 4
    commit(engine, batch, {"a": [9]})
    assert blocks_held(engine, "a") == 4
    commit(engine, ahead, {"a": [9]})
    assert (a.num_tokens, blocks_held(engine, "a")) == (9, 3)
    assert a.steps_in_flight == 0


def test_a_request_that_ended_is_surplus_in_the_step_under_way() -> None:
    engine = scheduler()
    a, b = request("a", 6), request("b", 6)
    batch = decoding(engine, a, b)
    ahead = engine.schedule_ahead(batch)
    assert ahead is not None
    commit(engine, batch, {"a": [9, EOS]})
    assert a.finished
    again = engine.schedule_ahead(ahead)
    assert again is not None
    assert list(plan(again)) == ["b"]
    commit(engine, ahead, {"a": [1, 2, 3], "b": [8]})
    assert a.output_token_ids == [7, 9, EOS]
    assert b.output_token_ids == [7, 7, 8]


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.STOP])
def test_a_request_may_end_from_outside_while_two_steps_are_under_way(reason: FinishReason) -> None:
    engine = scheduler(num_blocks=9)
    a, b = request("a", 6), request("b", 6)
    batch = decoding(engine, a, b)
    ahead = engine.schedule_ahead(batch)
    assert ahead is not None
    engine.finish(a, reason)
    again = request("a", range(5))
    engine.add(again)  # the same id
    commit(engine, batch)
    assert plan_ahead(engine, ahead) == {"a": (0, 5, 0), "b": (8, 1, 3)}  # a slot is free for it
    commit(engine, ahead)
    assert (a.num_output_tokens, a.finish_reason) == (1, reason)
    assert again.num_output_tokens == 0


def test_nothing_is_planned_behind_a_step_for_nobody() -> None:
    engine = scheduler()
    batch = decoding(engine, request("a", 6))
    ahead = engine.schedule_ahead(batch)
    assert ahead is not None
    abort(engine, "a")
    commit(engine, batch)
    assert plan_ahead(engine, ahead) is None
    commit(engine, ahead)
    assert engine.block_manager.num_available == engine.block_manager.num_blocks


def test_full_blocks_are_shared_while_a_step_is_under_way() -> None:
    engine = scheduler()
    a = request("a", 6)
    batch = decoding(engine, a)
    ahead = engine.schedule_ahead(batch)
    assert ahead is not None
    commit(engine, batch, {"a": [9, 9]})
    assert a.num_computed == 8
    assert len(engine.block_manager.match_prefix("drafter", a.token_ids)) == 2


def test_smaller_priorities_go_first_and_equal_ones_in_order_of_arrival() -> None:
    engine = scheduler(max_num_seqs=2, num_speculative_tokens=0)
    for name, priority in (("a", 0), ("b", 3), ("c", -1), ("d", -1)):
        engine.add(request(name, 2, max_tokens=2, drafts=0, priority=priority))
    assert ids(engine.waiting) == ["c", "d", "a", "b"]
    assert list(step_plan(engine)) == ["c", "d"]


def test_a_running_request_keeps_its_place_from_a_waiting_one_that_goes_first() -> None:
    engine = scheduler(max_num_seqs=1, num_speculative_tokens=0)
    engine.add(request("a", 2, max_tokens=2, drafts=0, priority=9))
    step(engine)
    engine.add(request("b", 2, max_tokens=2, drafts=0))
    assert list(step_plan(engine)) == ["a"]
    assert list(step_plan(engine)) == ["b"]


def test_the_largest_priority_is_preempted_whenever_it_came() -> None:
    engine = scheduler(num_blocks=5, caching=False, num_speculative_tokens=0)
    a = request("a", 7, max_tokens=9, drafts=0, priority=1)
    b = request("b", 7, max_tokens=9, drafts=0)
    engine.add(a)
    engine.add(b)
    step(engine)
    step(engine)
    batch = engine.schedule()
    assert (ids(batch.preempted), list(plan(batch))) == (["a"], ["b"])
    commit(engine, batch)
    while engine.has_unfinished:
        step(engine)
    assert a.output_token_ids == b.output_token_ids == [7] * 9


def test_priorities_are_refused_where_arrival_decides() -> None:
    engine = scheduler(by_priority=False)
    with pytest.raises(UsageError, match="priority needs scheduling_policy priority"):
        engine.add(request("a", 2, priority=1))


@pytest.mark.parametrize("drafts", [0, 3])
def test_salts_share_no_blocks(drafts: int) -> None:
    engine = scheduler()

    def cached(salt: str) -> int:
        engine.add(request("a", [5] * 9, max_tokens=1, drafts=drafts, cache_salt=salt))
        start, _, _ = step_plan(engine)["a"]
        while engine.has_unfinished:
            step(engine)
        return start

    salts = ("", "mine", "yours", "drafter")
    assert [cached(salt) for salt in salts] == [0] * 4
    assert [cached(salt) for salt in salts] == [8] * 4
