"""Steps with prompts that are launched ahead of the last one's results change no token."""

from dataclasses import replace
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.core.batch import Batch
from slipstream.engine.prompts import EncodedPrompt
from slipstream.engine.samples import Submission
from tests.lossless.test_padded import (
    Ahead,
    Maker,
    check_empty,
    encoded,
    make,
    random_prompts,
    run_out,
    said_by,
    seeded,
    words,
)
from tests.padded_steps import use_padded_steps

__all__ = ["make", "words"]  # fixtures

PROMPTS = random_prompts((45, 9, 33, 22, 61, 3, 40, 17), seed=2)
CHUNKS = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "enable_prefix_caching": False}
DRAFTERS = ("none", "draft_model", "medusa", "mlp_speculator")


def with_prompts(batches: list[Batch]) -> list[Batch]:
    return [batch for batch in batches if not batch.is_decode]


@pytest.fixture(scope="module", params=DRAFTERS)
def drafter(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def engines(drafter: str, make: Maker) -> tuple[LLM, LLM, Ahead]:
    """One that is plain, and one that runs ahead."""
    return make.one("none"), *make.padded(drafter, **CHUNKS)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {}, {"frequency_penalty": 0.7}])
def test_chunks_and_batches_of_prompts_say_what_plain_decoding_says(
    engines: tuple[LLM, LLM, Ahead], drafter: str, sampling: dict[str, Any]
) -> None:
    plain, llm, ahead = engines
    params = seeded(len(PROMPTS), **sampling)
    if drafter != "none":  # other drafters sample other text of one distribution
        params = [replace(own, temperature=0.0, seed=None) for own in params]
    ahead.batches.clear()
    expected = plain.generate(PROMPTS, params)
    for output, wanted in zip(llm.generate(PROMPTS, params), expected, strict=True):
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
    prompts = with_prompts(ahead.batches)
    assert len(prompts) > 3
    assert any(batch.admitted for batch in prompts)
    assert any(item.start and item.is_prompt_chunk for it in prompts for item in it.requests)
    assert any(not item.is_prompt_chunk for batch in prompts for item in batch.requests)
    check_empty(llm)


@pytest.mark.parametrize("ending", ["max_tokens", "stop_token", "bad_words", "prompt_logprobs"])
def test_prompts_end_with_their_first_token(engines: tuple[LLM, LLM, Ahead], ending: str) -> None:
    """The host waits for the results that it needs, beside prompts that continue."""
    plain, llm, ahead = engines
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    whole = plain.generate(PROMPTS, greedy)
    params = [greedy] * len(PROMPTS)
    for index in range(0, len(PROMPTS), 2):
        first = whole[index].outputs[0].token_ids[0]
        params[index] = {
            "max_tokens": replace(greedy, max_tokens=1),
            "stop_token": replace(greedy, stop_token_ids=[first]),
            "bad_words": replace(greedy, bad_words=[f"w{first}"]),
            "prompt_logprobs": replace(greedy, prompt_logprobs=1, logprobs=1, max_tokens=1),
        }[ending]
    ahead.batches.clear()
    expected = plain.generate(PROMPTS, params)
    outputs = llm.generate(PROMPTS, params)
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert output.outputs[0].finish_reason == wanted.outputs[0].finish_reason
        assert (output.prompt_logprobs is None) == (wanted.prompt_logprobs is None)
        for row, given in zip(
            output.prompt_logprobs or (), wanted.prompt_logprobs or (), strict=True
        ):
            assert (row is None) == (given is None)
            assert {*(row or ())} == {*(given or ())}
    # Here some request with prompt logprobs is in each of these steps.
    assert bool(with_prompts(ahead.batches)) == (ending != "prompt_logprobs")
    check_empty(llm)


def test_a_request_is_aborted_while_its_prompt_is_under_way(
    engines: tuple[LLM, LLM, Ahead],
) -> None:
    plain, llm, _ = engines
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    whole = [list(it.outputs[0].token_ids) for it in plain.generate(PROMPTS, greedy)]
    engine, under_way = llm.engine, 0
    for steps in (1, 2, 3, 5, 7):
        for index, prompt in enumerate(PROMPTS):
            engine.add(str(index), encoded(prompt), greedy)
        done: dict[str, Submission] = {}
        for _ in range(steps):
            done |= {one.request_id: one for one in engine.step() if one.finished}
        launched = engine._launched
        victims: list[str] = []
        if launched is not None:
            victims = [
                it.request.request_id for it in launched.batch.requests if it.is_prompt_chunk
            ]
        under_way += len(victims)
        for victim in victims[:1]:
            engine.abort(victim)
            engine.add(victim, encoded(PROMPTS[int(victim)]), greedy)  # it comes again at once
        done |= run_out(llm)
        assert [said_by(done[str(index)]) for index in range(len(PROMPTS))] == whole
    assert under_way > 2


@pytest.mark.parametrize("name", ["none", "draft_model"])
def test_prefixes_are_found_as_though_nothing_ran_ahead(name: str, make: Maker) -> None:
    options = {**CHUNKS, "enable_prefix_caching": True}
    common = random_prompts((48,), seed=7)[0]["prompt_token_ids"]
    prompts: list[Any] = [
        {"prompt_token_ids": [*common, *own["prompt_token_ids"]]} for own in PROMPTS
    ]
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    exact, (llm, ahead) = make.one(name, **options), make.padded(name, **options)
    expected, outputs = exact.generate(prompts, greedy), llm.generate(prompts, greedy)
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
    cached = [output.metrics.num_cached_tokens for output in outputs]
    assert cached == [wanted.metrics.num_cached_tokens for wanted in expected]
    assert sum(count >= 48 for count in cached) >= len(prompts) - 2
    assert with_prompts(ahead.batches)


def test_preemptions_come_between_prompts_that_run_ahead(make: Maker) -> None:
    options: dict[str, Any] = {"max_num_batched_tokens": 24, "num_kv_blocks": 22, "max_num_seqs": 4}
    params = seeded(len(PROMPTS), max_tokens=40)
    roomy = make.one("none").generate(PROMPTS, params)
    llm, ahead = make.padded("none", **options)
    outputs = llm.generate(PROMPTS, params)
    for output, wanted in zip(outputs, roomy, strict=True):
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert with_prompts(ahead.batches)
    check_empty(llm)


def test_a_step_in_which_no_room_for_drafts_is_left_is_no_failure(
    tiny_target: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The step is planned with drafts beside a prompt before the last drafts are accepted."""
    use_padded_steps(monkeypatch)
    llm = LLM(
        tiny_target,
        speculative_config={"model": tiny_target, "num_speculative_tokens": 3},
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_seqs=2,
        max_num_batched_tokens=16,
        num_kv_blocks=64,
        block_size=8,
        max_model_len=128,
    )
    engine, texts = llm.engine, dict[str, int]()
    for name, prompt, most in (("a", [5, 6, 7], 9), ("b", [*range(1, 91)], 4)):
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        bad_words = ((9,),) if name == "b" else ()
        engine.add(name, EncodedPrompt(None, prompt, bad_words), params)
    while engine.has_unfinished:
        for sample in engine.step():
            if sample.finished:
                assert sample.error is None
                texts[sample.request_id] = len(sample.output().outputs[0].token_ids)
    assert texts == {"a": 9, "b": 4}
    assert not caplog.records  # steps that fail are logged, and tried again
