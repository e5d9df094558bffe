"""EAGLE heads against oracles in plain torch: every layout of a checkpoint, every flag."""

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, RequestOutput, SamplingParams
from slipstream.engine.scheduler import Scheduler
from tests.drafters.heads import as_pickle, as_wrapper, write_eagle1, write_eagle3
from tests.drafters.oracles import Eagle1, Eagle3, Head, Target
from tests.drafters.recording import assert_drafts_are, record_drafts
from tests.padded_steps import use_padded_steps

PROMPT = torch.randint(1, 96, (37,), generator=torch.Generator().manual_seed(3)).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, repetition_penalty=1.3)
SEEDED = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, seed=5)
K = 3
# Acceptance by the roll of a die, so that drafts of every length are accepted.
FORCED = {
    "num_speculative_tokens": K,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.8, 0.6, 0.4],
}


def make(target: str, head: Path, **options: Any) -> LLM:
    speculative = {"model": str(head), "num_speculative_tokens": K}
    speculative |= options.pop("speculative", {})
    options = {"num_kv_blocks": 64, "skip_tokenizer_init": True, **options}
    return LLM(target, speculative_config=speculative, **options)


def run(llm: LLM, params: SamplingParams, prompt: list[int] | None = None) -> RequestOutput:
    return llm.generate({"prompt_token_ids": prompt or PROMPT}, params)[0]


