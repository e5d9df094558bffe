"""Gated delta nets in fewer bits, and at random: gates stay whole beside rounded matrices."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.layers.delta_net import DeltaNet, DeltaNetSpec
from slipstream.layers.parameters import ROWS, Share
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.loading import LoadOptions, decoder_bytes, load_decoder
from slipstream.models.parameter_sources import CheckpointSource
from tests.float4_checkpoints import modelopt
from tests.hybrid_checkpoints import COMMON, write_hybrid
from tests.models.delta_cases import DELTA, FULL, delta
from tests.models.test_quantized_experts import assert_same_logits, quantised
from tests.quantized_checkpoints import Format, float8, gptq, int_tensors, write_whole

CPU = torch.device("cpu")
# Rows of matrices fill the words of every format.
WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 97,
    **delta(4, 8, 8, 16, DELTA, DELTA, FULL, DELTA),
}
FORMATS: dict[str, Format] = {
    "fp8": float8(block=128),
    "int8": int_tensors(),
    "gptq": gptq(group=32),
    "modelopt-fp8": modelopt("FP8"),
}
PARTS = ("_proj", "in_proj", "out_proj")


def load(folder: str | Path, **options: Any) -> Decoder:
    given = {"load_format": "auto", "max_positions": 192, **options}
    return load_decoder(Checkpoint(Path(folder)), LoadOptions(torch.float32, CPU, **given))


def delta_net(network: Decoder) -> DeltaNet:
    mixer = network.layers[0].mixer
    assert isinstance(mixer, DeltaNet)
    return mixer


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next"])
def test_gates_are_not_rounded(kind: str, quantization: str, tmp_path: Path) -> None:
    folder = write_hybrid(tmp_path, kind, **WIDE)
    whole, rounded = delta_net(load(folder)), delta_net(load(folder, quantization=quantization))
    assert whole.gates is None
    assert rounded.gates is not None
    rows = rounded.inputs.weight.shape[0]
    found, expected = rounded.gates.weight, whole.inputs.weight.rows(rows)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(found.linear(x, None), expected.linear(x, None))
    assert rounded.inputs.weight.nbytes < rows * 64 * 2
    near = rounded.inputs.weight.linear(x, None) - whole.inputs.weight.rows(0, rows).linear(x, None)
    assert 0 < near.abs().max() < 1


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("kind", "gates"), [("qwen3_5_text", "whole"), ("qwen3_next", "quantised")]
)
def test_stored_numbers_give_their_logits(name: str, gates: str, kind: str, tmp_path: Path) -> None:
    """Whatever is picked out of packed projections, and whether gates are quantised or not."""
    folder = Path(write_hybrid(tmp_path / "quantised", kind, **WIDE))
    left = ("in_proj_b", "in_proj_a", "mlp", "lm_head") if gates == "whole" else ("mlp", "lm_head")

    def is_quantised(tensor: str) -> bool:
        return any(part in tensor for part in PARTS) and not any(part in tensor for part in left)

    meant = quantised(folder, FORMATS[name], is_quantised, {})
    assert (delta_net(load(folder)).gates is None) == (gates == "quantised")
    assert_same_logits(folder, write_whole(tmp_path / "whole", folder, meant), tolerance=1e-3)


@pytest.mark.parametrize("load_format", ["dummy", "twin"])
def test_random_weights_make_text_that_goes_on(load_format: str, tmp_path: Path) -> None:
    config = {**COMMON, **WIDE, "architectures": ["Qwen3_5ForCausalLM"]}
    config |= {"model_type": "qwen3_5_text", "vocab_size": 192, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    network = load(tmp_path, load_format=load_format)
    checkpoint = Checkpoint(tmp_path)
    options = LoadOptions(torch.float32, CPU, load_format, 192)
    planned = decoder_bytes(checkpoint, read_decoder_config(checkpoint), options)
    stored: list[Any] = [network.head.weight, network.embedding.weight]
    for layer in network.layers:
        mixer: Any = layer.mixer
        first = mixer.inputs if isinstance(mixer, DeltaNet) else mixer.qkv
        if isinstance(mixer, DeltaNet):
            stored.append(mixer.heads.taps)
        part: Any = layer.feed_forward
        stored += [it.weight for it in (first, mixer.output, part.inner, part.down)]
    assert planned == sum(4 * prod(weight.shape) for weight in stored)
    llm = LLM(str(tmp_path), load_format=load_format, skip_tokenizer_init=True, num_kv_blocks=64)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    output = llm.generate({"prompt_token_ids": list(range(3, 23))}, params)[0].outputs[0]
    if load_format == "twin":
        assert len(set(output.token_ids)) > 10
    norms = network.norm.weight, delta_net(network).norm.weight
    assert all(bool((weight == 1).all()) for weight in norms)


def test_rows_of_one_tensor_are_not_drawn_alike(tmp_path: Path) -> None:
    """Queries and keys of a twin are in one tensor, but get different random numbers."""
    config = {**COMMON, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    heads = delta_net(load(tmp_path, load_format="twin")).heads
    rows = heads.num_key_heads * heads.key_dim
    assert not torch.equal(heads.taps[:rows], heads.taps[rows : 2 * rows])


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next"])
def test_ranks_share_whole_heads(kind: str, tmp_path: Path) -> None:
    """Rows of a key head and of its value heads go to one rank, from packed tensors too."""
    folder = write_hybrid(tmp_path, kind)
    spec = read_decoder_config(Checkpoint(Path(folder))).layers[0].mixer
    assert isinstance(spec, DeltaNetSpec)
    name = "model.layers.0.linear_attn"
    parts = [
        replace(part, name=f"{part.name}.weight", split=ROWS)
        for part in spec.projections(name) + spec.gates(name)
    ]
    whole, *own = (
        CheckpointSource(Checkpoint(Path(folder)), torch.float32, CPU, share=share).matrix(
            parts, 48
        )
        for share in (Share(), Share(0, 2), Share(1, 2))
    )
    blocks = [block.chunk(2) for block in whole.split([part.rows for part in parts])]
    for rank, found in enumerate(own):
        assert torch.equal(found, torch.cat([block[rank] for block in blocks]))
