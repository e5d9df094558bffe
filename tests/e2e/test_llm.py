"""The offline front: streams side by side, requests that end early, and wrong arguments."""

import gc
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import LLM, SamplingParams, UsageError
from slipstream.engine.prompts import EncodedPrompt

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
FIRST = {"prompt_token_ids": [5, 9, 14]}
SECOND = {"prompt_token_ids": [7, 3]}


@pytest.fixture
def llm(tiny_target: str, tiny_draft: str) -> LLM:
    config = {"model": tiny_draft, "num_speculative_tokens": 3}
    return LLM(tiny_target, speculative_config=config, skip_tokenizer_init=True, num_kv_blocks=64)


def tokens(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def test_a_call_inside_a_stream_loses_nothing(llm: LLM) -> None:
    expected = [tokens(output) for output in llm.generate([FIRST, SECOND], GREEDY)]
    inner = None
    for number, output in enumerate(llm.stream(FIRST, GREEDY)):
        if number == 0:
            inner = llm.generate(SECOND, GREEDY)[0]
        last = output
    assert last.finished
    assert inner is not None
    assert [tokens(last), tokens(inner)] == expected


def test_streams_may_be_interleaved(llm: LLM) -> None:
    expected = [tokens(output) for output in llm.generate([FIRST, SECOND], GREEDY)]
    streams = [llm.stream(FIRST, GREEDY), llm.stream(SECOND, GREEDY)]
    last: list[Any] = [None, None]
    open_streams = {0, 1}
    while open_streams:
        for index in sorted(open_streams):
            try:
                last[index] = next(streams[index])
            except StopIteration:
                open_streams.discard(index)
    assert [tokens(output) for output in last] == expected
    assert all(output.finished for output in last)


def test_engines_of_one_process_may_take_turns(llm: LLM, tiny_target: str) -> None:
    other = LLM(tiny_target, skip_tokenizer_init=True, num_kv_blocks=64)
    expected = [tokens(it.generate(FIRST, GREEDY)[0]) for it in (llm, other)]
    assert expected[0] == expected[1]
    streams = [llm.stream(FIRST, GREEDY), other.stream(FIRST, GREEDY)]
    last: list[Any] = [None, None]
    for outputs in zip_longest(*streams):
        last = [new or old for new, old in zip(outputs, last, strict=True)]
    assert [tokens(output) for output in last] == expected


def test_a_stream_that_nobody_reads_queues_nothing(llm: LLM) -> None:
    stream = llm.stream(FIRST, GREEDY)
    assert not llm.engine.has_unfinished
    del stream
    gc.collect()
    assert not llm.engine.has_unfinished


def test_an_aborted_request_yields_what_there_is_of_it(llm: LLM) -> None:
    seen = []
    for output in llm.stream(FIRST, GREEDY):
        seen.append(output)
        if len(seen) == 2:
            llm.abort(output.request_id)
    assert seen[-1].outputs[0].finish_reason == "abort"
    assert tokens(seen[-1]) == tokens(seen[-2])
    assert not llm.engine.has_unfinished


def test_snapshots_stay_as_they_were(llm: LLM) -> None:
    snapshots = list(llm.stream(FIRST, GREEDY))
    steps = [snapshot.metrics.num_steps for snapshot in snapshots]
    assert steps == list(range(1, len(snapshots) + 1))


def test_an_id_in_use_is_refused_and_its_request_goes_on(llm: LLM) -> None:
    engine, prompt = llm.engine, EncodedPrompt(None, [5, 9], ())
    engine.add("same", prompt, GREEDY)
    engine.step()
    with pytest.raises(UsageError, match="'same' is in use"):
        engine.add("same", prompt, GREEDY)
    finished = []
    while engine.has_unfinished:
        finished += [s.request_id for s in engine.step() if s.finished]
    assert finished == ["same"]
    assert engine.step() == []


def test_a_bar_shows_how_many_prompts_have_ended(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = [tokens(output) for output in llm.generate([FIRST, SECOND], GREEDY)]
    assert capsys.readouterr().err == ""
    outputs = llm.generate([FIRST, SECOND], GREEDY, use_tqdm=True)
    assert [tokens(output) for output in outputs] == expected
    shown = capsys.readouterr()
    assert "prompts" in shown.err
    assert "100%" in shown.err
    assert shown.out == ""


def test_token_ids_may_be_of_any_integer_kind(llm: LLM) -> None:
    expected = tokens(llm.generate(FIRST, GREEDY)[0])
    for ids in (np.array([5, 9, 14]), torch.tensor([5, 9, 14]), (np.int64(5), 9, 14)):
        assert tokens(llm.generate({"prompt_token_ids": ids}, GREEDY)[0]) == expected


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (None, None, "give a prompt"),
        (5, None, "give a prompt"),
        ({"prompt_token_ids": 5}, None, "must be a list of token ids"),
        ({"prompt_token_ids": ["a"]}, None, "must hold integers"),
        ({"prompt_token_ids": [96]}, None, "token ids go from 0 to 95"),
        ({"prompt_token_ids": []}, None, "the prompt is empty"),
        ({"text": "x"}, None, "a prompt is a string"),
        ("text", None, "no tokenizer"),
        ({**FIRST, "priority": 1}, None, "priority needs scheduling_policy priority"),
        ({**FIRST, "cache_salt": 5}, None, "cache_salt of a prompt must be of type str"),
        (FIRST, {"temperature": 0}, "must be SamplingParams"),
        (FIRST, [None], "must be SamplingParams"),
        ([FIRST, SECOND], [GREEDY], "1 sampling_params were given for 2 prompts"),
        (FIRST, SamplingParams(stop_token_ids=[96]), "stop_token_ids holds 96"),
        (FIRST, SamplingParams(logit_bias={96: 1.0}), "logit_bias holds 96"),
        (FIRST, SamplingParams(stop="x"), "need a tokenizer"),
        (FIRST, SamplingParams(min_tokens=2, allowed_token_ids=[0]), "leave no token"),
        ({"prompt_token_ids": [1] * 256}, None, "room for 255 prompt tokens"),
    ],
)
def test_wrong_requests_are_refused_and_cost_nothing(
    llm: LLM, prompts: Any, params: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        llm.generate(prompts, params)
    assert not llm.engine.has_unfinished
    assert tokens(llm.generate(FIRST, GREEDY)[0])


def test_one_wrong_prompt_refuses_the_whole_call(llm: LLM) -> None:
    with pytest.raises(UsageError, match="room for 255"):
        llm.generate([FIRST, {"prompt_token_ids": [1] * 300}], GREEDY)
    assert not llm.engine.has_unfinished
