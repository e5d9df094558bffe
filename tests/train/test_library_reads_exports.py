"""What training exports, read by the model classes of the speculators library where it is there.

They must say what the network in training says. The library is no dependency of the tests: it pulls
a torch of its own (`pip install --no-deps speculators loguru pydantic-settings datasets` will do).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.train.recipe_eagle3 import Eagle3Recipe
from slipstream.train.recipe_mtp import MtpRecipe
from slipstream.train.run import Trained, run_training
from slipstream.train.unroll import unroll
from tests.train.lessons import batch_of, settings, teacher

pytest.importorskip("speculators.models.eagle3", reason="the speculators package is not here")
pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = torch.randint(1, 96, (24,), generator=torch.Generator().manual_seed(3)).tolist()
PLACES = 3


def ours(trained: Trained, target: str) -> tuple[Any, list[Tensor]]:
    """What the network in training makes of a text, and the logits of its places."""
    recipe = trained.recipe
    assert isinstance(recipe, Eagle3Recipe | MtpRecipe)
    batch = batch_of(teacher(target), TOKENS, recipe.columns, recipe.stream_layers)
    layers = recipe.num_layers if isinstance(recipe, Eagle3Recipe) else 1
    with torch.no_grad():
        places = list(unroll(recipe.network, layers, batch, PLACES))
    return batch, [place.logits for place in places]


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
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    trained = run_training(
        settings("eagle3", taught_target, own_words, tmp_path, steps=6, options=options)
    )
    batch, expected = ours(trained, taught_target)
    config = json.loads((tmp_path / "config.json").read_text())
    layer = LlamaConfig(**{key: config[key] for key in LAYER_KEYS})
    layer._attn_implementation = "eager"
    theirs = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=PLACES)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=[]),
            ),
            **{key: config[key] for key in HEAD_KEYS},
        )
    )
    stored = load_file(tmp_path / "model.safetensors")
    tensors = {name.replace("midlayer.", "layers.0."): value for name, value in stored.items()}
    tensors["embed_tokens.weight"] = batch.target.network.embedding.weight
    missing, unexpected = theirs.load_state_dict(
        {
            name: value.float() if value.is_floating_point() else value
            for name, value in tensors.items()
        },
        strict=False,
    )
    assert not unexpected
    assert all(name.startswith(("verifier_", "d2t", "t2d")) for name in missing)
    found: list[Tensor] = []
    theirs.lm_head.register_forward_hook(lambda _, __, logits: found.append(logits[0]))
    streams = torch.cat([stream[0, :-1] for stream in batch.seen.streams], -1)
    with torch.no_grad():
        theirs(
            hidden_states=streams[None],
            input_ids=batch.token_ids[:, 1:],
            document_ids=torch.zeros(1, len(TOKENS) - 1, dtype=torch.long),
            ttt_steps=PLACES,
        )
    assert len(found) == len(expected) == PLACES
    for place, (mine, other) in enumerate(zip(expected, found, strict=True)):
        there = len(TOKENS) - 1 - place
        torch.testing.assert_close(mine[:there], other[:there], atol=1e-3, rtol=0)


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


def test_an_mtp_module(taught_target: str, own_words: Path, tmp_path: Path) -> None:
    """Its first place; in later ones the library lets a row see what others drafted."""
    from speculators.models.mtp import MTPDraftModel

    trained = run_training(settings("mtp", taught_target, own_words, tmp_path, steps=6))
    batch, expected = ours(trained, taught_target)
    theirs = MTPDraftModel.from_pretrained(str(tmp_path)).float()
    with torch.no_grad():
        logits = theirs(input_ids=batch.token_ids, hidden_states=batch.seen.hidden)[0]
    assert len(logits) == PLACES
    rows = logits[0].shape[1]
    torch.testing.assert_close(expected[0][:rows], logits[0][0], atol=1e-3, rtol=0)
