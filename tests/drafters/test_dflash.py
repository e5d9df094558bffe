"""DFlash against an oracle in plain torch: every layout of a checkpoint, every flag."""

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, RequestOutput, SamplingParams
from slipstream.engine.scheduler import Scheduler
from slipstream.runner.turn import Turn
from slipstream.sampling import verification
from slipstream.speculative import dflash, draft_sampling
from slipstream.speculative.drafter import Draft
from tests.drafters.blocks import Blocks, as_wrapped_dflash, write_dflash
from tests.drafters.oracles import Target
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
    """Filled by every greedy draft from here on."""
    drafted: list[Drafted] = []
    seen: list[torch.Tensor] = []
    propose = dflash.DFlashDrafter.propose

    def recorded(self: dflash.DFlashDrafter, turn: Turn) -> Draft:
        seen.clear()
        draft = propose(self, turn)
        for index, slot in enumerate(turn.slots.tolist()):
            count = int(draft.num_tokens[index])
            if count:
                known = self._state.token_ids[slot, : int(self._state.num_tokens[slot])].tolist()
                rows = seen[0].view(turn.num_requests, turn.width, -1)[index]
                tokens = draft.token_ids[index, :count].tolist()
                drafted.append(Drafted(known, tokens, [row.clone() for row in rows[:count]]))
        return draft

    def sample_draft(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(logits)
        return verification.sample_draft(logits, *args, **kwargs)

    monkeypatch.setattr(dflash.DFlashDrafter, "propose", recorded)
    monkeypatch.setattr(draft_sampling, "sample_draft", sample_draft)
    return drafted


def make(target: str, folder: Path, **options: Any) -> LLM:
    speculative = {"model": str(folder), "num_speculative_tokens": K}
    speculative |= options.pop("speculative", {})
    options = {"num_kv_blocks": 64, "skip_tokenizer_init": True, **options}
    return LLM(target, speculative_config=speculative, **options)


def run(llm: LLM, params: SamplingParams, prompt: list[int] | None = None) -> RequestOutput:
    return llm.generate({"prompt_token_ids": prompt or PROMPT}, params)[0]


def check(
    target: str, folder: Path, oracle: Blocks, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """32 steps and more, whatever was accepted."""
    drafted = record(monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    output = run(make(target, folder, speculative=FORCED, **options), params)
    assert len(drafted) >= 32
    assert all(count > 0 for count in output.metrics.num_accepted_tokens_per_pos)
    assert output.metrics.num_accepted_tokens < output.metrics.num_draft_tokens
    assert_drafts_are(drafted, oracle)


SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "published": {"own_head": False},
    "own_head": {},
    "own_embedding": {"own_embedding": True},
    "reduced": {"draft_vocab": 60},
    "flat": {"flat": True},
    "one_layer_read": {"reads": [1], "num_hidden_layers": 1},
    "order": {"reads": [1, 0]},
    "three_layers": {"num_hidden_layers": 3, "rope_theta": 77.0},
    "llama": {"model_type": "llama", "qk_norm": False},
    "sliding": SLIDING,
    "sliding_free": {**SLIDING, "nested": {"sliding_window_non_causal": True}},
    "not_causal": {**SLIDING, "nested": {"causal": False}},
    "causal": {"nested": {"causal": True}},
    "from_anchor": {"nested": {"sample_from_anchor": True}},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_are_the_oracles(
    name: str, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_dflash(tmp_path, tiny_target, **LAYOUTS[name])
    check(tiny_target, folder, Blocks(folder, Target(tiny_target)), monkeypatch)


FLAGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({"nested": {"causal": True}}, {"causal": False}),
    "sliding_window": (SLIDING, {"layer_types": ["full_attention"] * 2}),
    "window_size": (SLIDING, {"sliding_window": 9}),
    "sliding_window_non_causal": (SLIDING, {"sliding_window_non_causal": True}),
    "sample_from_anchor": ({}, {"sample_from_anchor": True}),
    "rope_theta": ({}, {"rope_theta": 50.0}),
    "mask_token_id": ({}, {"mask_token_id": 3}),
    "target_layer_ids": ({}, {"target_layer_ids": [1, 0]}),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_changes_the_drafts(flag: str, tiny_target: str, tmp_path: Path) -> None:
    options, other = FLAGS[flag]
    target = Target(tiny_target)
    folder = write_dflash(tmp_path, tiny_target, **options)
    ours = Blocks(folder, target)
    theirs = Blocks(folder, target, **other)
    gap = ours.drafts(PROMPT, 3)[1][1] - theirs.drafts(PROMPT, 3)[1][1]
    assert gap.abs().max() > 1e-2


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 7}, {"block_size": 8}])
@pytest.mark.parametrize("padded", [False, True])
def test_chunks_and_padded_steps_draft_the_same(
    options: dict[str, Any],
    padded: bool,
    tiny_target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write_dflash(tmp_path, tiny_target, draft_vocab=60, **SLIDING)
    if padded:
        use_padded_steps(monkeypatch)
    oracle = Blocks(folder, Target(tiny_target))
    check(tiny_target, folder, oracle, monkeypatch, max_num_seqs=1, **options)


def test_a_speculators_wrapper_is_the_same_drafter(
    tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It brings its own K, and its list names layers that are entered."""
    folder = write_dflash(tmp_path, tiny_target, draft_vocab=60, own_embedding=True, **SLIDING)
    as_wrapped_dflash(folder)
    oracle = Blocks(folder, Target(tiny_target))
    llm = LLM(tiny_target, speculative_config={"model": str(folder)}, skip_tokenizer_init=True)
    assert llm.engine.resolved.limits.num_speculative_tokens == 3
    check(tiny_target, folder, oracle, monkeypatch)


def test_a_block_says_how_many_tokens_are_drafted(tiny_target: str, tmp_path: Path) -> None:
    folder = write_dflash(tmp_path, tiny_target, block=6)
    llm = LLM(tiny_target, speculative_config={"model": str(folder)}, skip_tokenizer_init=True)
    assert llm.engine.resolved.method == "dflash"
    assert llm.engine.resolved.limits.num_speculative_tokens == 5
    assert run(llm, GREEDY).metrics.num_drafts > 0


@pytest.mark.parametrize("length", [34, 37, 40])
@pytest.mark.parametrize("rows", [24, 512])
def test_acceptance_after_a_prefix_hit_equals_acceptance_without(
    length: int, rows: int, tiny_target: str, tmp_path: Path
) -> None:
    """With block_size 8 a prompt of 34 leaves two tokens to compute. One of 33 leaves one, and is
    drafted for at once, a step earlier than without a hit: see the next test."""
    folder = write_dflash(tmp_path, tiny_target)
    prompt = [*PROMPT, *PROMPT][:length]
    llm = make(tiny_target, folder, block_size=8, max_num_seqs=2, max_num_batched_tokens=rows)
    cold, warm = run(llm, SEEDED, prompt), run(llm, SEEDED, prompt)
    assert cold.metrics.num_cached_tokens == 0
    assert warm.metrics.num_cached_tokens == (length - 1) // 8 * 8
    assert warm.metrics.num_accepted_tokens_per_pos == cold.metrics.num_accepted_tokens_per_pos
    assert warm.metrics.num_drafts == cold.metrics.num_drafts
    assert cold.metrics.num_accepted_tokens > 0


@pytest.mark.parametrize("length", [33, 40])
def test_drafts_behind_a_prefix_hit_are_the_oracles(
    length: int, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another request, of another next token, has left the blocks."""
    folder = write_dflash(tmp_path, tiny_target)
    oracle = Blocks(folder, Target(tiny_target))
    prompt = [*PROMPT, *PROMPT][:length]
    llm = make(tiny_target, folder, block_size=8)
    run(llm, GREEDY, [*prompt[:24], 7, 7, 7, 7])
    drafted = record(monkeypatch)
    for cached in (24, (length - 1) // 8 * 8):
        output = run(llm, GREEDY, prompt)
        assert output.metrics.num_cached_tokens == cached
        assert_drafts_are(drafted, oracle)


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
    folder = write_dflash(tmp_path, tiny_target)
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
    assert_drafts_are(drafted, Blocks(folder, Target(tiny_target)))


def test_preempted_requests_draft_what_the_oracle_drafts(
    tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_dflash(tmp_path, tiny_target)
    prompts = [{"prompt_token_ids": [*PROMPT[index:], 5, index]} for index in range(4)]
    llm = make(tiny_target, folder, num_kv_blocks=18, block_size=8, max_num_seqs=4)
    drafted = record(monkeypatch)
    outputs = llm.generate(prompts, GREEDY)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert_drafts_are(drafted, Blocks(folder, Target(tiny_target)))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [40, 41, 48])
def test_nothing_goes_beyond_max_model_len(
    length: int, padded: bool, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_dflash(tmp_path, tiny_target)
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
    folder = write_dflash(tmp_path, tiny_target)
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
    folder = write_dflash(tmp_path, tiny_target, block=16)
    options: dict[str, Any] = {"speculative": {"num_speculative_tokens": 15}, "block_size": 8}
    llm = make(tiny_target, folder, num_kv_blocks=90, max_num_seqs=8, **options)
    outputs = llm.generate(prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert all(output.metrics.num_drafts > 0 for output in outputs)


def test_a_request_may_ask_for_fewer_draft_tokens(tiny_target: str, tmp_path: Path) -> None:
    llm = make(tiny_target, write_dflash(tmp_path, tiny_target), block_size=8)
    each = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, num_speculative_tokens=count)
        for count in (0, 1, 3)
    ]
    outputs = llm.generate([{"prompt_token_ids": PROMPT}] * 3, each)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    lengths = [len(output.metrics.num_accepted_tokens_per_pos) for output in outputs]
    assert lengths == [0, 1, 3]


def test_a_round_is_one_pass_whatever_k(
    tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_dflash(tmp_path, tiny_target)
    passes = []
    call = dflash.DFlashNetwork.__call__

    def counted(self: Any, *args: Any) -> torch.Tensor:
        passes.append(None)
        return call(self, *args)

    monkeypatch.setattr(dflash.DFlashNetwork, "__call__", counted)
    for count in (3, 7):
        passes.clear()
        llm = make(tiny_target, folder, speculative={"num_speculative_tokens": count})
        assert len(passes) == 0
        assert run(llm, GREEDY).metrics.num_drafts == len(passes) > 0
