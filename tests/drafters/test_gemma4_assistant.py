"""Assistants that read the target's cache, against an oracle in plain torch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, RequestOutput, SamplingParams
from slipstream.engine.scheduler import Scheduler
from slipstream.runner.turn import Turn
from slipstream.sampling import verification
from slipstream.speculative import gemma4_assistant
from slipstream.speculative.drafter import Draft
from tests.drafters.assistants import (
    FULL,
    SLIDING,
    Assistant,
    MixedTarget,
    write_assistant,
    write_sliding_target,
)
from tests.drafters.recording import Drafted, assert_drafts_are
from tests.padded_steps import use_padded_steps

PROMPT = torch.randint(1, 96, (37,), generator=torch.Generator().manual_seed(3)).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, repetition_penalty=1.3)
SEEDED = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, seed=5)
K = 4
# Acceptance by the roll of a die, so that drafts of every length are accepted.
FORCED = {
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.8, 0.7, 0.6, 0.5],
}


def record(monkeypatch: pytest.MonkeyPatch) -> list[Drafted]:
    """Filled by every greedy draft from here on; no draft may change the target's cache."""
    drafted: list[Drafted] = []
    rows: list[torch.Tensor] = []
    drafter = gemma4_assistant.AssistantDrafter
    propose = drafter.propose

    def recorded(self: gemma4_assistant.AssistantDrafter, turn: Turn) -> Draft:
        rows.clear()
        before = [pages.clone() for layer in self._caches for pages in layer]
        draft = propose(self, turn)
        after = [pages for layer in self._caches for pages in layer]
        for ours, theirs in zip(after, before, strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        for index, slot in enumerate(turn.slots.tolist()):
            count = int(draft.num_tokens[index])
            if count:
                known = self._state.token_ids[slot, : int(self._state.num_tokens[slot])].tolist()
                tokens = draft.token_ids[index, :count].tolist()
                logits = [row[index].clone() for row in rows[:count]]
                drafted.append(Drafted(known, tokens, logits))
        return draft

    def sample_draft(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows.append(logits)
        return verification.sample_draft(logits, *args, **kwargs)

    monkeypatch.setattr(drafter, "propose", recorded)
    monkeypatch.setattr(gemma4_assistant, "sample_draft", sample_draft)
    return drafted


def make(target: str, folder: Path, **options: Any) -> LLM:
    speculative = {"model": str(folder), "num_speculative_tokens": K}
    speculative |= options.pop("speculative", {})
    options = {"num_kv_blocks": 64, "skip_tokenizer_init": True, **options}
    return LLM(target, speculative_config=speculative, **options)


def run(llm: LLM, params: SamplingParams, prompt: list[int] | None = None) -> RequestOutput:
    return llm.generate({"prompt_token_ids": prompt or PROMPT}, params)[0]


def oracle(folder: Path, target: str, **flags: Any) -> Assistant:
    return Assistant(folder, MixedTarget(target), **flags)


def check(target: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """32 steps and more, whatever was accepted."""
    drafted = record(monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)
    output = run(make(target, folder, speculative=FORCED, **options), params)
    assert len(drafted) >= 32
    assert all(count > 0 for count in output.metrics.num_accepted_tokens_per_pos)
    assert output.metrics.num_accepted_tokens < output.metrics.num_draft_tokens
    assert_drafts_are(drafted[:34], oracle(folder, target))


MIXED = {"kinds": (SLIDING, FULL, SLIDING, FULL)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one_layer": {"kinds": (FULL,)},
    "listed": {"listed": True},
    "softcap": {"text": {"final_logit_softcapping": 1.5}},
    "suppressed": {"suppressed": (3, 44)},
    "centroids": {"centroids": (16, 4)},
    "capped_centroids": {
        "centroids": (8, 3),
        "suppressed": (7,),
        "text": {"final_logit_softcapping": 2.0},
    },
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_are_the_oracles(
    name: str, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_assistant(tmp_path, tiny_target, **LAYOUTS[name])
    check(tiny_target, folder, monkeypatch)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kinds", [(SLIDING, FULL, SLIDING, FULL), (SLIDING,)])
def test_layers_read_the_last_layer_like_them(
    kinds: tuple[str, ...], padded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_sliding_target(tmp_path / "target")
    last = () if kinds[-1] == FULL else (FULL,)  # as every published one ends
    folder = write_assistant(tmp_path / "draft", target, kinds=(*kinds, *last))
    if padded:
        use_padded_steps(monkeypatch)
    check(target, folder, monkeypatch, max_num_seqs=1)


FLAGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "layer_types": (MIXED, {"layer_types": [FULL] * 4}),
    "sliding_window": (MIXED, {"sliding_window": 9}),
    "final_logit_softcapping": ({}, {"final_logit_softcapping": 1.0}),
    "backbone_hidden_size": ({}, {"backbone_hidden_size": 1}),
    "use_ordered_embeddings": ({"centroids": (16, 4)}, {"use_ordered_embeddings": False}),
    "centroid_intermediate_top_k": ({"centroids": (16, 4)}, {"centroid_intermediate_top_k": 1}),
    "rope_parameters": ({}, {"rope_parameters": {FULL: {"rope_theta": 5.0}}}),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_changes_the_drafts(flag: str, tmp_path: Path) -> None:
    options, other = FLAGS[flag]
    target = write_sliding_target(tmp_path / "target")
    folder = write_assistant(tmp_path / "draft", target, **options)
    ours, theirs = (oracle(folder, target, **flags) for flags in ({}, other))
    gap = ours.drafts(PROMPT, 2)[1][1] - theirs.drafts(PROMPT, 2)[1][1]
    assert gap.nan_to_num(0.0).abs().max() > 1e-2


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 7}, {"block_size": 8}])
@pytest.mark.parametrize("padded", [False, True])
def test_chunks_and_padded_steps_draft_the_same(
    options: dict[str, Any],
    padded: bool,
    tiny_target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write_assistant(tmp_path, tiny_target, centroids=(16, 4))
    if padded:
        use_padded_steps(monkeypatch)
    check(tiny_target, folder, monkeypatch, max_num_seqs=1, **options)


@pytest.mark.parametrize("length", [33, 34, 40])
@pytest.mark.parametrize("rows", [24, 512])
def test_acceptance_after_a_prefix_hit_equals_acceptance_without(
    length: int, rows: int, tiny_target: str, tmp_path: Path
) -> None:
    """With block_size 8 a prompt of 33 leaves one token to compute, one of 34 two."""
    folder = write_assistant(tmp_path, tiny_target)
    prompt = [*PROMPT, *PROMPT][:length]
    llm = make(tiny_target, folder, block_size=8, max_num_seqs=2, max_num_batched_tokens=rows)
    cold, warm = run(llm, SEEDED, prompt), run(llm, SEEDED, prompt)
    assert cold.metrics.num_cached_tokens == 0
    assert warm.metrics.num_cached_tokens == (length - 1) // 8 * 8
    assert warm.metrics.num_accepted_tokens_per_pos == cold.metrics.num_accepted_tokens_per_pos
    assert warm.metrics.num_drafts == cold.metrics.num_drafts
    assert cold.metrics.num_accepted_tokens > 0


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("pause", [1, 5, 14])
def test_drafting_goes_on_rightly_after_a_pause(
    pause: int,
    padded: bool,
    tiny_target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """K = 0 for some steps."""
    folder = write_assistant(tmp_path, tiny_target)
    plain = LLM(tiny_target, skip_tokenizer_init=True, num_kv_blocks=64)
    expected = run(plain, GREEDY).outputs[0].token_ids
    if padded:
        use_padded_steps(monkeypatch)
    llm = make(tiny_target, folder)
    drafted = record(monkeypatch)
    most_drafts, calls = Scheduler._most_drafts, []

    def paused(self: Scheduler, *args: Any, **kwargs: Any) -> int:
        calls.append(None)
        count = most_drafts(self, *args, **kwargs)
        return 0 if 3 <= len(calls) < 3 + pause else count

    monkeypatch.setattr(Scheduler, "_most_drafts", paused)
    output = run(llm, GREEDY)
    assert output.outputs[0].token_ids == expected
    assert len(calls) > 3 + pause
    assert len(drafted) >= 2
    assert_drafts_are(drafted, oracle(folder, tiny_target))


def test_preempted_requests_draft_what_the_oracle_drafts(
    tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_assistant(tmp_path, tiny_target)
    prompts = [{"prompt_token_ids": [*PROMPT[index:], 5, index]} for index in range(4)]
    llm = make(tiny_target, folder, num_kv_blocks=18, block_size=8, max_num_seqs=4)
    drafted = record(monkeypatch)
    outputs = llm.generate(prompts, GREEDY)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert_drafts_are(drafted, oracle(folder, tiny_target))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [40, 41, 48])
def test_nothing_goes_beyond_max_model_len(
    length: int, padded: bool, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_assistant(tmp_path, tiny_target)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    llm = LLM(tiny_target, skip_tokenizer_init=True, num_kv_blocks=64, max_model_len=length)
    plain = run(llm, params, PROMPT[:9])
    if padded:
        use_padded_steps(monkeypatch)
    llm = make(tiny_target, folder, max_model_len=length, speculative={"num_speculative_tokens": 7})
    drafted = run(llm, params, PROMPT[:9])
    assert 9 + len(drafted.outputs[0].token_ids) == length
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids


def test_beyond_the_drafters_max_model_len_nothing_is_drafted(
    tiny_target: str, tmp_path: Path
) -> None:
    folder = write_assistant(tmp_path, tiny_target)
    llm = make(tiny_target, folder, speculative={"max_model_len": 20})
    plain = LLM(tiny_target, skip_tokenizer_init=True, num_kv_blocks=64)
    output = run(llm, GREEDY, PROMPT[:9])
    assert output.outputs[0].token_ids == run(plain, GREEDY, PROMPT[:9]).outputs[0].token_ids
    assert output.metrics.num_draft_tokens > 0
    assert run(llm, GREEDY).metrics.num_drafts == 0


@pytest.mark.parametrize("padded", [False, True])
def test_many_draft_tokens_for_many_requests(
    padded: bool, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [{"prompt_token_ids": PROMPT[index : 30 + index]} for index in range(8)]
    plain = LLM(tiny_target, skip_tokenizer_init=True, num_kv_blocks=64)
    expected = [output.outputs[0].token_ids for output in plain.generate(prompts, GREEDY)]
    if padded:
        use_padded_steps(monkeypatch)
    folder = write_assistant(tmp_path, tiny_target)
    options: dict[str, Any] = {"speculative": {"num_speculative_tokens": 15}, "block_size": 8}
    llm = make(tiny_target, folder, num_kv_blocks=90, max_num_seqs=8, **options)
    outputs = llm.generate(prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert all(output.metrics.num_drafts > 0 for output in outputs)


def test_a_request_may_ask_for_fewer_draft_tokens(tiny_target: str, tmp_path: Path) -> None:
    """And shares its blocks with all others: they hold nothing of the drafter's."""
    llm = make(tiny_target, write_assistant(tmp_path, tiny_target), block_size=8)
    for count in (0, 1, 3):
        params = SamplingParams(
            temperature=0, max_tokens=40, ignore_eos=True, num_speculative_tokens=count
        )
        output = run(llm, params)
        assert len(output.metrics.num_accepted_tokens_per_pos) == count
        assert (output.metrics.num_cached_tokens > 0) == (count > 0)
