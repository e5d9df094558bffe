"""What training exports, read by the model classes of the speculators library where it is there.

Its logits must be those of the network in training. The tests do not depend on the library, which
would install a torch of its own; to run them:
`pip install --no-deps speculators loguru pydantic-settings datasets`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.train.batches import TrainingBatch
from slipstream.train.chain import unroll
from slipstream.train.parallel import sampled_rows
from slipstream.train.recipe_dflash import DFlashRecipe
from slipstream.train.recipe_eagle3 import Eagle3Recipe
from slipstream.train.recipe_mtp import MtpRecipe
from slipstream.train.recipe_p_eagle import PEagleRecipe
from slipstream.train.run import Trained, run_training
from tests.train.small_runs import batch_of, settings, teacher

pytest.importorskip("speculators.models.eagle3", reason="the speculators package is not here")
pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = torch.randint(1, 96, (24,), generator=torch.Generator().manual_seed(3)).tolist()
COUNT = 3


def ours(trained: Trained, target: str) -> tuple[TrainingBatch, list[Tensor]]:
    """A text as a batch, and the logits of the network in training by position."""
    recipe = trained.recipe
    assert isinstance(recipe, Eagle3Recipe | MtpRecipe)
    batch = batch_of(teacher(target), TOKENS, recipe.vocabulary, recipe.stream_layers)
    layers = recipe.num_layers if isinstance(recipe, Eagle3Recipe) else 1
    with torch.no_grad():
        positions = list(unroll(recipe.network, layers, batch, COUNT))
    return batch, [position.logits for position in positions]


@pytest.mark.parametrize(
    "options",
    [
        {"aux_layers": (1, 2, 3)},
        {"aux_layers": (0, 1, 2), "draft_vocab_size": 60, "norm_before_residual": True},
        {"num_heads": 4, "intermediate_size": 40, "norm_output": True, "num_layers": 2},
    ],
    ids=["plain", "reduced", "layers"],
)
def test_an_eagle3_head(
    options: dict[str, Any], taught_target: str, own_words: Path, tmp_path: Path
) -> None:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    trained = run_training(
        settings("eagle3", taught_target, own_words, tmp_path, steps=6, options=options)
    )
    batch, expected = ours(trained, taught_target)
    theirs = library_head(Eagle3DraftModel, Eagle3SpeculatorConfig, tmp_path, batch)
    found: list[Tensor] = []
    theirs.lm_head.register_forward_hook(lambda _, __, logits: found.append(logits[0]))
    streams = torch.cat([stream[0, :-1] for stream in batch.states.streams], -1)
    with torch.no_grad():
        theirs(
            hidden_states=streams[None],
            input_ids=batch.token_ids[:, 1:],
            document_ids=torch.zeros(1, len(TOKENS) - 1, dtype=torch.long),
            ttt_steps=COUNT,
        )
    assert len(found) == len(expected) == COUNT
    for position, (mine, other) in enumerate(zip(expected, found, strict=True)):
        there = len(TOKENS) - 1 - position
        torch.testing.assert_close(mine[:there], other[:there], atol=1e-3, rtol=0)


def library_head(
    model: Any, config_class: Any, folder: Path, batch: TrainingBatch, **more: Any
) -> Any:
    """The library's own network with the weights of an export."""
    from transformers import LlamaConfig

    config = json.loads((folder / "config.json").read_text())
    layer = LlamaConfig(**{key: config[key] for key in LAYER_KEYS})
    head = library_model(model, config_class, layer, **{k: config[k] for k in HEAD_KEYS}, **more)
    tensors = {
        name.replace("midlayer.", "layers.0."): value
        for name, value in load_file(folder / "model.safetensors").items()
    }
    tensors.setdefault("embed_tokens.weight", batch.target.network.embedding.weight.floats)
    missing, unexpected = head.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert all(name.startswith(("verifier_", "d2t", "t2d")) for name in missing)
    return head


