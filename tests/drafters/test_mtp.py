"""MTP modules against an oracle in plain torch: every publisher's style, and where they lie."""

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, RequestOutput, SamplingParams
from slipstream.engine.scheduler import Scheduler
from tests.checkpoints import write_qwen3
from tests.drafters.heads import as_pickle
from tests.drafters.mtp_heads import add_mtp, with_gains, write_mimo, write_mtp
from tests.drafters.mtp_oracle import Mtp
from tests.drafters.oracles import Target
from tests.drafters.recording import assert_drafts_are, record_drafts
from tests.drafters.test_eagle import FORCED, GREEDY, PROMPT, SEEDED, K, make, run
from tests.padded_steps import use_padded_steps

STYLES = ["qwen", "deepseek", "mimo", "speculators"]


def own(target: str, **options: Any) -> LLM:
    """A target that drafts for itself: the config names no model."""
    speculative = {"method": "mtp", "num_speculative_tokens": K, **options.pop("speculative", {})}
    return LLM(
        target,
        speculative_config=speculative,
        **{"num_kv_blocks": 64, "skip_tokenizer_init": True, **options},
    )


def check(llm: LLM, head: Mtp, drafted: list[Any]) -> RequestOutput:
    """32 steps and more, whatever was accepted."""
    params = SamplingParams(temperature=0, max_tokens=140, ignore_eos=True)
    output = run(llm, params)
    assert len(drafted) >= 32
    assert all(count > 0 for count in output.metrics.num_accepted_tokens_per_pos)
    assert output.metrics.num_accepted_tokens < output.metrics.num_draft_tokens
    assert_drafts_are(drafted[:32], head)
    return output


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One whose final norm has gains: behind it, states have another direction."""
    return str(with_gains(write_qwen3(tmp_path_factory.mktemp("gains"))))


@pytest.mark.parametrize("style", STYLES)
def test_drafts_are_the_oracles(
    style: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_mtp(tmp_path, target, style)
    drafted = record_drafts(monkeypatch)
    llm = make(target, folder, speculative=FORCED)
    assert llm.engine.resolved.method == "mtp"
    check(llm, Mtp(folder, Target(target), style), drafted)


def write_target(folder: Path, kind: str) -> Path:
    if kind == "mimo":
        return with_gains(write_mimo(folder))
    return with_gains(write_qwen3(folder, tie_word_embeddings=kind == "qwen"))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("style", ["qwen", "deepseek", "mimo"])
def test_a_target_drafts_for_itself(
    style: str, padded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`method` is all that has to be said; the target's own answers stay what they were."""
    target = write_target(tmp_path / "target", style)
    plain = LLM(str(target), skip_tokenizer_init=True, num_kv_blocks=64)
    expected = run(plain, GREEDY).outputs[0].token_ids
    add_mtp(target, style)
    with_modules = LLM(str(target), skip_tokenizer_init=True, num_kv_blocks=64)
    assert run(with_modules, GREEDY).outputs[0].token_ids == expected
    if padded:
        use_padded_steps(monkeypatch)
    drafted = record_drafts(monkeypatch)
    head = Mtp(target, Target(target), style)
    check(own(str(target), speculative=FORCED), head, drafted)
    output = run(own(str(target)), GREEDY)
    assert output.outputs[0].token_ids == expected
    assert output.metrics.num_accepted_tokens > 0


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("style", "modules", "rows"),
    [("qwen", 2, 512), ("deepseek", 2, 5), ("deepseek", 3, 512), ("mimo", 4, 7), ("mimo", 5, 512)],
)
def test_several_modules_draft_in_order(
    style: str,
    modules: int,
    rows: int,
    padded: bool,
    tiny_target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fewer modules than draft tokens, as many, and more; also over prompts in chunks."""
    folder = write_mtp(tmp_path, tiny_target, style, modules=modules)
    head = Mtp(folder, Target(tiny_target), style)
    assert len(head.layers) == modules
    if padded:
        use_padded_steps(monkeypatch)
    drafted = record_drafts(monkeypatch)
    rates = [0.8, 0.6, 0.6, 0.5]
    forced = {**FORCED, "num_speculative_tokens": 4, "synthetic_acceptance_rates": rates}
    llm = make(tiny_target, folder, speculative=forced, max_num_batched_tokens=rows, max_num_seqs=1)
    check(llm, head, drafted)


@pytest.mark.parametrize("style", ["qwen", "deepseek"])
@pytest.mark.parametrize("prompt", [[5], [5, 9], [5, 9, 14]])
def test_the_shortest_prompts_with_several_modules(
    style: str, prompt: list[int], tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later modules have no row for the first tokens."""
    folder = write_mtp(tmp_path, tiny_target, style, modules=3)
    plain = LLM(tiny_target, skip_tokenizer_init=True, num_kv_blocks=64)
    drafted = record_drafts(monkeypatch)
    output = run(make(tiny_target, folder), GREEDY, prompt)
    assert output.outputs[0].token_ids == run(plain, GREEDY, prompt).outputs[0].token_ids
    long = [item for item in drafted if len(item.known) > 1]  # one token alone has no row at all
    assert len(long) > 5
    assert_drafts_are(long, Mtp(folder, Target(tiny_target), style))


TRAITS: dict[str, tuple[str, dict[str, bool]]] = {
    "embedding first": ("qwen", {"feature_first": True}),
    "feature first": ("mimo", {"feature_first": False}),
    "zero-centred norms": ("qwen", {"zero_centred": False}),
    "plain norms": ("speculators", {"zero_centred": True}),
    "first row shown zeros": ("deepseek", {"blank_first": False}),
    "first row shown its token": ("qwen", {"blank_first": True}),
    "recycled behind the norm": ("deepseek", {"recycles_normed": False}),
    "feature behind the norm": ("qwen", {"reads_normed": False}),
}


@pytest.mark.parametrize("trait", TRAITS)
def test_every_trait_changes_the_drafts(trait: str, target: str, tmp_path: Path) -> None:
    """So an oracle without it would not have agreed."""
    style, flags = TRAITS[trait]
    folder = write_mtp(tmp_path, target, style)
    model = Target(target)
    ours, theirs = (
        Mtp(folder, model, style, **changed).drafts(PROMPT[:6], 2)[1][1] for changed in ({}, flags)
    )
    assert (ours - theirs).abs().max() > 1e-2


@pytest.mark.parametrize("modules", [1, 3])
@pytest.mark.parametrize("length", [33, 34, 40])
@pytest.mark.parametrize("rows", [24, 512])
def test_acceptance_after_a_prefix_hit_equals_acceptance_without(
    modules: int, length: int, rows: int, tiny_target: str, tmp_path: Path
) -> None:
    """With block_size 8 a prompt of 33 leaves one token to compute, one of 34 two."""
    folder = write_mtp(tmp_path, tiny_target, "deepseek", modules=modules)
    prompt = [*PROMPT, *PROMPT][:length]
    llm = make(tiny_target, folder, block_size=8, max_num_seqs=2, max_num_batched_tokens=rows)
    cold, warm = run(llm, SEEDED, prompt), run(llm, SEEDED, prompt)
    assert cold.metrics.num_cached_tokens == 0
    assert warm.metrics.num_cached_tokens == (length - 1) // 8 * 8
    assert warm.metrics.num_accepted_tokens_per_pos == cold.metrics.num_accepted_tokens_per_pos
    assert warm.metrics.num_drafts == cold.metrics.num_drafts
    assert cold.metrics.num_accepted_tokens > 0


@pytest.mark.parametrize("modules", [1, 3])
@pytest.mark.parametrize("length", [33, 40])
def test_drafts_behind_a_prefix_hit_are_the_oracles(
    modules: int, length: int, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another request, of another next token, has left the blocks."""
    folder = write_mtp(tmp_path, tiny_target, "mimo", modules=modules)
    head = Mtp(folder, Target(tiny_target), "mimo")
    prompt = [*PROMPT, *PROMPT][:length]
    llm = make(tiny_target, folder, block_size=8)
    run(llm, GREEDY, [*prompt[:24], 7, 7, 7, 7])
    drafted = record_drafts(monkeypatch)
    assert run(llm, GREEDY, prompt).metrics.num_cached_tokens == 24
    assert_drafts_are(drafted, head)
    drafted.clear()
    assert run(llm, GREEDY, prompt).metrics.num_cached_tokens == (length - 1) // 8 * 8
    assert_drafts_are(drafted, head)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("modules", [1, 3])
@pytest.mark.parametrize("pause", [1, 4, 5, 14])
def test_drafting_goes_on_rightly_after_a_pause(
    pause: int,
    modules: int,
    padded: bool,
    tiny_target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """K = 0 for some steps: features wait, and are computed when there is no room for more."""
    folder = write_mtp(tmp_path, tiny_target, "qwen", modules=modules)
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
    assert run(llm, GREEDY).outputs[0].token_ids == expected
    assert len(calls) > 3 + pause
    assert len(drafted) >= 2
    assert_drafts_are(drafted, Mtp(folder, Target(tiny_target), "qwen"))


@pytest.mark.parametrize("modules", [1, 2])
def test_preempted_requests_draft_what_the_oracle_drafts(
    modules: int, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_mtp(tmp_path, tiny_target, "deepseek", modules=modules)
    prompts = [{"prompt_token_ids": [*PROMPT[index:], 5, index]} for index in range(4)]
    llm = make(tiny_target, folder, num_kv_blocks=18, block_size=8, max_num_seqs=4)
    drafted = record_drafts(monkeypatch)
    outputs = llm.generate(prompts, GREEDY)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert_drafts_are(drafted, Mtp(folder, Target(tiny_target), "deepseek"))


@pytest.mark.parametrize("modules", [1, 3])
@pytest.mark.parametrize("length", [40, 41, 48])
def test_nothing_goes_beyond_max_model_len(
    modules: int, length: int, tiny_target: str, tmp_path: Path
) -> None:
    folder = write_mtp(tmp_path, tiny_target, "qwen", modules=modules)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    llm = LLM(tiny_target, skip_tokenizer_init=True, num_kv_blocks=64, max_model_len=length)
    plain = run(llm, params, PROMPT[:9])
    llm = make(tiny_target, folder, max_model_len=length, speculative={"num_speculative_tokens": 7})
    drafted = run(llm, params, PROMPT[:9])
    assert 9 + len(drafted.outputs[0].token_ids) == length
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids


@pytest.mark.parametrize("modules", [1, 2])
def test_beyond_the_drafters_max_model_len_nothing_is_drafted(
    modules: int, tiny_target: str, tmp_path: Path
) -> None:
    folder = write_mtp(tmp_path, tiny_target, "mimo", modules=modules)
    llm = make(tiny_target, folder, speculative={"max_model_len": 20})
    plain = LLM(tiny_target, skip_tokenizer_init=True, num_kv_blocks=64)
    output = run(llm, GREEDY, PROMPT[:9])
    assert output.outputs[0].token_ids == run(plain, GREEDY, PROMPT[:9]).outputs[0].token_ids
    assert output.metrics.num_draft_tokens > 0
    assert run(llm, GREEDY).metrics.num_drafts == 0


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("modules", [1, 3])
def test_many_draft_tokens_for_many_requests(
    modules: int,
    padded: bool,
    tiny_target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write_mtp(tmp_path, tiny_target, "deepseek", modules=modules)
    prompts = [{"prompt_token_ids": PROMPT[index : 30 + index]} for index in range(8)]
    plain = LLM(tiny_target, skip_tokenizer_init=True, num_kv_blocks=64)
    expected = [output.outputs[0].token_ids for output in plain.generate(prompts, GREEDY)]
    if padded:
        use_padded_steps(monkeypatch)
    options: dict[str, Any] = {"speculative": {"num_speculative_tokens": 15}, "block_size": 8}
    llm = make(tiny_target, folder, num_kv_blocks=90, max_num_seqs=8, **options)
    outputs = llm.generate(prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_embeddings_and_heads_in_the_file_are_the_targets_own(
    tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek's modules carry copies of them, each module its own."""
    folder = write_mtp(tmp_path, tiny_target, "deepseek", modules=2, own_ends=True)
    drafted = record_drafts(monkeypatch)
    llm = make(tiny_target, folder, speculative=FORCED)
    check(llm, Mtp(folder, Target(tiny_target), "deepseek"), drafted)


@pytest.mark.parametrize("kind", ["pickle", "wrapper"])
def test_other_ways_to_store_them(
    kind: str, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pytorch_model.bin; and wrapped, which brings its own K."""
    style = "speculators" if kind == "wrapper" else "qwen"
    folder = write_mtp(tmp_path, tiny_target, style)
    head = Mtp(folder, Target(tiny_target), style)
    if kind == "pickle":
        as_pickle(folder)
    llm = LLM(
        tiny_target,
        speculative_config={"model": str(folder)},
        skip_tokenizer_init=True,
        num_kv_blocks=64,
    )
    assert llm.engine.resolved.method == "mtp"
    assert llm.engine.resolved.limits.num_speculative_tokens == (3 if kind == "wrapper" else 4)
    drafted = record_drafts(monkeypatch)
    run(llm, GREEDY)
    assert len(drafted) > 5
    assert_drafts_are(drafted, head)


@pytest.mark.parametrize("modules", [1, 2])
def test_a_draft_vocabulary_leaves_the_other_tokens_out(
    modules: int, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the whole head's logits those of the first tokens, here without a text to count in."""
    folder = write_mtp(tmp_path, tiny_target, "deepseek", modules=modules)
    drafted = record_drafts(monkeypatch)
    llm = make(tiny_target, folder, speculative={**FORCED, "draft_vocab_size": 60})
    run(llm, GREEDY)
    oracle = Mtp(folder, Target(tiny_target), "deepseek")
    vocabulary = torch.arange(60)
    oracle.target.head = oracle.target.head[vocabulary]
    assert len(drafted) > 5
    assert_drafts_are(drafted, oracle)
