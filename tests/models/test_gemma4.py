"""Gemma 4's configs and checkpoints beyond parity: what is kept, passed over and refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.core.errors import CheckpointError
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.layers.stack import Stack
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder import Decoder
from tests.models.gemma_cases import GEMMA
from tests.models.parity_cases import Case
from tests.models.test_parity import load, make_prompts, runner_logits, write_checkpoint

TWO_HEADS, SHARED, *_ = (case for case in GEMMA if case.architecture == "Gemma4")


def logits(network: Decoder) -> torch.Tensor:
    return torch.cat(runner_logits(network, make_prompts(), (50, 7)))


def test_the_language_model_of_a_wrapper(tmp_path: Path) -> None:
    """Beside towers, and with keys and values for layers that read those of another."""
    plain = write_checkpoint(SHARED, tmp_path / "plain")
    expected = logits(load(plain))
    text = json.loads((plain / "config.json").read_text())
    names = ["Gemma4ForConditionalGeneration"]
    whole = {"architectures": names, "model_type": "gemma4", "text_config": text}
    tensors = {
        name.replace("model.", "model.language_model."): tensor
        for name, tensor in load_file(plain / "model.safetensors").items()
    }
    attention = "model.language_model.layers.3.self_attn"
    for module in ("k_proj", "v_proj", "k_norm"):
        tensors[f"{attention}.{module}.weight"] = torch.ones(3)
    for tower in ("vision_tower", "audio_tower", "embed_vision", "embed_audio"):
        tensors[f"model.{tower}.x.weight"] = torch.ones(3)
    folder = tmp_path / "whole"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(whole))
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(logits(load(folder)), expected)


def test_layers_keep_what_their_own_heads_make(tmp_path: Path) -> None:
    layout = load(write_checkpoint(TWO_HEADS, tmp_path / "1")).config.cache_layout(torch.float32)
    sliding, full = 2 * 2 * 16 * 4, 2 * 1 * 24 * 4
    assert [spec.bytes_per_token for spec in layout.specs] == [sliding, full, full]
    assert (layout.windowed_bytes_per_token, layout.window(100)) == (sliding, 9)
    layout = load(write_checkpoint(SHARED, tmp_path / "2")).config.cache_layout(torch.float32)
    assert [spec.bytes_per_token for spec in layout.specs] == [sliding, 2 * full, 0, 0]
    assert layout.windowed_bytes_per_token == sliding


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True, "num_experts": None}, '"num_experts" is missing'),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 9}, "must be vocab_size"),
        ({"hidden_size_per_layer_input": -8}, "at least 0"),
        ({"use_bidirectional_attention": "all"}, "only causal models"),
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "must end with full"),
        ({"num_kv_shared_layers": 3}, "is 3 of 4 layers, but each type needs"),
        ({"sliding_window": 0}, "must be positive"),
        ({"per_layer_config": {"1": {"rope": 3}}}, "must give head_dim or num_key_value_heads"),
        ({"rope_parameters": {"chunked_attention": {}}}, "one object for each type"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = json.loads((write_checkpoint(SHARED, tmp_path) / "config.json").read_text())
    with pytest.raises(CheckpointError, match=message):
        read_decoder_config({**config, **changes})


def test_keys_of_published_configs_say_the_same(tmp_path: Path) -> None:
    """Sizes of heads by type of layer, and what missing keys mean."""
    folder = write_checkpoint(TWO_HEADS, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for key in ("per_layer_config", "rope_parameters", "num_kv_shared_layers"):
        del config[key]
    published = {**config, "global_head_dim": 24, "num_global_key_value_heads": 1}
    assert read_decoder_config(published) == read_decoder_config(Checkpoint(folder))
    ungated = read_decoder_config({**published, "attention_k_eq_v": False})
    assert [layer.mixer.num_kv_heads for layer in ungated.layers] == [2, 2, 2]  # type: ignore[union-attr]
    del published["layer_types"]
    assert read_decoder_config(published).sliding_windows == (9, 9, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [TWO_HEADS, SHARED], ids=str)
def test_rows_beside_an_image_have_the_bits_that_they_have_alone(
    case: Case, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass in which layers with a window see more is cut between layers."""
    network, prompts = load(write_checkpoint(case, tmp_path), dtype), make_prompts()
    expected = torch.cat(runner_logits(network, prompts, (50, 7)))
    run, passes = Stack.__call__, 0

    def sees_itself(self: Stack, sources: Any, inputs: PassInputs, *rest: Any) -> Any:
        nonlocal passes
        passes += 1
        sees = replace(inputs.sees, last_seen=inputs.rows.in_context)
        return run(self, sources, replace(inputs, sees=sees), *rest)

    monkeypatch.setattr(Stack, "__call__", sees_itself)
    assert torch.equal(torch.cat(runner_logits(network, prompts, (50, 7))), expected)
    assert passes
