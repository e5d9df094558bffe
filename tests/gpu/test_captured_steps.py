"""Replayed steps say what eager ones say, and neither wait for the device nor for the host."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.engine.prompts import TokensPrompt
from tests import fake_drafters
from tests.gpu.engines import (
    BLOCK_SIZE,
    EVERYTHING,
    GREEDY,
    SEEDED,
    SIZES,
    Engines,
    make_prompts,
    own_seeds,
    runs_ahead,
    submit,
    tokens,
    turn,
)
from tests.padded_steps import packed_rows

if not torch.cuda.is_available():
    pytest.skip("steps are captured on a GPU only", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")

DRAFTERS = [
    ("plain", 0),
    *((drafter, k) for drafter in ("draft_model", "ngram") for k in (1, 3, 7)),
    *(("self", 3), ("subset", 7), ("perfect", 3), ("wrong", 1)),
    *(("eagle", 3), ("eagle3", 1), ("eagle3", 7), ("p-eagle", 3), ("p-eagle", 8)),
    *(("mtp", 3), ("mtp_modules", 3), ("combination", 3), ("host_combination", 3)),
    *(("windowed", 3), ("windowed_head", 3)),
    *(("eagle_tree", 6), ("eagle3_tree", 12), ("eagle3_tree", 20)),
]
ON_DEVICE = [
    *(("plain", 0), ("draft_model", 3), ("ngram", 3), ("eagle3", 3), ("p-eagle", 3)),
    *(("mtp_modules", 3), ("combination", 3), ("eagle3_tree", 12)),
    *(("windowed", 3), ("windowed_head", 3)),
]
SAMPLINGS: dict[str, SamplingParams | Sequence[SamplingParams]] = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "everything": EVERYTHING,
}


@contextmanager
def synchronisation_is_an_error() -> Iterator[None]:
    """Raise RuntimeError where the host waits for the device by other means than an event."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_the_debug_mode_sees_a_synchronisation() -> None:
    number = torch.ones((), device="cuda")
    with synchronisation_is_an_error(), pytest.raises(RuntimeError, match="synchroniz"):
        number.item()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("drafter", "k"), [*ON_DEVICE, ("self", 3)])
def test_a_decoding_batch_never_waits_for_the_device(
    drafter: str, k: int, sampling: str, engines: Engines
) -> None:
    llm = engines.get(drafter, k)
    assert llm.engine.resolved.captures
    prompts = make_prompts(6)
    params = [
        # Nobody ends below: no stop tokens, and room for all that 30 steps can give.
        replace(own, max_tokens=190, stop_token_ids=(), min_tokens=0)
        for own in own_seeds(SAMPLINGS[sampling], len(prompts))
    ]
    tokens(
        llm, prompts, [replace(own, max_tokens=12) for own in params]
    )  # captures what is missing
    numbers = [str(index) for index in range(len(prompts))]
    for number, prompt, own in zip(numbers, prompts, params, strict=True):
        submit(llm, number, prompt, own)
    for _ in range(4):
        llm.engine.step()
    held = blocks_held(llm)
    assert len(held) == len(prompts)
    try:
        with synchronisation_is_an_error():
            for _ in range(24):
                llm.engine.step()
        assert runs_ahead(llm)
        assert llm.engine.scheduler.num_running == len(prompts)
        grown = blocks_held(llm)
        assert all(grown[request_id] > held[request_id] for request_id in held)
    finally:
        for number in numbers:
            llm.engine.abort(number)


