"""A step that is broken off, wherever that happens, changes nothing in what other requests say."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from types import FrameType
from typing import Any

import pytest

from slipstream import LLM, RequestOutput, SamplingParams, StructuredOutput
from slipstream.core.batch import Batch
from slipstream.engine.engine import Engine
from slipstream.engine.prompts import EncodedPrompt
from tests.padded_steps import use_padded_steps

pytestmark = pytest.mark.breaks_steps

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
SAMPLED = SamplingParams(seed=3, max_tokens=30, ignore_eos=True, num_speculative_tokens=0, n=2)
PARAMS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "logprobs": SamplingParams(temperature=0, max_tokens=24, logprobs=2, prompt_logprobs=1),
    "stop": SamplingParams(temperature=0, max_tokens=32, stop="return"),
    "grammar": SamplingParams(
        temperature=0, max_tokens=20, structured=StructuredOutput(regex="[0-9]{8,12}x")
    ),
}
FIRST, SECOND = "def main(", "import numpy as np\n"


@pytest.fixture(scope="module", params=["exact", "padded"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    config = {"model": "demo/draft", "num_speculative_tokens": 3}
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "padded":
            use_padded_steps(patch)
        yield LLM("demo", speculative_config=config, dtype="float32", max_num_seqs=4)


def texts(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [(it.token_ids, it.text, it.finish_reason, it.stop_reason) for it in output.outputs]


def drain(stream: Iterator[RequestOutput]) -> RequestOutput:
    last = None
    for output in stream:
        assert last is None or output.outputs[0].text.startswith(last.outputs[0].text)
        last = output
    assert last is not None
    assert last.finished
    return last


def check_same(output: RequestOutput, expected: RequestOutput) -> None:
    assert texts(output) == texts(expected)
    for sample, wanted in zip(output.outputs, expected.outputs, strict=True):
        assert len(sample.from_draft) == len(sample.token_ids)
        assert (sample.logprobs is None) == (wanted.logprobs is None)
        for row, other in zip(sample.logprobs or (), wanted.logprobs or (), strict=True):
            assert row.keys() == other.keys()
    for found, other in zip(
        output.prompt_logprobs or (), expected.prompt_logprobs or (), strict=True
    ):
        assert (found and found.keys()) == (other and other.keys())


def check_all_free(llm: LLM) -> None:
    scheduler = llm.engine.scheduler
    scheduler.check_invariants()
    assert not llm.engine.has_unfinished
    assert scheduler.block_manager.num_available == scheduler.block_manager.num_blocks


@contextmanager
def broken_off(line: int, error: BaseException) -> Iterator[None]:
    """Raise where the engine's step comes to the line of this number, counted from 0."""
    left, inside = line, 0

    def local(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        nonlocal left, inside
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise error
        elif event == "return" and frame.f_code is Engine.step.__code__:
            inside -= 1
        return local

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal inside
        inside += frame.f_code is Engine.step.__code__
        return local if inside and "/slipstream/" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def outcome(stream: Iterator[RequestOutput]) -> RequestOutput | BaseException:
    try:
        return drain(stream)
    except (KeyboardInterrupt, RuntimeError) as error:
        return error


def check_lines(llm: LLM, params: SamplingParams, error: type[BaseException]) -> None:
    """Two streams, one of which has a step broken off, again and again; and a third after them."""
    expected = [llm.generate(prompt, params)[0] for prompt in (FIRST, SECOND)]
    for line in random.Random(0).sample(range(2500), 2):
        streams = [llm.stream(FIRST, params), llm.stream(SECOND, params)]
        next(streams[0])
        next(streams[1])
        with broken_off(line, error()):
            first = outcome(streams[0])
        outcomes = [first, outcome(streams[1])]
        assert sum(isinstance(it, error) for it in outcomes) <= 1
        for output, wanted in zip(outcomes, expected, strict=True):
            if isinstance(output, RequestOutput):
                check_same(output, wanted)
        check_all_free(llm)
    check_same(llm.generate(FIRST, params)[0], expected[0])


@pytest.mark.parametrize("wish", PARAMS)
def test_an_interrupt_anywhere_in_a_step_changes_no_token(llm: LLM, wish: str) -> None:
    check_lines(llm, PARAMS[wish], KeyboardInterrupt)


@pytest.mark.parametrize("wish", ["greedy", "sampled"])
def test_an_error_anywhere_in_a_step_ends_one_request_at_most(llm: LLM, wish: str) -> None:
    check_lines(llm, PARAMS[wish], RuntimeError)


def test_nobody_is_blamed_for_another_that_stood_its_trial(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are run alone after a fault that comes once; the culprit fails a few steps later."""
    engine, step, widths = llm.engine, llm.engine._step, list[int]()
    expected, launch = llm.generate(FIRST, GREEDY)[0], step.launch

    def fail(batch: Batch) -> Any:
        late = any(
            it.request.request_id == "culprit" and it.request.num_steps > 1 for it in batch.requests
        )
        if late or not widths:
            widths.append(len(batch.requests))
            raise RuntimeError("broken off")
        return launch(batch)

    monkeypatch.setattr(step, "launch", fail)
    prompt = EncodedPrompt(None, expected.prompt_token_ids, ())
    names = ("culprit", "a", "b", "c")
    asked = [engine.add(name, prompt, GREEDY) for name in names]
    late = None
    while engine.has_unfinished:
        engine.step()
        if widths and late is None:  # while requests are tried
            late = engine.add("d", prompt, GREEDY)
    assert late is not None
    for submission in (*asked[1:], late):
        assert submission.error is None
        check_same(submission.output(), expected)
    assert str(asked[0].error) == "broken off"
    assert widths[0] == len(names)
    assert widths[-1] == 1
    check_all_free(llm)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("once")])
def test_streams_survive_a_step_that_is_lost(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The device has done the work of the lost step, and a further step may be in flight."""
    expected = llm.generate(SECOND, GREEDY)[0]
    first, second = llm.stream(FIRST, GREEDY), llm.stream(SECOND, GREEDY)
    next(first)
    next(second)
    next(first)
    step = llm.engine._step
    finish, errors = step.finish, iter([error])

    def lose_one(*arguments: Any) -> Any:
        if (lost := next(errors, None)) is not None:
            raise lost
        return finish(*arguments)

    monkeypatch.setattr(step, "finish", lose_one)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            drain(first)
    else:
        drain(first)
    check_same(drain(second), expected)
    check_all_free(llm)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("once")])
def test_a_step_that_is_taken_back_is_not_counted(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Wherever the step was interrupted, metrics still add up."""
    engine, before = llm.engine, deepcopy(llm.metrics)
    take_all, errors = engine._take_all, iter([error])
    first, second = llm.stream(FIRST, GREEDY), llm.stream(SECOND, GREEDY)
    next(first)
    next(second)

    def lose_one(result: Any) -> Any:
        changed = take_all(result)
        if (lost := next(errors, None)) is not None:
            raise lost
        return changed

    monkeypatch.setattr(engine, "_take_all", lose_one)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            drain(first)
    outputs = [drain(stream) for stream in (first, second) if stream.gi_frame is not None]
    for output in outputs:
        counted = output.metrics
        assert counted.num_steps + counted.num_accepted_tokens == GREEDY.max_tokens
        assert sum(counted.num_accepted_tokens_per_pos) == counted.num_accepted_tokens
    if len(outputs) == 2:  # nobody went away
        drafted = sum(output.metrics.num_draft_tokens for output in outputs)
        counted = llm.metrics
        assert counted.speculation.num_draft_tokens - before.speculation.num_draft_tokens == drafted
        assert counted.num_output_tokens - before.num_output_tokens == 2 * GREEDY.max_tokens
