"""Parallel drafting with a language model: K draft tokens from one pass over mask tokens."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, CheckpointError, SamplingParams, UsageError
from tests.checkpoints import write_qwen3
from tests.draft_traffic import learn_costs_while_running
from tests.drafter_recording import record
from tests.drafters.engines import forced
from tests.drafters.recording import assert_drafts_are, record_drafts
from tests.padded_steps import use_padded_steps
from tests.pard_checkpoints import MASK, Pard, write_pard

PROMPT = [5, 9, 14, 33, 5, 9]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def pard(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pard(tmp_path_factory.mktemp("pard"))


def make(target: str, speculative: dict[str, Any] | None, **options: Any) -> LLM:
    options = {"num_kv_blocks": 64, "skip_tokenizer_init": True, "block_size": 8, **options}
    return LLM(target, speculative_config=speculative, **options)


def generate(llm: LLM, *prompts: list[int], params: SamplingParams = GREEDY) -> list[Any]:
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)


@pytest.mark.parametrize("steps", ["exact", "padded"])
@pytest.mark.parametrize("count", [1, 4, 15])
def test_every_draft_is_the_oracles(
    steps: str, count: int, tiny_target: str, pard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 32 rounds and more whose drafts are accepted to all lengths, forced by lot."""
    if steps == "padded":
        use_padded_steps(monkeypatch)
    drafted = record_drafts(monkeypatch)
    llm = make(tiny_target, {"model": pard, **forced(count)})
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    outputs = generate(llm, PROMPT, [*range(1, 30)], [8, 8], params=params)
    assert len(drafted) >= 32
    accepted = [
        sum(out.metrics.num_accepted_tokens_per_pos[place] for out in outputs)
        for place in range(count)
    ]
    assert accepted[-1] > 0  # a round may have as much to read as can be
    assert count == 1 or accepted[0] > accepted[-1]
    assert_drafts_are(drafted, Pard(pard))


@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_round_is_one_pass_whatever_k(
    count: int, tiny_target: str, pard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = record(monkeypatch)
    generate(make(tiny_target, {"model": pard, "num_speculative_tokens": count}), PROMPT)
    assert recording.num_passes == recording.num_rounds > 0


def test_a_chain_of_the_same_drafter_is_k_passes(
    tiny_target: str, pard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = record(monkeypatch)
    config = {"model": pard, "num_speculative_tokens": 3, "parallel_drafting": False}
    llm = make(tiny_target, config)
    generate(llm, PROMPT, params=SamplingParams(temperature=0, max_tokens=13, ignore_eos=True))
    assert llm.engine.resolved.method == "draft_model"
    assert recording.num_passes > recording.num_rounds


# Where the method and its mask token come from


def test_the_mask_token_may_be_given(
    tiny_target: str, pard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for token in (MASK, 77):
        drafted = record_drafts(monkeypatch)
        llm = make(tiny_target, {"model": pard, "pard_token": token, "num_speculative_tokens": 4})
        generate(llm, PROMPT)
        assert_drafts_are(drafted, Pard(pard, token))
        monkeypatch.undo()


@pytest.mark.parametrize(
    "config",
    [
        {"method": "pard", "pard_token": MASK},
        {"method": "draft_model", "parallel_drafting": True, "pard_token": MASK},
        {"parallel_drafting": True, "pard_token": MASK},
        {"pard_token": MASK},
    ],
    ids=str,
)
def test_any_model_drafts_in_parallel_when_asked(
    config: dict[str, Any], tiny_target: str, tiny_draft: str
) -> None:
    llm = make(tiny_target, {"model": tiny_draft, **config})
    assert llm.engine.resolved.method == "pard"
    assert generate(llm, PROMPT)[0].metrics.num_accepted_tokens > 0


@pytest.mark.parametrize("key", ["pard_token", "mask_token_id", "ptd_token_id"])
def test_the_mask_token_is_found_in_the_checkpoint(
    key: str, tiny_target: str, tmp_path: Path
) -> None:
    folder = write_qwen3(tmp_path / "draft", keep_layers=1, **{key: MASK})
    llm = make(tiny_target, {"model": str(folder), "parallel_drafting": True})
    assert generate(llm, PROMPT)[0].metrics.num_drafts > 0


def test_more_tokens_than_it_was_trained_for_are_drafted_with_a_note(
    tiny_target: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write_qwen3(tmp_path / "draft", keep_layers=1, pard_token=MASK, para_num=4)
    with caplog.at_level(logging.WARNING, "slipstream"):
        make(tiny_target, {"model": str(folder), "num_speculative_tokens": 4})
        assert not caplog.messages
        llm = make(tiny_target, {"model": str(folder), "num_speculative_tokens": 6})
    assert "was trained for 4 tokens at once and is asked for 6" in caplog.text
    caplog.clear()
    learn_costs_while_running(monkeypatch)
    auto = make(tiny_target, {"model": str(folder), "num_speculative_tokens": "auto"})
    assert auto.engine.resolved.drafts == "auto (up to 4)"
    assert not caplog.messages
    assert len(generate(llm, PROMPT)[0].metrics.num_accepted_tokens_per_pos) == 6


BAD: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({}, {}, UsageError, "has no pard_token; give it as pard_token, or leave out"),
    ({"pard_token": 96}, {}, CheckpointError, "mask token 96 is not in its vocabulary of 96 ids"),
    ({"pard_token": "x"}, {}, CheckpointError, '"pard_token" must be a whole number'),
    ({}, {"pard_token": -1}, CheckpointError, "mask token -1 is not in its vocabulary"),
    ({}, {"pard_token": "x"}, UsageError, "pard_token must be an integer"),
    ({}, {"method": "pard", "parallel_drafting": False}, UsageError, "use method draft_model"),
]


@pytest.mark.parametrize(("content", "asked", "error", "message"), BAD, ids=str)
def test_bad_input_is_named(
    content: dict[str, Any],
    asked: dict[str, Any],
    error: type[Exception],
    message: str,
    tiny_target: str,
    tmp_path: Path,
) -> None:
    folder = write_qwen3(tmp_path / "draft", keep_layers=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **content}))
    with pytest.raises(error, match=message):
        make(tiny_target, {"method": "pard", "model": str(folder), **asked})