def blocks_held(llm: LLM) -> dict[str, int]:
    """The number of blocks of each running request."""
    scheduler = llm.engine.scheduler
    names = [request.request_id for request in scheduler.running]
    return {name: len(scheduler.block_manager.table(name)) for name in names}


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("drafter", "k"), DRAFTERS)
def test_replayed_steps_say_what_eager_steps_say(
    drafter: str, k: int, sampling: str, batch: int, engines: Engines
) -> None:
    prompts = make_prompts(batch)
    params = own_seeds(SAMPLINGS[sampling], batch)
    if drafter in ("perfect", "wrong"):
        remember(prompts, engines)
    expected = tokens(engines.get(drafter, k, enforce_eager=True), prompts, params)
    assert tokens(engines.get(drafter, k), prompts, params) == expected
    if sampling == "greedy":
        plain = engines.get("plain", enforce_eager=True)
        assert tokens(plain, prompts, params) == expected


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", ["draft_model", "ngram", "eagle3", "p-eagle", "combination"])
def test_packed_steps_say_what_eager_steps_say(
    drafter: str, sampling: str, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests draft different numbers of tokens, and the host never waits for the device."""
    monkeypatch.setattr("slipstream.runner.graphs.WANTED_BEFORE_CAPTURE", 1)
    prompts = make_prompts(8)
    counts = [7, 0, 1, 0, 5, 0, 2, 7]
    params = [
        replace(own, num_speculative_tokens=count, max_tokens=30)
        for own, count in zip(own_seeds(SAMPLINGS[sampling], 8), counts, strict=True)
    ]
    llm = engines.get(drafter, 7)
    expected = tokens(engines.get(drafter, 7, enforce_eager=True), prompts, params)
    assert tokens(llm, prompts, params) == expected
    assert any(bucket == 8 and rows < 64 for bucket, _, rows in packed_rows(llm))
    for number, prompt, own in zip("01234567", prompts, params, strict=True):
        submit(llm, number, prompt, replace(own, max_tokens=120, stop_token_ids=(), min_tokens=0))
    try:
        for _ in range(4):
            llm.engine.step()
        with synchronisation_is_an_error():
            for _ in range(8):
                llm.engine.step()
        assert llm.engine.scheduler.num_running == len(prompts)
    finally:
        for number in "01234567":
            llm.engine.abort(number)


def remember(prompts: list[list[int]], engines: Engines) -> None:
    """Tell the fake drafters the greedy answers; in other cases their guesses are just guesses."""
    params = replace(GREEDY, max_tokens=64)
    answers = tokens(engines.get("plain", enforce_eager=True), prompts, params)
    fake_drafters.ANSWERS.clear()
    for prompt, answer in zip(prompts, answers, strict=True):
        fake_drafters.ANSWERS[tuple(prompt)] = [*prompt, *answer]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("drafter", "k"), ON_DEVICE)
def test_running_ahead_changes_nothing(
    drafter: str, k: int, sampling: str, engines: Engines
) -> None:
    prompts = make_prompts(8)
    params = [
        replace(own, max_tokens=20 + 3 * index)
        for index, own in enumerate(own_seeds(SAMPLINGS[sampling], 8))
    ]
    ahead, synchronous = engines.get(drafter, k), engines.get(drafter, k, async_scheduling=False)
    assert tokens(ahead, prompts, params) == tokens(synchronous, prompts, params)
    assert [seen_running_ahead(llm, prompts) for llm in (ahead, synchronous)] == [True, False]


def seen_running_ahead(llm: LLM, prompts: list[list[int]]) -> bool:
    for index, prompt in enumerate(prompts):
        submit(llm, str(index), prompt, GREEDY)
    seen = False
    while llm.engine.has_unfinished:
        llm.engine.step()
        seen = seen or runs_ahead(llm)
    return seen


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(("drafter", "k"), [*ON_DEVICE, ("perfect", 3)])
def test_requests_come_end_and_are_aborted_while_steps_run_ahead(
    drafter: str, k: int, params: SamplingParams, engines: Engines
) -> None:
    prompts = make_prompts(12)
    if drafter == "perfect":
        remember(prompts, engines)
    lengths = [40, 1, 17, 33, 2, 9, 40, 3, 25, 40, 12, 30]
    wanted = [
        replace(own, max_tokens=length)
        for own, length in zip(own_seeds(params, 12), lengths, strict=True)
    ]
    eager = engines.get(drafter, k, enforce_eager=True)
    expected = [
        tokens(eager, [prompt], [own])[0] for prompt, own in zip(prompts, wanted, strict=True)
    ]
    stop = expected[6][20]  # ends that request wherever it first comes
    wanted[6] = replace(wanted[6], stop_token_ids=[stop])
    expected[6] = expected[6][: expected[6].index(stop) + 1]

    llm = engines.get(drafter, k)
    arrivals = [0, 0, 1, 3, 3, 4, 5, 8, 8, 9, 14, 15]
    aborted = {3: 9, 9: 12}  # request -> step
    ended: dict[str, list[int]] = {}
    cut: dict[int, list[int]] = {}
    step = 0
    while llm.engine.has_unfinished or step <= max(arrivals):
        for index in (index for index, when in enumerate(arrivals) if when == step):
            submit(llm, str(index), prompts[index], wanted[index])
        for index in (index for index, when in aborted.items() if when == step):
            submission = llm.engine.abort(str(index))
            assert submission is not None, "it ended before it could be aborted"
            cut[index] = list(submission.output().outputs[0].token_ids)
        ended.update(turn(llm))
        step += 1
    for index, answer in enumerate(expected):
        if index in aborted:
            assert str(index) not in ended
            assert cut[index] == answer[: len(cut[index])]
        else:
            assert ended[str(index)] == answer, index
    assert llm.engine.step() == []


@pytest.mark.parametrize(("drafter", "k"), ON_DEVICE)
def test_one_request_wants_logprobs(drafter: str, k: int, engines: Engines) -> None:
    prompts = make_prompts(4)
    params = [GREEDY, replace(GREEDY, logprobs=3, max_tokens=18), GREEDY, GREEDY]
    llm, eager = engines.get(drafter, k), engines.get(drafter, k, enforce_eager=True)
    token_ids = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
    ours, theirs = llm.generate(token_ids, params), eager.generate(token_ids, params)
    for output, expected in zip(ours, theirs, strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert [output.outputs[0].logprobs is None for output in ours] == [True, False, True, True]
    rows, expected_rows = ours[1].outputs[0].logprobs, theirs[1].outputs[0].logprobs
    assert rows is not None
    assert expected_rows is not None
    assert len(rows) == 18
    for row, expected_row in zip(rows, expected_rows, strict=True):
        values = {token: it.logprob for token, it in row.items()}
        assert values == pytest.approx(
            {token: it.logprob for token, it in expected_row.items()}, abs=1e-4
        )


@pytest.mark.parametrize(("drafter", "k"), ON_DEVICE)
def test_prefix_hits_change_nothing(drafter: str, k: int, engines: Engines) -> None:
    llm = engines.get(drafter, k, enable_prefix_caching=True)
    prompts = make_prompts(8)
    expected = tokens(engines.get(drafter, k, enforce_eager=True), prompts, GREEDY)
    token_ids = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
    first, again = llm.generate(token_ids, GREEDY), llm.generate(token_ids, GREEDY)
    for outputs in (first, again):
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    hits = [output.metrics.num_cached_tokens for output in again]
    assert [hit >= BLOCK_SIZE for hit in hits] == [len(ids) > BLOCK_SIZE for ids in prompts]
    # The drafter's part of the blocks is as good as when it was computed.
    accepted = [
        sum(output.metrics.num_accepted_tokens for output in outputs) for outputs in (first, again)
    ]
    assert accepted[1] == pytest.approx(accepted[0], rel=0.1)


@pytest.mark.parametrize(("drafter", "k"), ON_DEVICE)
def test_preemption_changes_nothing(drafter: str, k: int, engines: Engines) -> None:
    prompts = make_prompts(8)
    params = replace(GREEDY, max_tokens=60)
    expected = tokens(engines.get(drafter, k, enforce_eager=True), prompts, params)
    llm = engines.get(drafter, k, num_kv_blocks=20)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], params)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    llm.engine.scheduler.check_invariants()


DEMO = {**SIZES, "skip_tokenizer_init": False, "max_model_len": 512, "num_kv_blocks": 400}
STARTS = ["def read_lines(path):\n", "import os\n\nclass Cache:\n", "for index in range(10):\n"]


def demo(drafter: bool, **options: Any) -> LLM:
    config = {"model": "demo/draft", "num_speculative_tokens": 3} if drafter else None
    return LLM("demo", speculative_config=config, **{**DEMO, **options})


@pytest.mark.parametrize("drafter", [False, True], ids=["plain", "draft_model"])
def test_bad_words_of_one_request_stay_its_own(drafter: bool) -> None:
    params = replace(GREEDY, max_tokens=48)
    eager = demo(False, enforce_eager=True)
    free = [output.outputs[0].text for output in eager.generate(STARTS, params)]
    word = max(free[1].split(), key=len)
    banning = [params, replace(params, bad_words=[word]), params]
    expected = [output.outputs[0].text for output in eager.generate(STARTS, banning)]
    assert word in free[1]
    assert word not in expected[1].split()
    llm = demo(drafter)
    assert [output.outputs[0].text for output in llm.generate(STARTS, banning)] == expected
    assert [output.outputs[0].text for output in llm.generate(STARTS, params)] == free


@pytest.mark.parametrize("drafter", [False, True], ids=["plain", "draft_model"])
def test_the_parts_of_the_time_make_up_the_time(drafter: bool) -> None:
    llm = demo(drafter)
    params = replace(GREEDY, max_tokens=200)
    llm.generate(STARTS, params)
    before = llm.metrics.seconds
    began = perf_counter()
    llm.generate(STARTS, params)
    seconds = perf_counter() - began
    after = llm.metrics.seconds
    draft, target, verify, rest = (after[part] - before[part] for part in after)
    assert target > 0
    assert verify > 0
    assert rest >= 0
    assert draft > 0.1 * target if drafter else 0 <= draft < 0.5 * target
    assert draft + target + verify + rest == pytest.approx(seconds, rel=0.2)
