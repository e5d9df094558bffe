"""The thread between the event loop and the engine."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.core.errors import UsageError
from slipstream.core.outputs import RequestOutput
from slipstream.core.structured import StructuredOutput
from slipstream.engine.engine import Engine
from slipstream.engine.prompts import EncodedPrompt, PromptEncoder
from slipstream.engine.samples import Submission
from slipstream.serve.engine_thread import EngineThread
from slipstream.serve.limits import (
    DeadlineExceededError,
    DrainingError,
    EngineFailedError,
    QueueFullError,
    RequestFailedError,
    ServeLimits,
    StoppedError,
)
from slipstream.serve.observers import Observer
from slipstream.serve.updates import Delta, RequestUpdate, UpdateStream, join_deltas

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
PROMPT = "def main(args):\n    "


class Notes(Observer):
    """An observer that remembers."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, str]] = []
        self.added: list[str] = []
        self.tokens = 0
        self.steps = 0

    def request_added(self, request_id: str, submission: Submission) -> None:
        self.added.append(request_id)

    def tokens_added(self, submission: Submission, gap: float | None) -> None:
        self.tokens = sum(sample.num_taken for sample in submission.samples)

    def request_ended(self, request_id: str, submission: Submission, reason: str) -> None:
        self.ends.append((request_id, reason))

    def step_done(self, engine: Engine) -> None:
        self.steps += 1


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        "demo",
        speculative_config={"model": "demo/draft", "num_speculative_tokens": 3},
        dtype="float32",
        max_num_seqs=4,
        num_kv_blocks=600,
        threads=1,
    )


@asynccontextmanager
async def running(
    llm: LLM, notes: Notes | None = None, **limits: Any
) -> AsyncIterator[EngineThread]:
    """Runs a thread around the engine, and checks that nothing is left."""
    thread = EngineThread(llm.engine, ServeLimits(**limits), [notes or Notes()])
    thread.start()
    try:
        yield thread
    finally:
        await thread.stop()
    check_all_free(llm)


def check_all_free(llm: LLM) -> None:
    blocks = llm.engine.scheduler.block_manager
    llm.engine.scheduler.check_invariants()
    assert blocks.num_available == blocks.num_blocks
    assert not llm.engine.scheduler.num_running


def encoded(llm: LLM, text: str, params: SamplingParams) -> EncodedPrompt:
    encoder = PromptEncoder(llm.engine.tokenizer, llm.engine.resolved.vocab_size)
    return encoder.encode(text, params)


async def submit(
    thread: EngineThread, llm: LLM, params: SamplingParams, text: str = PROMPT
) -> UpdateStream:
    [stream] = await thread.submit("id", [encoded(llm, text, params)], params)
    return stream


async def read(stream: UpdateStream) -> list[RequestUpdate]:
    return [updates async for updates in stream]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(bounded())


def joined(updates: list[RequestUpdate], index: int = 0) -> Delta:
    deltas = [delta for it in updates for delta in it.deltas if delta.index == index]
    return join_deltas(deltas)


def check_same(updates: list[RequestUpdate], expected: RequestOutput) -> None:
    for sample in expected.outputs:
        whole = joined(updates, sample.index)
        assert whole.text == sample.text
        assert list(whole.token_ids) == list(sample.token_ids)
        assert [it.kind == "accepted" for it in whole.origins] == list(sample.from_draft)
        assert whole.logprobs == sample.logprobs
        assert (whole.finish_reason, whole.stop_reason) == (
            sample.finish_reason,
            sample.stop_reason,
        )
    last = updates[-1]
    assert last.finished
    assert last.metrics.num_accepted_tokens == expected.metrics.num_accepted_tokens


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=1, seed=3, n=2, max_tokens=20, logprobs=2),
        SamplingParams(temperature=0, max_tokens=40, stop=["):", "return"], ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=1),
    ],
    ids=["greedy", "samples", "stop", "prompt-logprobs"],
)
def test_increments_add_up_to_the_offline_output(llm: LLM, params: SamplingParams) -> None:
    expected = llm.generate(PROMPT, params)[0]
    notes = Notes()

    async def test() -> None:
        async with running(llm, notes) as thread:
            updates = await read(await submit(thread, llm, params))
        check_same(updates, expected)
        given = [it.prompt_logprobs for it in updates if it.prompt_logprobs is not None]
        assert given == ([] if params.prompt_logprobs is None else [expected.prompt_logprobs])

    run(test)
    assert notes.tokens == sum(len(sample.token_ids) for sample in expected.outputs)
    assert notes.ends == [("id", expected.outputs[-1].finish_reason)]


