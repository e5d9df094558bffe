"""Feed-forward kinds and layer inputs of Gemma 4 equal those of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer, Gemma4TextModel

from slipstream.kernels.experts import Routing, Scores
from slipstream.kernels.norm import Activation
from slipstream.kernels.ops import Ops
from slipstream.kernels.pass_inputs import Paging, PassInputs, RowPlaces
from slipstream.kernels.registry import kernels_for
from slipstream.layers.experts import ExpertNames, ExpertsSpec
from slipstream.layers.layer import BuildContext, FeedForwardSpec, LayerSpec
from slipstream.layers.layer_inputs import LayerInputs, LayerInputsSpec, LayerInputSublayerSpec
from slipstream.layers.mlp import MLPSpec
from slipstream.layers.norm import LayerNorms
from slipstream.layers.parallel_experts import ParallelExpertsSpec
from slipstream.layers.rope import RopeTables
from slipstream.layers.stack import Stack
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.parameter_sources import CheckpointSource
from slipstream.models.precision import in_precision

CPU = torch.device("cpu")
WIDTH, INNER, LAYERS, SIZE, VOCAB, EPS = 36, 40, 3, 12, 29, 1e-6
DENSE = MLPSpec(INNER, activation=Activation.GELU_TANH)
EXPERTS = ExpertsSpec(
    routing=Routing(5, 2, Scores.CHOSEN_SOFTMAX),
    intermediate_size=16,
    activation=Activation.GELU_TANH,
    scaled_router=True,
    gained=True,
    names=ExpertNames(router="router.proj", experts="experts"),
)
PARALLEL = ParallelExpertsSpec(
    dense=DENSE,
    experts=EXPERTS,
    experts_norm="pre_feedforward_layernorm_2",
    post_dense="post_feedforward_layernorm_1",
    post_experts="post_feedforward_layernorm_2",
)
AFTER = "post_feedforward_layernorm"
EXPERT_KEYS = {
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
}
KINDS: dict[str, tuple[FeedForwardSpec, str, dict[str, Any]]] = {
    "experts": (PARALLEL, AFTER, EXPERT_KEYS),
    "input": (
        LayerInputSublayerSpec(DENSE, 1, SIZE, AFTER),
        "post_per_layer_input_norm",
        {"hidden_size_per_layer_input": SIZE},
    ),
    "both": (
        LayerInputSublayerSpec(PARALLEL, 1, SIZE, AFTER),
        "post_per_layer_input_norm",
        {"hidden_size_per_layer_input": SIZE, **EXPERT_KEYS},
    ),
}


class Nothing(nn.Module):
    """Takes the place of attention."""

    def forward(self, hidden_states: Tensor, **others: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


def settings(**more: Any) -> Gemma4TextConfig:
    keys: dict[str, Any] = {"global_head_dim": 8, "hidden_size_per_layer_input": 0, **more}
    return Gemma4TextConfig(
        vocab_size=VOCAB,
        vocab_size_per_layer_input=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        rms_norm_eps=EPS,
        **keys,
    )


def randomise(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(4)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.4
        parameter.data = noise * scale + (1.0 if parameter.ndim == 1 else 0.0)
        if name == "pre_feedforward_layernorm_2.weight":
            parameter.data[3] = 0.0  # of which the router must not hear


def built(folder: Path, tensors: dict[str, Tensor], ops: Ops) -> tuple[BuildContext, Any]:
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text("{}")
    files = CheckpointSource(Checkpoint(folder), torch.float32, CPU)
    return BuildContext(in_precision(files, None, ops), WIDTH, RopeTables(8, CPU)), files


def inputs(rows: int, own: Tensor | None = None) -> PassInputs:
    none = torch.zeros(1, dtype=torch.int64)
    paging = Paging(none.view(1, 1).int(), none, none.new_full((rows,), -1))
    places = RowPlaces(torch.tensor([0, rows]), torch.arange(rows))
    return PassInputs(places, paging, layer_inputs=own)


@pytest.mark.parametrize("kind", KINDS)
def test_feed_forward_kinds(kind: str, tmp_path: Path) -> None:
    spec, after, keys = KINDS[kind]
    theirs = Gemma4TextDecoderLayer(settings(**keys), 1).eval()
    theirs.add_module("self_attn", Nothing())
    randomise(theirs)
    tensors = {
        f"model.layers.1.{name}": value
        for name, value in theirs.state_dict().items()
        if not name.startswith(("input_layernorm", "post_attention", "layer_scalar"))
    }
    ops = kernels_for(CPU, torch.float32).network
    context, files = built(tmp_path, tensors, ops)
    norms = LayerNorms(EPS, feed_forward="pre_feedforward_layernorm", post_feed_forward=after)
    layer = LayerSpec(None, spec, norms).build(context, "model.layers.1")
    files.finish()
    x, own = torch.randn(7, WIDTH), torch.randn(7, LAYERS, SIZE)
    with torch.no_grad():
        expected = theirs(x[None], own[None, :, 1])[0]
    found, _ = Stack(ops, [layer], None)([x], inputs(7, own), [])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_layer_inputs(tmp_path: Path) -> None:
    theirs = Gemma4TextModel(settings(hidden_size_per_layer_input=SIZE)).eval()
    randomise(theirs)
    tensors = {
        f"model.{name}": value
        for name, value in theirs.state_dict().items()
        if "layers." not in name
    }
    tensors = {name: value for name, value in tensors.items() if "per_layer" in name}
    ops = kernels_for(CPU, torch.float32).network
    context, files = built(tmp_path, tensors, ops)
    ours = LayerInputs(LayerInputsSpec(SIZE, LAYERS), context, VOCAB, EPS)
    files.finish()
    ids, x = torch.randint(0, VOCAB, (9,)), torch.randn(9, WIDTH)
    with torch.no_grad():
        of_tokens = theirs.get_per_layer_inputs(ids[None], None)
        expected = theirs.project_per_layer_inputs(x[None], of_tokens)[0]
    torch.testing.assert_close(ours(ops, ids, x), expected, rtol=1e-5, atol=1e-5)