def library_model(model: Any, config_class: Any, layer: Any, **more: Any) -> Any:
    """A network of the library with random weights, in float32."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer._attn_implementation = "eager"
    config = config_class(
        transformer_layer_config=layer,
        speculators_config=SpeculatorsConfig(
            algorithm=config_class.model_fields["speculators_model_type"].default,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=COUNT)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **more,
    )
    return model(config).float()


LAYER_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "vocab_size",
    "hidden_act",
)
HEAD_KEYS = (
    "draft_vocab_size",
    "norm_before_residual",
    "norm_output",
    "eagle_aux_hidden_state_layer_ids",
)


@pytest.mark.parametrize("options", [{}, {"draft_vocab_size": 60, "num_layers": 2}], ids=str)
def test_a_p_eagle_head(
    options: dict[str, Any],
    taught_target: str,
    own_words: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The chains of masks are given, because the library draws them at random."""
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig, core

    trained = run_training(
        settings("p-eagle", taught_target, own_words, tmp_path, steps=6, options=options)
    )
    recipe = trained.recipe
    assert isinstance(recipe, PEagleRecipe)
    batch = batch_of(teacher(taught_target), TOKENS, recipe.vocabulary, recipe.stream_layers)
    rows, _ = sampled_rows(1, len(TOKENS), COUNT, 4)
    with torch.no_grad():
        expected = recipe.logits(batch, rows)[0]
    mask = recipe.mask_token
    theirs = library_head(
        PEagleDraftModel, PEagleSpeculatorConfig, tmp_path, batch, mask_token_id=mask
    )
    # The row of token t is theirs of index t - 1.
    chains = (rows.anchor - 1, rows.depth)
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **_: chains)
    monkeypatch.setattr(core, "compute_metrics", lambda **_: (0.0, {}))
    found: list[Tensor] = []
    theirs.lm_head.register_forward_hook(lambda _, __, logits: found.append(logits[0]))
    streams = torch.cat([stream[0, :-1] for stream in batch.states.streams], -1)
    with torch.no_grad():
        theirs(
            hidden_states=streams[None],
            input_ids=batch.token_ids[:, 1:],
            document_ids=torch.zeros(1, len(TOKENS) - 1, dtype=torch.long),
            verifier_last_hidden_states=batch.states.hidden[:, 1:],
        )
    torch.testing.assert_close(expected, found[0], atol=1e-3, rtol=0)


def test_a_dflash_drafter(
    taught_target: str, own_words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks are given, because the library draws them at random."""
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig, core
    from transformers import Qwen3Config

    given = settings("dflash", taught_target, own_words, tmp_path, steps=6)
    recipe = run_training(given).recipe
    assert isinstance(recipe, DFlashRecipe)
    target = teacher(taught_target)
    batch = batch_of(target, TOKENS, recipe.vocabulary, recipe.stream_layers)
    anchors = torch.tensor([1, 5, 11, 18])
    with torch.no_grad():
        positions = list(recipe.blocks(batch, anchors))
    config = json.loads((tmp_path / "config.json").read_text())
    theirs = library_model(
        DFlashDraftModel,
        DFlashSpeculatorConfig,
        Qwen3Config(**{key: config[key] for key in LAYER_KEYS}),
        draft_vocab_size=config["vocab_size"],
        block_size=config["block_size"],
        aux_hidden_state_layer_ids=config["dflash_config"]["target_layer_ids"],
        mask_token_id=config["dflash_config"]["mask_token_id"],
    )
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embed_tokens.weight"] = target.network.embedding.weight.floats
    tensors["lm_head.weight"] = target.network.head.weight.floats
    missing, unexpected = theirs.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert all(name.startswith(("verifier_", "d2t", "t2d")) for name in missing)
    monkeypatch.setattr(core, "select_anchors", lambda *_: (anchors, anchors > 0))
    with torch.no_grad():
        logits = theirs._backbone_forward(
            hidden_states=torch.cat(batch.states.streams, -1),
            input_ids=batch.token_ids,
            loss_mask=torch.ones(1, len(TOKENS)),
            verifier_last_hidden_states=batch.states.hidden,
            document_ids=torch.zeros(1, len(TOKENS), dtype=torch.long),
            max_anchors=len(anchors),
        )[1]
    blocks = logits.view(len(anchors), config["block_size"], -1)
    for number, position in enumerate(positions, 1):
        torch.testing.assert_close(position.logits, blocks[:, number], atol=1e-3, rtol=0)


def test_an_mtp_module(taught_target: str, own_words: Path, tmp_path: Path) -> None:
    """Only its first position: in later ones the library lets rows attend to other rows' drafts."""
    from speculators.models.mtp import MTPDraftModel

    trained = run_training(settings("mtp", taught_target, own_words, tmp_path, steps=6))
    batch, expected = ours(trained, taught_target)
    theirs = MTPDraftModel.from_pretrained(str(tmp_path)).float()
    with torch.no_grad():
        logits = theirs(input_ids=batch.token_ids, hidden_states=batch.states.hidden)[0]
    assert len(logits) == COUNT
    rows = logits[0].shape[1]
    torch.testing.assert_close(expected[0][:rows], logits[0][0], atol=1e-3, rtol=0)