def check(
    target: str, folder: Path, head: Head, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """32 steps and more, whatever was accepted."""
    drafted = record_drafts(monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    output = run(make(target, folder, speculative=FORCED, **options), params)
    assert len(drafted) >= 32
    assert all(count > 0 for count in output.metrics.num_accepted_tokens_per_pos)
    assert output.metrics.num_accepted_tokens < output.metrics.num_draft_tokens
    assert_drafts_are(drafted[:32], head)


THREE: dict[str, dict[str, Any]] = {
    "plain": {},
    "layers.0": {"naming": "layers.0."},
    "model.layers.0": {"naming": "layers.0.", "prefix": "model."},
    "reduced": {"draft_vocab": 60},
    "own_embedding": {"own_embedding": True},
    "shared_head": {"own_head": False},
    "qk_norm": {"qk_norm": True, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "window": {
        "qk_norm": True,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention"],
    },
    "llama_qk_norm": {"qk_norm": True},
    "layers": {"num_hidden_layers": 3},
    "rope": {"rope_theta": 500.0},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "eagle3.1": {"fc_norm": True, "norm_output": True, "draft_vocab": 60},
    "no_aux": {"use_aux_hidden_state": False},
    "two_layers_read": {"eagle_aux_hidden_state_layer_ids": [1, 2]},
}
FLAGS = ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]


@pytest.mark.parametrize("name", THREE)
def test_eagle3_drafts_what_the_oracle_drafts(
    name: str, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_eagle3(tmp_path, tiny_target, **THREE[name])
    check(tiny_target, folder, Eagle3(folder, Target(tiny_target)), monkeypatch)


@pytest.mark.parametrize("flag", [*FLAGS, "rope_theta"])
def test_every_flag_changes_the_drafts(flag: str, tiny_target: str, tmp_path: Path) -> None:
    value = 500.0 if flag == "rope_theta" else True
    folder = write_eagle3(tmp_path, tiny_target, **{flag: value})
    with_flag = Eagle3(folder, Target(tiny_target))
    without = Eagle3(
        folder, Target(tiny_target), **{flag: 10000.0 if flag == "rope_theta" else False}
    )
    ours, theirs = (head.drafts(PROMPT, 2)[1][1] for head in (with_flag, without))
    assert (ours - theirs).abs().max() > 1e-2


ONE: dict[str, dict[str, Any]] = {
    "bias": {},
    "no_bias": {"bias": False},
    "own_embedding": {"own_embedding": True},
    "layers": {"num_hidden_layers": 2},
}


@pytest.mark.parametrize("name", ONE)
def test_eagle1_drafts_what_the_oracle_drafts(
    name: str, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_eagle1(tmp_path, tiny_target, **ONE[name])
    check(tiny_target, folder, Eagle1(folder, Target(tiny_target)), monkeypatch)


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 5}, {"block_size": 8}])
@pytest.mark.parametrize("padded", [False, True])
def test_chunks_and_padded_steps_draft_the_same(
    options: dict[str, Any],
    padded: bool,
    tiny_target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write_eagle3(tmp_path, tiny_target, draft_vocab=60)
    if padded:
        use_padded_steps(monkeypatch)
    head = Eagle3(folder, Target(tiny_target))
    check(tiny_target, folder, head, monkeypatch, max_num_seqs=1, **options)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_pickled_weights_are_the_same_head(kind: str, tiny_target: str, tmp_path: Path) -> None:
    write = write_eagle1 if kind == "eagle" else write_eagle3
    folder = write(tmp_path, tiny_target)
    expected = run(make(tiny_target, folder), GREEDY).metrics.num_accepted_tokens_per_pos
    llm = make(tiny_target, as_pickle(folder))
    assert llm.engine.resolved.method == kind
    assert run(llm, GREEDY).metrics.num_accepted_tokens_per_pos == expected


def test_a_speculators_wrapper_is_the_same_head(
    tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its norm_before_residual is true unless it says otherwise, and it brings its own K."""
    folder = write_eagle3(
        tmp_path, tiny_target, naming="layers.0.", draft_vocab=60, norm_before_residual=True
    )
    head = Eagle3(folder, Target(tiny_target))
    as_wrapper(folder, norm_before_residual=None)
    llm = LLM(
        tiny_target,
        speculative_config={"model": str(folder)},
        skip_tokenizer_init=True,
        num_kv_blocks=64,
    )
    assert llm.engine.resolved.limits.num_speculative_tokens == 3
    check(tiny_target, folder, head, monkeypatch)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("length", [33, 34, 40])
@pytest.mark.parametrize("rows", [24, 512])
def test_acceptance_after_a_prefix_hit_equals_acceptance_without(
    kind: str, length: int, rows: int, tiny_target: str, tmp_path: Path
) -> None:
    """With block_size 8 a prompt of 33 leaves one token to compute, one of 34 two."""
    write = write_eagle1 if kind == "eagle" else write_eagle3
    folder = write(tmp_path, tiny_target)
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
    folder = write_eagle3(tmp_path, tiny_target)
    prompt = [*PROMPT, *PROMPT][:length]
    llm = make(tiny_target, folder, block_size=8)
    run(llm, GREEDY, [*prompt[:24], 7, 7, 7, 7])
    drafted = record_drafts(monkeypatch)
    output = run(llm, GREEDY, prompt)
    assert output.metrics.num_cached_tokens == 24
    assert_drafts_are(drafted, Eagle3(folder, Target(tiny_target)))
    drafted.clear()
    assert run(llm, GREEDY, prompt).metrics.num_cached_tokens == (length - 1) // 8 * 8
    assert_drafts_are(drafted, Eagle3(folder, Target(tiny_target)))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("pause", [1, 2, 3, 4, 5, 9, 14])
def test_drafting_goes_on_rightly_after_a_pause(
    pause: int,
    padded: bool,
    tiny_target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """K = 0 for some steps: features wait, and are computed when there is no room for more."""
    folder = write_eagle3(tmp_path, tiny_target)
    plain = LLM(tiny_target, skip_tokenizer_init=True, num_kv_blocks=64)
    expected = run(plain, GREEDY).outputs[0].token_ids
    if padded:
        use_padded_steps(monkeypatch)
    llm = make(tiny_target, folder)
    drafted = record_drafts(monkeypatch)
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
    assert_drafts_are(drafted, Eagle3(folder, Target(tiny_target)))


def test_preempted_requests_draft_what_the_oracle_drafts(
    tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_eagle3(tmp_path, tiny_target)
    prompts = [{"prompt_token_ids": [*PROMPT[index:], 5, index]} for index in range(4)]
    llm = make(tiny_target, folder, num_kv_blocks=18, block_size=8, max_num_seqs=4)
    drafted = record_drafts(monkeypatch)
    outputs = llm.generate(prompts, GREEDY)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert_drafts_are(drafted, Eagle3(folder, Target(tiny_target)))


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("length", [40, 41, 48])
def test_nothing_goes_beyond_max_model_len(
    kind: str, length: int, tiny_target: str, tmp_path: Path
) -> None:
    write = write_eagle1 if kind == "eagle" else write_eagle3
    folder = write(tmp_path, tiny_target)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    llm = LLM(tiny_target, skip_tokenizer_init=True, num_kv_blocks=64, max_model_len=length)
    plain = run(llm, params, PROMPT[:9])
    llm = make(tiny_target, folder, max_model_len=length, speculative={"num_speculative_tokens": 7})
    drafted = run(llm, params, PROMPT[:9])
    assert 9 + len(drafted.outputs[0].token_ids) == length
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids


def test_beyond_the_drafters_max_model_len_nothing_is_drafted(
    tiny_target: str, tmp_path: Path
) -> None:
    folder = write_eagle3(tmp_path, tiny_target)
    llm = make(tiny_target, folder, speculative={"max_model_len": 20})
    plain = LLM(tiny_target, skip_tokenizer_init=True, num_kv_blocks=64)
    output = run(llm, GREEDY, PROMPT[:9])
    assert output.outputs[0].token_ids == run(plain, GREEDY, PROMPT[:9]).outputs[0].token_ids
    assert output.metrics.num_draft_tokens > 0
    assert run(llm, GREEDY).metrics.num_drafts == 0
    assert run(llm, GREEDY, PROMPT[:9]).metrics.num_drafts == output.metrics.num_drafts


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_many_draft_tokens_for_many_requests(
    kind: str,
    padded: bool,
    tiny_target: str,
    tiny_heads: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = [{"prompt_token_ids": PROMPT[index : 30 + index]} for index in range(8)]
    plain = LLM(tiny_target, skip_tokenizer_init=True, num_kv_blocks=64)
    expected = [output.outputs[0].token_ids for output in plain.generate(prompts, GREEDY)]
    if padded:
        use_padded_steps(monkeypatch)
    options: dict[str, Any] = {"speculative": {"num_speculative_tokens": 15}, "block_size": 8}
    llm = make(tiny_target, Path(tiny_heads[kind]), num_kv_blocks=90, max_num_seqs=8, **options)
    outputs = llm.generate(prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_a_request_may_ask_for_fewer_draft_tokens(
    tiny_target: str, tiny_heads: dict[str, str]
) -> None:
    """Or for none: it then neither drafts nor shares blocks with those that do."""
    llm = make(tiny_target, Path(tiny_heads["eagle3"]), block_size=8)
    prompt = {"prompt_token_ids": PROMPT}
    each = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, num_speculative_tokens=count)
        for count in (0, 1, 3)
    ]
    outputs = llm.generate([prompt] * 3, each)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    lengths = [len(output.metrics.num_accepted_tokens_per_pos) for output in outputs]
    assert lengths == [0, 1, 3]
