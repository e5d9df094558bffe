"""DSpark and DFlash2 against oracles in plain torch: every layout of a checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM
from slipstream.speculative.dflash.drafter import BlockChainDrafter
from slipstream.speculative.dflash2.network import convolve
from tests.drafters.blocks import (
    Blocks,
    Blocks2,
    Sparks,
    as_wrapped_dflash,
    write_dflash2,
    write_dspark,
)
from tests.drafters.engines import GREEDY, PROMPT, check_drafts, run
from tests.drafters.oracles import Target
from tests.stopping_policy import use_stopping_policy

Write = Callable[..., Path]
SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
}
LAYOUTS: dict[str, tuple[Write, type[Blocks], dict[str, Any]]] = {
    "dspark": (write_dspark, Sparks, {"own_head": False}),
    "dspark_gated": (write_dspark, Sparks, {"head_type": "gated", **SLIDING}),
    "dspark_rnn": (write_dspark, Sparks, {"head_type": "rnn", "draft_vocab": 60}),
    "dspark_masks_only": (write_dspark, Sparks, {"nested": {"sample_from_anchor": False}}),
    "dflash2": (write_dflash2, Blocks2, {"own_head": False}),
    "dflash2_sliding": (write_dflash2, Blocks2, SLIDING),
    "dflash2_from_anchor": (write_dflash2, Blocks2, {"nested": {"sample_from_anchor": True}}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_are_the_oracles(
    name: str, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, oracle, options = LAYOUTS[name]
    folder = write(tmp_path, tiny_target, **options)
    check_drafts(tiny_target, folder, oracle(folder, Target(tiny_target)), monkeypatch)


def test_dspark_without_a_correction_is_dflash(
    tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_dspark(tmp_path, tiny_target, rank=0, confident=False)
    oracle = Blocks(folder, Target(tiny_target), sample_from_anchor=True)
    check_drafts(tiny_target, folder, oracle, monkeypatch)


@pytest.mark.parametrize("method", ["dspark", "dflash2"])
def test_a_speculators_wrapper_is_the_same_drafter(
    method: str, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, oracle, _ = LAYOUTS[method]
    folder = write(tmp_path, tiny_target, own_embedding=True)
    inner = oracle(folder, Target(tiny_target)).config
    own = (
        *("markov_rank", "markov_head_type", "enable_confidence_head", "conv_kernel_size"),
        *("conv_group_size", "selector_rank", "selector_top_k", "input_embedding_scale"),
        *("output_multiplier", "final_logit_softcapping"),
    )
    changes = {key: inner[key] for key in own if key in inner}
    as_wrapped_dflash(
        folder, speculators_model_type=method, projector_type=method, shift_label=None, **changes
    )
    llm = LLM(tiny_target, speculative_config={"model": str(folder)}, skip_tokenizer_init=True)
    assert llm.engine.resolved.method == method
    check_drafts(tiny_target, folder, oracle(folder, Target(tiny_target)), monkeypatch)


@pytest.mark.parametrize("method", ["dspark", "dflash2"])
def test_the_order_of_tokens_matters(method: str, tiny_target: str, tmp_path: Path) -> None:
    """Scores of a place follow from the token before it."""
    write, oracle, options = LAYOUTS[method]
    folder = write(tmp_path, tiny_target, **options)
    blocks = oracle(folder, Target(tiny_target))
    changed = load_file(folder / "model.safetensors")
    name = "markov_head.markov_w1.weight"
    name = name if name in changed else "candidate_selector.predecessor_codebook"
    save_file({**changed, name: changed[name] * 0}, folder / "model.safetensors")
    without = oracle(folder, Target(tiny_target))
    ours, theirs = blocks.drafts(PROMPT, 3)[1][1], without.drafts(PROMPT, 3)[1][1]
    assert (ours - theirs).nan_to_num().abs().max() > 1e-2


def test_the_confidence_head_ends_chains(
    tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's outputs, not the largest probabilities, are the confidences of a draft."""
    folder = write_dspark(tmp_path, tiny_target)
    stored = load_file(folder / "model.safetensors")
    stored["confidence_head.proj.weight"] *= 0
    stored["confidence_head.proj.bias"][:] = -2.0
    save_file(stored, folder / "model.safetensors")
    use_stopping_policy(monkeypatch)
    seen: list[torch.Tensor] = []
    propose = BlockChainDrafter.propose

    def watched(self: Any, batch: Any) -> Any:
        draft = propose(self, batch)
        assert draft.confidences is not None
        seen.append(draft.confidences[draft.num_tokens > 0, :1])
        return draft

    monkeypatch.setattr(BlockChainDrafter, "propose", watched)
    llm = LLM(
        tiny_target,
        speculative_config={"model": str(folder), "num_speculative_tokens": 4},
        skip_tokenizer_init=True,
    )
    seen.clear()  # of what was run to measure costs
    run(llm, GREEDY)
    known = torch.cat(seen)
    assert len(known) > 5
    torch.testing.assert_close(known, torch.full_like(known, torch.tensor(-2.0).sigmoid().item()))


def test_convolutions_stay_within_blocks() -> None:
    """Rows of several blocks of other lengths, side by side, give what each block gives alone."""
    generator = torch.Generator().manual_seed(2)
    lengths, taps, groups, size = (1, 4, 2), 3, 2, 3
    rows = torch.randn(sum(lengths), groups * size, generator=generator)
    kernels = torch.randn(taps, sum(lengths), groups, size, generator=generator)
    offsets = torch.cat([torch.arange(length) for length in lengths])
    together = convolve(rows, kernels, offsets)
    start = 0
    for length in lengths:
        own = slice(start, start + length)
        alone = convolve(rows[own], kernels[:, own], offsets[own])
        torch.testing.assert_close(together[own], alone)
        start += length
