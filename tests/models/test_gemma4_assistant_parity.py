"""The assistant's network against the transformers library's, from a checkpoint that it wrote."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.reference import REFERENCE
from slipstream.layers.embedding import Embedding
from slipstream.layers.rope import RopeConfig, rope_table
from slipstream.models.loading import LoadOptions
from slipstream.speculative.gemma4_assistant.config import read_assistant_config
from slipstream.speculative.gemma4_assistant.network import AssistantNetwork, load_assistant
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.loading import HeadContext
from tests.drafters.trainable import Trainable
from tests.pass_inputs import pass_inputs

VOCAB, BACKBONE, KNOWN, BLOCK_SIZE = 96, 40, 29, 8
KINDS = ["sliding_attention", "full_attention"]  # layers of a target; of an assistant, below
HEAD_DIMS, KV_HEADS = (16, 32), (2, 1)
OPTIONS = LoadOptions(
    dtype=torch.float32, device=torch.device("cpu"), load_format="auto", max_positions=64
)


@pytest.fixture(autouse=True)
def all_layers_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The property's older value: newer versions read an attribute that is missing (5.23)."""
    modes = property(lambda config: ["reuse"] * config.num_hidden_layers)
    monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", modes)


def export(folder: Path, ordered: bool) -> Gemma4AssistantForCausalLM:
    """Write a head as the library does: the last layer has other head sizes and partial rope."""
    text = Gemma4TextConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS[0],
        head_dim=HEAD_DIMS[0],
        global_head_dim=HEAD_DIMS[1],
        num_global_key_value_heads=KV_HEADS[1],
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        num_kv_shared_layers=4,
        sliding_window=512,
        layer_types=[KINDS[0]] * 3 + [KINDS[1]],
    )
    config = Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=BACKBONE,
        use_ordered_embeddings=ordered,
        num_centroids=16,
        centroid_intermediate_top_k=4,
    )
    torch.manual_seed(3)
    model = Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
        if ordered:
            model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    model.save_pretrained(folder)
    return model


def cached() -> tuple[list[tuple[Tensor, Tensor]], dict[str, tuple[Tensor, Tensor]]]:
    """Random keys and values in pages, and again as the library passes them."""
    generator = torch.Generator().manual_seed(5)
    pages, shared = [], {}
    for kind, dim, heads in zip(KINDS, HEAD_DIMS, KV_HEADS, strict=True):
        pair = [torch.randn(KNOWN, heads, dim, generator=generator) for _ in range(2)]
        shared[kind] = (pair[0].transpose(0, 1)[None], pair[1].transpose(0, 1)[None])
        stored = torch.zeros(2, 8 * BLOCK_SIZE, heads, dim)
        stored[:, :KNOWN] = torch.stack(pair)
        key, value = stored.view(2, 8, BLOCK_SIZE, heads, dim)
        pages.append((key.flip(0), value.flip(0)))
    return pages, shared


def one_row() -> PassInputs:
    return pass_inputs(
        query_start=torch.tensor([0, 1]),
        context_lens=torch.tensor([KNOWN]),
        block_tables=torch.arange(8).flip(0)[None].int(),
        positions=torch.tensor([KNOWN]),
        slots=torch.tensor([-1]),
    )


@pytest.mark.parametrize(("factor", "rotated"), [(1.0, 0.25), (4.0, 0.4), (2.0, 1.0)])
def test_proportional_rope_turns_the_first_pairs(factor: float, rotated: float) -> None:
    rope = {"rope_type": "proportional", "rope_theta": 1e4, "factor": factor}
    rope["partial_rotary_factor"] = rotated
    config = LlamaConfig(num_attention_heads=1, head_dim=24, rope_parameters=rope)
    frequencies, scale = ROPE_INIT_FUNCTIONS["proportional"](config, OPTIONS.device)
    assert scale == 1.0
    turns = torch.outer(torch.arange(50.0), frequencies)
    table = rope_table(
        24, RopeConfig(1e4, "proportional", factor, rotated=rotated), 50, OPTIONS.device
    )
    torch.testing.assert_close(table, torch.cat((turns.cos(), turns.sin()), -1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("ordered", [False, True])
def test_every_parameter_gets_a_gradient(ordered: bool, tmp_path: Path) -> None:
    """Under the names of the checkpoint; the cache of the target stays as it is."""
    export(tmp_path, ordered)
    stored = load_file(tmp_path / "model.safetensors")
    ordering = stored.pop("masked_embedding.token_ordering", torch.arange(VOCAB))
    source = Trainable(stored)
    config = read_assistant_config(HeadCheckpoint(tmp_path))
    context = HeadContext(REFERENCE, source, BACKBONE, OPTIONS)
    network = AssistantNetwork(context, config, [0, 0, 0, 1], ordering)
    table = torch.randn(VOCAB, BACKBONE, generator=torch.Generator().manual_seed(6))
    network.share(Embedding(Trainable({"target.weight": table}), "target", VOCAB, BACKBONE), None)  # type: ignore[arg-type]
    pages, _ = cached()
    before = [page.clone() for layer in pages for page in layer]
    token, hidden = torch.tensor([17]), torch.randn(1, BACKBONE)
    loss = torch.zeros(())
    for _ in range(2):
        normed, hidden = network(token, hidden, one_row(), pages)
        logits = network.logits(normed)
        token = logits.argmax(-1)
        loss = loss + torch.nn.functional.cross_entropy(logits, token)
    loss.backward()
    for page, expected in zip((page for layer in pages for page in layer), before, strict=True):
        assert torch.equal(page, expected)
    for name, parameter in source.parameters.items():
        # What chooses the parts of the vocabulary is no part of a logit.
        assert (parameter.grad is None) == ("centroids" in name), name
    assert source.parameters.keys() == {name.removeprefix("model.") for name in stored}


@pytest.mark.parametrize("ordered", [False, True])
def test_drafts_are_those_of_the_library(ordered: bool, tmp_path: Path) -> None:
    theirs = export(tmp_path, ordered)
    checkpoint = HeadCheckpoint(tmp_path)
    config = read_assistant_config(checkpoint)
    target: Any = SimpleNamespace(layers=config.layers.layers[-2:], hidden_size=BACKBONE)
    network = load_assistant(checkpoint, config, target, OPTIONS)
    generator = torch.Generator().manual_seed(6)
    table = torch.randn(VOCAB, BACKBONE, generator=generator)
    network.share(Embedding(Trainable({"target.weight": table}), "target", VOCAB, BACKBONE), None)  # type: ignore[arg-type]
    pages, shared = cached()
    hidden = torch.randn(1, BACKBONE, generator=generator)
    token = torch.tensor([17])
    expected = hidden
    with torch.inference_mode():
        for _ in range(3):
            embedded = table[token] * BACKBONE**0.5
            out = theirs(
                inputs_embeds=torch.cat((embedded, expected), -1)[None],
                position_ids=torch.tensor([[KNOWN]]),
                shared_kv_states=shared,
            )
            normed, hidden = network(token, hidden, one_row(), pages)
            expected = out.last_hidden_state[0]
            torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)
            logits, reference = network.logits(normed), out.logits[0]
            seen = logits.isfinite()
            assert seen.all() != ordered
            torch.testing.assert_close(logits[seen], reference[seen], atol=1e-4, rtol=1e-4)
            assert logits.argmax() == reference.argmax()
            token = logits.argmax(-1)
