"""Heads that draft token by token, EAGLE-3 and MTP, from training to serving."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.speculative.catalogue import recognise
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.train.chain import unroll
from slipstream.train.recipe_eagle3 import Eagle3Recipe
from slipstream.train.recipe_mtp import MtpRecipe
from slipstream.train.run import run_training
from tests.drafters.recording import record_drafts
from tests.train.small_runs import batch_of, run_drafting, settings, teacher

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("eagle3", {"aux_layers": (1, 2, 3)}),
    "reduced": (
        "eagle3",
        {"draft_vocab_size": 60, "num_kv_heads": 1, "intermediate_size": 40},
    ),
    "share_head": ("eagle3", {"share_head": True, "norm_output": True}),
    "layers": (
        "eagle3",
        {"num_layers": 2, "norm_before_residual": True, "norm_before_fc": True},
    ),
    "mtp": ("mtp", {"num_heads": 4, "intermediate_size": 40}),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(it, marks=pytest.mark.full) if it == "plain" else it for it in CASES],
)
def test_the_engine_runs_the_network_that_was_trained(
    case: str,
    taught_target: str,
    own_words: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind, options = CASES[case]
    given = settings(kind, taught_target, own_words, tmp_path / "head", steps=40, options=options)
    trained = run_training(given)
    checkpoint = HeadCheckpoint(trained.folder)
    assert recognise(checkpoint.config, checkpoint.tensor_names) == kind
    drafted = record_drafts(monkeypatch)
    plain, speculated, length = run_drafting(taught_target, trained.folder, {})
    assert speculated == plain
    assert length > (1.3 if kind == "eagle3" else 1.2)
    recipe = trained.recipe
    assert isinstance(recipe, Eagle3Recipe | MtpRecipe)
    target, num_layers = teacher(taught_target), options.get("num_layers", 1)
    for item in drafted[::7]:
        tokens = [*item.known, *item.tokens]
        batch = batch_of(target, tokens, recipe.vocabulary, recipe.stream_layers)
        with torch.no_grad():
            positions = list(unroll(recipe.network, num_layers, batch, len(item.tokens)))
        for position, logits in zip(positions, item.logits, strict=True):
            # Row i is that of token i + 1.
            ours = position.logits[len(item.known) - 2]
            torch.testing.assert_close(ours, logits, atol=1e-4, rtol=0)


def test_the_export_is_a_head_as_it_is_published(
    taught_target: str, own_words: Path, tmp_path: Path
) -> None:
    options = {"draft_vocab_size": 60, "aux_layers": (1, 2, 3)}
    given = settings("eagle3", taught_target, own_words, tmp_path, steps=2, options=options)
    run_training(given, command="slipstream train eagle3 somewhere")
    checkpoint = HeadCheckpoint(tmp_path)
    assert recognise(checkpoint.config, checkpoint.tensor_names) == "eagle3"
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (96, 96)
    assert tensors["fc.weight"].shape == (48, 144)
    assert tensors["lm_head.weight"].shape == (60, 48)
    assert tensors["t2d"].dtype == torch.bool
    chosen = tensors["d2t"] + torch.arange(60)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), chosen)
    assert 0 in chosen  # the token that ends an output
    assert not any("embed_tokens" in name for name in tensors)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["draft_vocab_size"] == 60
    card = (tmp_path / "README.md").read_text()
    assert "slipstream train eagle3 somewhere" in card
    assert torch.__version__ in card
