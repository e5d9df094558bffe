"""Parallel drafting with a language model: K draft tokens from one pass over mask tokens.

What is expected comes from the format: committed tokens, then K-1 mask tokens, at consecutive
positions under the ordinary causal mask; the last K rows give the draft.
"""

import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, CheckpointError, SamplingParams, UsageError
from slipstream.engine.scheduler import Scheduler
from tests.checkpoints import write_qwen3
from tests.drafter_recording import ProposedDraft, Recording, record
from tests.padded_steps import use_padded_steps
from tests.qwen3_oracle import Qwen3Oracle

MASK = 90
PROMPT = [5, 9, 14, 33, 5, 9]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def forced(count: int) -> dict[str, Any]:
    """Drafts are accepted to all lengths, by lot: each with about the same chance."""
    rates = [1 - (place + 1) / (count + 1) for place in range(count)]
    return {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}


@pytest.fixture(scope="module")
def pard(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PARD checkpoint as published: an ordinary model with two keys more, its head stored."""
    changes: dict[str, Any] = {"spd_type": "pard", "pard_token": MASK, "tie_word_embeddings": False}
    return str(write_qwen3(tmp_path_factory.mktemp("pard"), keep_layers=1, **changes))


def make(target: str, speculative: dict[str, Any] | None, **options: Any) -> LLM:
    options = {"num_kv_blocks": 64, "skip_tokenizer_init": True, "block_size": 8, **options}
    return LLM(target, speculative_config=speculative, **options)


def generate(llm: LLM, *prompts: list[int], params: SamplingParams = GREEDY) -> list[Any]:
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)


def expected(oracle: Qwen3Oracle, draft: ProposedDraft, mask: int = MASK) -> Any:
    """[K, V], the last rows of one text: what is known, then masks."""
    count = len(draft.tokens)
    return oracle.logits([*draft.known, *[mask] * (count - 1)])[-count:]


def check(recording: Recording, oracle: Qwen3Oracle, mask: int = MASK) -> None:
    for draft in recording.drafts:
        logits = expected(oracle, draft, mask)
        assert (draft.logits.double() - logits).abs().max() < 1e-4
        assert draft.tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("steps", ["exact", "padded"])
@pytest.mark.parametrize("count", [1, 4, 15])
def test_every_draft_is_the_oracles(
    steps: str, count: int, tiny_target: str, pard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 32 rounds and more whose drafts are accepted to all lengths, forced by lot."""
    if steps == "padded":
        use_padded_steps(monkeypatch)
    recording = record(monkeypatch)
    llm = make(tiny_target, {"model": pard, "num_speculative_tokens": count, **forced(count)})
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    outputs = generate(llm, PROMPT, [*range(1, 30)], [8, 8], params=params)
    assert len(recording.drafts) >= 32
    accepted = [
        sum(out.metrics.num_accepted_tokens_per_pos[place] for out in outputs)
        for place in range(count)
    ]
    assert accepted[-1] > 0  # a round may have as much to read as can be
    assert count == 1 or accepted[0] > accepted[-1]
    check(recording, Qwen3Oracle(pard))


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


def test_chunks_preemption_and_prefix_hits_leave_the_drafts_as_they_are(
    tiny_target: str, pard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = record(monkeypatch)
    config = {"model": pard, "num_speculative_tokens": 5}
    llm = make(tiny_target, config, num_kv_blocks=18, max_num_batched_tokens=24, max_num_seqs=4)
    prompts = [[*range(1, 41)], [*range(50, 70)], PROMPT, [*range(1, 33), 7, 8, 9]]
    outputs = [*generate(llm, *prompts), *generate(llm, prompts[0])]
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert outputs[-1].metrics.num_cached_tokens > 0
    check(recording, Qwen3Oracle(pard))


@pytest.mark.parametrize("rounds", [3, 4, 5, 6, 20])
@pytest.mark.parametrize("steps", ["exact", "padded"])
def test_drafting_can_rest_and_go_on(
    steps: str, rounds: int, tiny_target: str, pard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was committed meanwhile is as much as a round can read, or more."""
    if steps == "padded":
        use_padded_steps(monkeypatch)
    recording, asked = record(monkeypatch), iter(range(1000))
    most_drafts = Scheduler._most_drafts

    def resting(self: Scheduler, *args: Any, **named: Any) -> int:
        return 0 if 6 <= next(asked) < 6 + rounds else most_drafts(self, *args, **named)

    monkeypatch.setattr(Scheduler, "_most_drafts", resting)
    llm = make(tiny_target, {"model": pard, "num_speculative_tokens": 3})
    generate(llm, PROMPT)
    known = [len(draft.known) for draft in recording.drafts]
    assert max(after - before for before, after in pairwise(known)) > rounds
    check(recording, Qwen3Oracle(pard))


def test_acceptance_after_a_prefix_hit_equals_acceptance_without(
    tiny_target: str, pard: str
) -> None:
    llm = make(tiny_target, {"model": pard, "num_speculative_tokens": 4}, block_size=16)
    cold, warm = (generate(llm, [*range(1, 50), *PROMPT])[0].metrics for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 48)
    assert warm.num_drafts == cold.num_drafts
    assert warm.num_accepted_tokens_per_pos == cold.num_accepted_tokens_per_pos


@pytest.mark.parametrize("steps", ["exact", "padded"])
@pytest.mark.parametrize("length", [40, 41, 48])
def test_masks_stay_within_max_model_len(
    length: int, steps: str, tiny_target: str, pard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = generate(make(tiny_target, None, max_model_len=length), PROMPT)[0]
    if steps == "padded":
        use_padded_steps(monkeypatch)
    recording = record(monkeypatch)
    config = {"model": pard, "num_speculative_tokens": 15}
    output = generate(make(tiny_target, config, max_model_len=length), PROMPT)[0]
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert max(len(draft.known) + len(draft.tokens) for draft in recording.drafts) == length - 1
    check(recording, Qwen3Oracle(pard))


def test_beyond_the_drafters_max_model_len_nothing_is_drafted(tiny_target: str, pard: str) -> None:
    llm = make(tiny_target, {"model": pard, "max_model_len": 20})
    output = generate(llm, PROMPT)[0]
    assert (
        output.outputs[0].token_ids
        == generate(make(tiny_target, None), PROMPT)[0].outputs[0].token_ids
    )
    assert output.metrics.num_draft_tokens > 0
    assert generate(llm, [*range(1, 30)])[0].metrics.num_drafts == 0


def test_more_requests_times_k_than_rows_of_the_target(tiny_target: str, pard: str) -> None:
    """The drafter's pass has 2K rows a request, the target's budget is a tenth of that."""
    llm = make(
        tiny_target,
        {"model": pard, "num_speculative_tokens": 15},
        max_num_batched_tokens=24,
        max_num_seqs=8,
        num_kv_blocks=200,
    )
    plain = make(tiny_target, None)
    prompts = [[index, *PROMPT] for index in range(1, 9)]
    for ours, theirs in zip(generate(llm, *prompts), generate(plain, *prompts), strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids


# Where the method and its mask token come from


def test_the_mask_token_may_be_given(
    tiny_target: str, pard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for token in (MASK, 77):
        recording = record(monkeypatch)
        llm = make(tiny_target, {"model": pard, "pard_token": token, "num_speculative_tokens": 4})
        generate(llm, PROMPT)
        check(recording, Qwen3Oracle(pard), token)
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
    tiny_target: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_qwen3(tmp_path / "draft", keep_layers=1, pard_token=MASK, para_num=4)
    with caplog.at_level(logging.WARNING, "slipstream"):
        make(tiny_target, {"model": str(folder), "num_speculative_tokens": 4})
        assert not caplog.messages
        llm = make(tiny_target, {"model": str(folder), "num_speculative_tokens": 6})
    assert "was trained for 4 tokens at once and is asked for 6" in caplog.text
    assert len(generate(llm, PROMPT)[0].metrics.num_accepted_tokens_per_pos) == 6


BAD: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({}, {}, UsageError, "has no pard_token; give it as pard_token, or leave out"),
    ({"pard_token": 96}, {}, CheckpointError, "mask token 96 is none of the 96 ids"),
    ({"pard_token": "x"}, {}, CheckpointError, '"pard_token" must be a whole number'),
    ({}, {"pard_token": -1}, CheckpointError, "mask token -1 is none"),
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
