"""What speculation promises besides equal text: counts, seeds, logprobs, limits."""

from math import ceil
from typing import Any

import pytest

from slipstream import LLM, RequestOutput, SamplingParams, UsageError
from slipstream.speculative.catalogue import METHODS
from tests import fake_drafters
from tests.fake_drafters import ANSWERS

PROMPT = [5, 9, 14, 33, 5, 9]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def make(target: str, speculative: dict[str, Any] | None = None, **options: Any) -> LLM:
    options = {"num_kv_blocks": 64, "skip_tokenizer_init": True, **options}
    return LLM(target, speculative_config=speculative, **options)


def run(llm: LLM, params: SamplingParams, prompt: list[int] | None = None) -> RequestOutput:
    return llm.generate({"prompt_token_ids": prompt or PROMPT}, params)[0]


def drafts(model: str, count: int = 4) -> dict[str, Any]:
    return {"model": model, "num_speculative_tokens": count}


@pytest.mark.parametrize("number", [1, 7, 8, 30])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_a_perfect_drafter_takes_no_step_too_many(
    number: int, count: int, tiny_target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "fake", fake_drafters.METHOD)
    params = SamplingParams(temperature=0, max_tokens=number, ignore_eos=True)
    answer = list(run(make(tiny_target), params).outputs[0].token_ids)
    ANSWERS[tuple(PROMPT)] = PROMPT + answer
    llm = make(tiny_target, {"method": "fake", **drafts("perfect", count)})
    output = run(llm, params)
    assert list(output.outputs[0].token_ids) == answer
    assert llm.metrics.num_steps == ceil(number / (count + 1))
    assert output.outputs[0].from_draft.count(True) == output.metrics.num_accepted_tokens


def test_a_wrong_drafter_changes_nothing_and_gains_nothing(
    tiny_target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "fake", fake_drafters.METHOD)
    answer = list(run(make(tiny_target), GREEDY).outputs[0].token_ids)
    ANSWERS[tuple(PROMPT)] = PROMPT + answer
    llm = make(tiny_target, {"method": "fake", **drafts("wrong")})
    output = run(llm, GREEDY)
    assert list(output.outputs[0].token_ids) == answer
    assert output.metrics.num_accepted_tokens == 0
    assert llm.metrics.num_steps == 30


def test_the_target_as_its_own_draft_is_always_accepted(tiny_target: str) -> None:
    output = run(make(tiny_target, drafts(tiny_target)), GREEDY)
    assert output.metrics.num_accepted_tokens == output.metrics.num_draft_tokens


def test_the_target_as_its_own_draft_is_accepted_when_sampled(tiny_target: str) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, seed=5)
    output = run(make(tiny_target, drafts(tiny_target)), params)
    assert output.metrics.num_accepted_tokens == output.metrics.num_draft_tokens


def test_blocks_without_the_drafters_part_are_not_taken_for_a_drafting_request(
    tiny_target: str, tiny_draft: str
) -> None:
    prompt = [*range(1, 50), *PROMPT]
    llm = make(tiny_target, drafts(tiny_draft))
    alone = SamplingParams(temperature=0, max_tokens=4, num_speculative_tokens=0)
    assert run(llm, alone, prompt).metrics.num_drafts == 0
    drafted = run(llm, GREEDY, prompt)
    assert drafted.metrics.num_cached_tokens == 0
    assert run(llm, alone, prompt).metrics.num_cached_tokens == 48
    fresh = run(make(tiny_target, drafts(tiny_draft)), GREEDY, prompt)
    assert drafted.metrics.num_accepted_tokens == fresh.metrics.num_accepted_tokens


def test_a_request_may_not_ask_for_more_draft_tokens(tiny_target: str, tiny_draft: str) -> None:
    llm = make(tiny_target, drafts(tiny_draft))
    with pytest.raises(UsageError, match="at most 4"):
        run(llm, SamplingParams(num_speculative_tokens=5))
    assert not llm.engine.has_unfinished