def test_origins_say_what_each_step_did(llm: LLM) -> None:
    async def test() -> None:
        async with running(llm) as thread:
            updates = await read(await submit(thread, llm, GREEDY))
            plain = SamplingParams(temperature=0, max_tokens=4, num_speculative_tokens=0)
            undrafted = joined(await read(await submit(thread, llm, plain)))
        origins, metrics = joined(updates).origins, updates[-1].metrics
        accepted = [origin.position for origin in origins if origin.kind == "accepted"]
        # The last step may be cut by max_tokens, but not within this number of tokens.
        assert len(accepted) == metrics.num_accepted_tokens
        counts = [accepted.count(position) for position in range(3)]
        assert counts == metrics.num_accepted_tokens_per_pos
        assert {origin.kind for origin in origins} >= {"accepted", "plain"}
        for before, origin in pairwise(origins):
            drafted = (before.position or 0) + 1 if before.kind == "accepted" else 0
            if origin.kind == "bonus":
                assert drafted
            if origin.kind == "recovered":
                assert origin.position == drafted
        assert {origin.kind for origin in undrafted.origins} == {"plain"}

    run(test)


def test_requests_share_steps(llm: LLM) -> None:
    prompts = [f"class Name{number}:\n    " for number in range(9)]
    expected = llm.generate(prompts, GREEDY)

    async def test() -> None:
        notes = Notes()
        async with running(llm, notes) as thread:
            streams = await asyncio.gather(
                *(submit(thread, llm, GREEDY, prompt) for prompt in prompts)
            )
            for updates, output in zip(
                await asyncio.gather(*map(read, streams)), expected, strict=True
            ):
                check_same(updates, output)
        assert notes.steps < 24 * 3  # nine requests on four places

    run(test)


def test_a_reader_that_comes_late_gets_one_increment(llm: LLM) -> None:
    expected = llm.generate(PROMPT, GREEDY)[0]

    async def test() -> None:
        async with running(llm) as thread:
            stream = await submit(thread, llm, GREEDY)
            await thread.drain()
            updates = await read(stream)
        assert len(updates) == 1
        check_same(updates, expected)

    run(test)


async def broken_off(stream: UpdateStream) -> None:
    async for _ in stream:
        break
    await stream.aclose()


async def dropped(stream: UpdateStream) -> None:
    await anext(stream)


async def cancelled(stream: UpdateStream) -> None:
    task = asyncio.create_task(read(stream))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def unread(stream: UpdateStream) -> None:
    pass


@pytest.mark.parametrize("leave", [broken_off, dropped, cancelled, unread])
def test_leaving_early_frees_everything_within_a_step(
    llm: LLM, leave: Callable[[UpdateStream], Coroutine[Any, Any, None]]
) -> None:
    notes = Notes()

    async def test() -> None:
        async with running(llm, notes) as thread:
            await leave(await submit(thread, llm, LONG))
            gc.collect()
            left = notes.steps
            await thread.drain()
            assert notes.steps - left <= 2  # the one under way, and one that began meanwhile
            check_all_free(llm)
            assert thread.num_open == 0

    run(test)
    assert notes.ends == [("id", "abort")]


def test_a_sender_that_is_cancelled_leaves_nothing(llm: LLM) -> None:
    async def test() -> None:
        async with running(llm) as thread:
            first = await submit(thread, llm, LONG)
            task = asyncio.create_task(submit(thread, llm, LONG))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await first.aclose()
            await thread.drain()
            check_all_free(llm)

    run(test)


def test_a_full_queue_refuses(llm: LLM) -> None:
    async def test() -> None:
        async with running(llm, max_waiting=2) as thread:
            streams = [await submit(thread, llm, LONG) for _ in range(6)]
            with pytest.raises(QueueFullError) as refusal:
                await submit(thread, llm, GREEDY)
            assert 1 <= refusal.value.retry_after <= 60
            with pytest.raises(UsageError, match="7 samples"):
                await submit(thread, llm, SamplingParams(n=7, max_tokens=1))
            await streams.pop().aclose()
            while thread.num_open == 6:
                await asyncio.sleep(0.01)
            streams.append(await submit(thread, llm, GREEDY))
            for stream in streams:
                await stream.aclose()

    run(test)


