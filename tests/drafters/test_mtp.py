"""MTP modules against an oracle in plain torch: every publisher's style, and where they lie."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, RequestOutput, SamplingParams
from tests.checkpoints import write_qwen3
from tests.drafters.engines import GREEDY, PROMPT, K, forced, make, run
from tests.drafters.heads import as_pickle
from tests.drafters.mtp_heads import add_mtp, with_gains, write_mimo, write_mtp
from tests.drafters.mtp_oracle import Mtp
from tests.drafters.oracles import Target
from tests.drafters.recording import assert_drafts_are, record_drafts
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
    params = SamplingParams(temperature=0, max_tokens=115, ignore_eos=True)
    output = run(llm, params)
    assert len(drafted) >= 32
    assert all(count > 0 for count in output.metrics.num_accepted_tokens_per_pos)
    assert output.metrics.num_accepted_tokens < output.metrics.num_draft_tokens
    assert_drafts_are(drafted[:32], head)
    return output


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One whose final norm has gains: after it, states have another direction."""
    return str(with_gains(write_qwen3(tmp_path_factory.mktemp("gains"))))


@pytest.mark.parametrize("style", STYLES)
def test_drafts_are_the_oracles(
    style: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_mtp(tmp_path, target, style)
    drafted = record_drafts(monkeypatch)
    llm = make(target, folder, speculative=forced())
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
    """Only `method` is given; the target's outputs do not change."""
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
    check(own(str(target), speculative=forced()), head, drafted)
    output = run(own(str(target)), GREEDY)
    assert output.outputs[0].token_ids == expected
    assert output.metrics.num_accepted_tokens > 0


def test_values_in_place_of_the_config_s_are_those_of_the_modules_too(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", "mimo")
    add_mtp(target, "mimo")
    changed = run(own(str(target), hf_overrides={"rope_theta": 7.0}), GREEDY)
    file = target / "config.json"
    config = json.loads(file.read_text())
    unchanged = run(own(str(target)), GREEDY)
    file.write_text(json.dumps({**config, "rope_theta": 7.0}))
    edited = run(own(str(target)), GREEDY)
    ids = [output.outputs[0].token_ids for output in (changed, edited, unchanged)]
    assert ids[0] == ids[1] != ids[2]
    assert changed.metrics.num_accepted_tokens_per_pos == edited.metrics.num_accepted_tokens_per_pos


@pytest.mark.parametrize(
    ("style", "modules", "rows", "padded"),
    [
        ("qwen", 2, 512, True),
        ("deepseek", 2, 5, True),
        ("deepseek", 3, 512, False),
        ("mimo", 4, 7, False),
        ("mimo", 5, 512, True),
        *[
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("qwen", 2, 512, False),
                ("deepseek", 2, 5, False),
                ("deepseek", 3, 512, True),
                ("mimo", 4, 7, True),
                ("mimo", 5, 512, False),
            )
        ],
    ],
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
    llm = make(
        tiny_target, folder, speculative=forced(), max_num_batched_tokens=rows, max_num_seqs=1
    )
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
    "recycled after the norm": ("deepseek", {"recycles_normed": False}),
    "feature after the norm": ("qwen", {"reads_normed": False}),
}


@pytest.mark.parametrize("trait", TRAITS)
def test_every_trait_changes_the_drafts(trait: str, target: str, tmp_path: Path) -> None:
    """So an oracle without the trait would not agree with the drafter."""
    style, flags = TRAITS[trait]
    folder = write_mtp(tmp_path, target, style)
    model = Target(target)
    ours, theirs = (
        Mtp(folder, model, style, **changed).drafts(PROMPT[:6], 2)[1][1] for changed in ({}, flags)
    )
    assert (ours - theirs).abs().max() > 1e-2


def test_embeddings_and_heads_in_the_file_are_the_targets_own(
    tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek's modules carry copies of them, each module its own."""
    folder = write_mtp(tmp_path, tiny_target, "deepseek", modules=2, own_ends=True)
    drafted = record_drafts(monkeypatch)
    llm = make(tiny_target, folder, speculative=forced())
    check(llm, Mtp(folder, Target(tiny_target), "deepseek"), drafted)


@pytest.mark.parametrize("kind", ["pickle", "wrapper"])
def test_other_ways_to_store_them(
    kind: str, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The modules as pytorch_model.bin, and in a wrapper, which has its own K."""
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
    """A trimmed head has the whole head's logits of the first tokens, where no text is counted."""
    folder = write_mtp(tmp_path, tiny_target, "deepseek", modules=modules)
    drafted = record_drafts(monkeypatch)
    llm = make(tiny_target, folder, speculative={**forced(), "draft_vocab_size": 60})
    run(llm, GREEDY)
    oracle = Mtp(folder, Target(tiny_target), "deepseek")
    vocabulary = torch.arange(60)
    oracle.target.head = oracle.target.head[vocabulary]
    assert len(drafted) > 5
    assert_drafts_are(drafted, oracle)