def test_a_seed_gives_the_same_text_whatever_else_runs(tiny_target: str, tiny_draft: str) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, seed=11)
    alone = run(make(tiny_target, drafts(tiny_draft)), params)
    llm = make(tiny_target, drafts(tiny_draft), max_num_batched_tokens=64)
    crowd: list[Any] = [{"prompt_token_ids": ids} for ids in ([7] * 40, PROMPT, [8, 9])]
    outputs = llm.generate(crowd, [SamplingParams(max_tokens=20), params, GREEDY])
    assert outputs[1].outputs[0].token_ids == alone.outputs[0].token_ids


def test_samples_of_one_request_differ_and_keep_their_seeds(
    tiny_target: str, tiny_draft: str
) -> None:
    params = SamplingParams(n=3, temperature=1.0, max_tokens=20, ignore_eos=True, seed=3)
    llm = make(tiny_target, drafts(tiny_draft))
    first, again = run(llm, params), run(llm, params)
    texts = [tuple(sample.token_ids) for sample in first.outputs]
    assert len(set(texts)) == 3
    assert texts == [tuple(sample.token_ids) for sample in again.outputs]


def test_logprobs_are_the_plain_ones_at_every_token(tiny_target: str, tiny_draft: str) -> None:
    params = SamplingParams(
        temperature=0,
        max_tokens=30,
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=2,
        presence_penalty=0.5,
    )
    plain = run(make(tiny_target), params)
    drafted = run(make(tiny_target, drafts(tiny_draft), max_num_batched_tokens=64), params)
    assert drafted.metrics.num_accepted_tokens > 0
    for ours, theirs in (
        (drafted.outputs[0].logprobs, plain.outputs[0].logprobs),
        (drafted.prompt_logprobs, plain.prompt_logprobs),
    ):
        assert ours is not None
        assert theirs is not None
        assert len(ours) == len(theirs)
        for row, expected in zip(ours, theirs, strict=True):
            assert (row is None) == (expected is None)
            if row is None or expected is None:
                continue
            assert row.keys() == expected.keys()
            for token, candidate in row.items():
                assert candidate.logprob == pytest.approx(expected[token].logprob, abs=1e-4)
                assert candidate.rank == expected[token].rank
    assert drafted.outputs[0].cumulative_logprob == pytest.approx(
        plain.outputs[0].cumulative_logprob, abs=1e-3
    )


def test_prompt_logprobs_survive_chunks_hits_and_preemption(
    tiny_target: str, tiny_draft: str
) -> None:
    prompt = [*range(1, 60), *PROMPT]
    params = SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=0, ignore_eos=True)
    expected = run(make(tiny_target), params, prompt).prompt_logprobs
    llm = make(tiny_target, drafts(tiny_draft), max_num_batched_tokens=64, num_kv_blocks=9)
    run(llm, GREEDY, prompt)  # the blocks of this prompt are in the prefix cache now
    crowd: list[Any] = [{"prompt_token_ids": ids} for ids in ([7] * 40, prompt)]
    outputs = llm.generate(crowd, [GREEDY, params])
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert outputs[1].metrics.num_cached_tokens == 0
    ours = outputs[1].prompt_logprobs
    assert ours is not None
    assert expected is not None
    assert len(ours) == len(prompt)
    for token, row, wanted in zip(prompt[1:], ours[1:], expected[1:], strict=True):
        assert row is not None
        assert wanted is not None
        assert row[token].logprob == pytest.approx(wanted[token].logprob, abs=1e-4)


def test_a_stop_token_inside_an_accepted_block_cuts_it(tiny_target: str) -> None:
    text = list(run(make(tiny_target), GREEDY).outputs[0].token_ids)
    stop = text[9]
    params = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[stop], ignore_eos=True)
    output = run(make(tiny_target, drafts(tiny_target, 7)), params)
    end = text.index(stop)
    assert list(output.outputs[0].token_ids) == text[: end + 1]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop


def test_min_tokens_holds_a_stop_token_back(tiny_target: str, tiny_draft: str) -> None:
    text = list(run(make(tiny_target), GREEDY).outputs[0].token_ids)
    params = SamplingParams(
        temperature=0, max_tokens=30, stop_token_ids=[text[3]], min_tokens=12, ignore_eos=True
    )
    plain = run(make(tiny_target), params)
    drafted = run(make(tiny_target, drafts(tiny_draft)), params)
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert text[3] not in drafted.outputs[0].token_ids[:12]
    assert len(drafted.outputs[0].token_ids) >= 12
