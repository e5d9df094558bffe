"""DFlash against an oracle in plain torch: every layout of a checkpoint, every flag."""

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM
from slipstream.speculative.dflash import drafter as dflash
from tests.drafters.blocks import Blocks, as_wrapped_dflash, write_dflash
from tests.drafters.engines import GREEDY, PROMPT, check_drafts, make, run
from tests.drafters.oracles import Target

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
    check_drafts(tiny_target, folder, Blocks(folder, Target(tiny_target)), monkeypatch)


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


def test_a_speculators_wrapper_is_the_same_drafter(
    tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrapper has its own K, and lists layers by their inputs."""
    folder = write_dflash(tmp_path, tiny_target, draft_vocab=60, own_embedding=True, **SLIDING)
    as_wrapped_dflash(folder)
    oracle = Blocks(folder, Target(tiny_target))
    llm = LLM(tiny_target, speculative_config={"model": str(folder)}, skip_tokenizer_init=True)
    assert llm.engine.resolved.limits.num_speculative_tokens == 3
    check_drafts(tiny_target, folder, oracle, monkeypatch)


def test_a_block_says_how_many_tokens_are_drafted(tiny_target: str, tmp_path: Path) -> None:
    folder = write_dflash(tmp_path, tiny_target, block=6)
    llm = LLM(tiny_target, speculative_config={"model": str(folder)}, skip_tokenizer_init=True)
    assert llm.engine.resolved.method == "dflash"
    assert llm.engine.resolved.limits.num_speculative_tokens == 5
    assert run(llm, GREEDY).metrics.num_drafts > 0


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