def test_several_prompts_are_taken_on_together_or_not_at_all(llm: LLM) -> None:
    longest = llm.engine.resolved.limits.max_model_len

    async def test() -> None:
        async with running(llm) as thread:
            fits = encoded(llm, PROMPT, GREEDY)
            too_long = EncodedPrompt(None, [1] * longest, ())
            with pytest.raises(UsageError, match="max_model_len"):
                await thread.submit("id", [fits, too_long, fits], GREEDY)
            await thread.drain()
            check_all_free(llm)

    run(test)


def test_deadlines_end_running_and_waiting_requests(llm: LLM) -> None:
    notes = Notes()

    async def test() -> None:
        async with running(llm, notes, request_timeout=30.0) as thread:
            usual = thread.limits
            thread.limits = replace(usual, request_timeout=0.2)
            streams = [await submit(thread, llm, LONG) for _ in range(5)]
            thread.limits = usual
            results = await asyncio.gather(*map(read, streams), return_exceptions=True)
            assert [type(result) for result in results] == [DeadlineExceededError] * 5
            await read(await submit(thread, llm, GREEDY))

    run(test)
    assert [reason for _, reason in notes.ends] == ["timeout"] * 5 + ["length"]


def test_draining_lets_requests_end_and_refuses_new_ones(llm: LLM) -> None:
    expected = llm.generate(PROMPT, GREEDY)[0]

    async def test() -> None:
        async with running(llm) as thread:
            stream = await submit(thread, llm, GREEDY)
            drained = asyncio.create_task(thread.drain())
            await asyncio.sleep(0)
            with pytest.raises(DrainingError):
                await submit(thread, llm, GREEDY)
            check_same(await read(stream), expected)
            await drained
            assert thread.alive

    run(test)


def test_stopping_ends_what_runs(llm: LLM) -> None:
    async def test() -> None:
        thread = EngineThread(llm.engine, ServeLimits())
        thread.start()
        stream = await submit(thread, llm, LONG)
        await thread.stop()
        with pytest.raises(StoppedError):
            await read(stream)
        assert not thread.alive
        check_all_free(llm)

    run(test)


def test_a_request_that_fails_ends_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading logprobs fails: of the requests in the step, one asks for them."""

    def fail(*_: object) -> None:
        raise RuntimeError("no logprobs today")

    expected = llm.generate(PROMPT, GREEDY)[0]
    monkeypatch.setattr(llm.engine._logprobs, "of_tokens", fail)
    poisoned = SamplingParams(temperature=0, logprobs=1, max_tokens=24, n=2)

    async def test() -> None:
        async with running(llm) as thread:
            streams = [await submit(thread, llm, params) for params in (GREEDY, poisoned, GREEDY)]
            first, failed, last = await asyncio.gather(*map(read, streams), return_exceptions=True)
            assert isinstance(failed, RequestFailedError)
            assert "no logprobs today" in str(failed.__cause__)
            assert isinstance(first, list)
            assert isinstance(last, list)
            check_same(first, expected)
            check_same(last, expected)

    run(test)


def test_a_fault_is_raised_offline(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no logprobs today")

    monkeypatch.setattr(llm.engine._logprobs, "of_tokens", fail)
    with pytest.raises(RuntimeError, match="no logprobs today"):
        llm.generate([PROMPT, PROMPT], SamplingParams(logprobs=1, max_tokens=24))
    check_all_free(llm)


def test_the_engine_goes_on_behind_a_step_that_failed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate(PROMPT, GREEDY)[0]
    step = llm.engine._step
    launch, calls = step.launch, iter(range(100))

    def fail_once(batch: Any) -> Any:
        if next(calls) == 2:
            raise RuntimeError("out of luck")
        return launch(batch)

    monkeypatch.setattr(step, "launch", fail_once)

    async def test() -> None:
        async with running(llm) as thread:
            stream = await submit(thread, llm, LONG)
            with pytest.raises(RequestFailedError):
                await read(stream)
            check_same(await read(await submit(thread, llm, GREEDY)), expected)

    run(test)


@pytest.mark.breaks_steps
@pytest.mark.parametrize("failing_step", [0, 1, 3])
def test_a_request_that_makes_steps_fail_ends_alone(
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    failing_step: int,
    hidden_failures: list[BaseException | None],
) -> None:
    """The error does not name a request: all are run one by one, and the others lose nothing."""
    sampled = SamplingParams(temperature=1, seed=5, n=2, max_tokens=20, num_speculative_tokens=0)
    poisoned = SamplingParams(temperature=0, max_tokens=77, ignore_eos=True)
    digits = SamplingParams(
        temperature=0, max_tokens=20, structured=StructuredOutput(regex="[0-9]{8,12}x")
    )
    innocent = (GREEDY, sampled, digits, GREEDY)
    expected = [llm.generate(PROMPT, params)[0] for params in innocent]
    step = llm.engine._step
    launch = step.launch

    def fail(batch: Any) -> Any:
        for item in batch.requests:
            if item.request.max_tokens == 77 and item.request.num_steps == failing_step:
                raise RuntimeError("poisoned")
        return launch(batch)

    monkeypatch.setattr(step, "launch", fail)

    async def test() -> None:
        async with running(llm) as thread:
            order = (GREEDY, sampled, poisoned, digits, GREEDY, poisoned)
            streams = [await submit(thread, llm, params) for params in order]
            results = await asyncio.gather(*map(read, streams), return_exceptions=True)
            for place in (5, 2):
                failed = results.pop(place)
                assert isinstance(failed, RequestFailedError)
                assert "poisoned" in str(failed.__cause__)
            assert "poisoned" in str(hidden_failures[0])  # which no other test may have
            for updates, output in zip(results, expected, strict=True):
                assert isinstance(updates, list)
                check_text(updates, output)

    run(test)


def check_text(updates: list[RequestUpdate], expected: RequestOutput) -> None:
    for sample in expected.outputs:
        assert joined(updates, sample.index).text == sample.text


def test_an_engine_that_only_fails_is_given_up(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> Any:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(llm.engine._step, "launch", fail)

    async def test() -> None:
        async with running(llm) as thread:
            with pytest.raises(EngineFailedError):
                await read(await submit(thread, llm, GREEDY))
            assert not thread.alive
            with pytest.raises(EngineFailedError):
                await submit(thread, llm, GREEDY)
            await thread.drain()

    run(test)


@pytest.mark.parametrize("how", ["stopped", "failed", "killed"])
def test_work_that_is_queued_when_the_thread_ends_is_resolved(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It was waited for without end."""
    done: list[str] = []

    async def test() -> None:
        async with running(llm) as thread:
            stream = await submit(thread, llm, LONG)
            waits: list[asyncio.Task[None]] = []

            def queue_more() -> None:
                """Runs on the engine's thread, after its last look at the queue."""
                asyncio.run_coroutine_threadsafe(queue(), loop).result()
                if how == "killed":
                    raise SystemExit
                if how == "failed":
                    raise RuntimeError("the device is lost")

            async def queue() -> None:
                waits.append(asyncio.create_task(thread.between_steps(lambda: done.append("x"))))
                await asyncio.sleep(0)

            loop = asyncio.get_running_loop()
            ending: type[Exception] = EngineFailedError
            if how == "stopped":
                abort_all = thread._abort_all

                def queue_more_and_abort(error: Exception) -> None:
                    queue_more()
                    abort_all(error)

                monkeypatch.setattr(thread, "_abort_all", queue_more_and_abort)
                ending = StoppedError
                await thread.stop()
            else:
                monkeypatch.setattr(thread, "_step", queue_more)
            with pytest.raises(ending):
                await read(stream)
            with pytest.raises(ending):
                await waits[0]
            assert done == []
            with pytest.raises(EngineFailedError):
                await thread.between_steps(lambda: None)

    run(test)


def test_work_whose_sender_left_is_not_done(llm: LLM) -> None:
    async def test() -> None:
        done: list[int] = []
        async with running(llm) as thread:
            waiting = asyncio.create_task(thread.between_steps(lambda: done.append(1)))
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await thread.between_steps(lambda: done.append(2))
            with pytest.raises(ZeroDivisionError):
                await thread.between_steps(lambda: done.append(1 // 0))
        assert done == [2]

    run(test)


def test_an_idle_thread_sleeps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with running(llm) as thread:
            await read(await submit(thread, llm, GREEDY))
            turns = 0

            def count() -> None:
                nonlocal turns
                turns += 1

            monkeypatch.setattr(thread, "_handle_inbox", count)
            await asyncio.sleep(0.2)
            assert turns <= 1

    run(test)
