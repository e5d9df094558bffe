"""EAGLE configs in the forms that trainers and libraries have given them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from slipstream import CheckpointError, SamplingParams
from slipstream.speculative.eagle3.network import read_eagle3_config
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from tests.drafters.broken import make, write_config
from tests.drafters.heads import as_pickle, as_wrapper, write_eagle1, write_eagle3

LONG = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


AUX = "eagle_aux_hidden_state_layer_ids"


def test_a_kind_that_nobody_knows(tiny_target: str, tmp_path: Path) -> None:
    head = write_eagle1(tmp_path, tiny_target)
    write_config(head, speculators_model_type="sponge")
    with pytest.raises(CheckpointError, match="kind sponge, which is not supported"):
        make(tiny_target, head)


def test_pickles_that_hold_more_than_tensors_are_not_run(tiny_target: str, tmp_path: Path) -> None:
    head = as_pickle(write_eagle3(tmp_path, tiny_target, fit=False))
    torch.save({"fc.weight": Path("/")}, head / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot be read as a file of tensors alone"):
        make(tiny_target, head)
    (head / "pytorch_model.bin").write_bytes(b"PK nothing")
    with pytest.raises(CheckpointError, match="download it again"):
        make(tiny_target, head)


NESTED = [([1, 17, 33], (2, 18, 34)), ([2, 30, 58], (2, 30, 58)), ([24, 30, 36], (24, 30, 36))]


@pytest.mark.parametrize(("stated", "read"), NESTED)
def test_nested_layer_ids_have_two_meanings(
    stated: list[int], read: tuple[int, ...], tiny_target: str, tmp_path: Path
) -> None:
    head = write_eagle3(tmp_path, tiny_target, fit=False)
    write_config(head, eagle_aux_hidden_state_layer_ids="drop", eagle_config={AUX: stated})
    assert read_eagle3_config(HeadCheckpoint(head)).entered_layers == read
    write_config(head, eagle_config="drop", **{AUX: stated})
    assert read_eagle3_config(HeadCheckpoint(head)).entered_layers == tuple(stated)


def test_the_usual_layers_and_flags(tiny_target: str, tmp_path: Path) -> None:
    head = write_config(write_eagle3(tmp_path, tiny_target, fit=False), **{AUX: None})
    config = read_eagle3_config(HeadCheckpoint(head))
    assert config.stream_layers(36) == (2, 18, 33)
    assert config.stream_layers(32) == (2, 16, 29)
    assert not config.norm_before_residual
    assert config.layers.rope.theta == 10000.0
    as_wrapper(head)
    assert read_eagle3_config(HeadCheckpoint(head)).norm_before_residual


def test_a_wrapper_leaves_out_what_transformers_has_by_default(tmp_path: Path) -> None:
    """The library writes the head of Qwen3-8B without its width, which is the default."""
    layers = Qwen3Config(num_hidden_layers=1, num_key_value_heads=8, intermediate_size=12288)
    wrapper = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layers.to_diff_dict(),
        "draft_vocab_size": 32000,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": [2, 18, 33],
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    config = read_eagle3_config(HeadCheckpoint(tmp_path))
    shape = config.layers
    assert (shape.hidden_size, shape.vocab_size, shape.num_layers) == (4096, 151936, 1)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (32, 8, 128)
    assert shape.attention.qk_norm
    assert config.fc_norm
    assert config.norm_output


def test_windows_that_are_written_and_not_used(tiny_target: str, tmp_path: Path) -> None:
    """The speculators library writes a size for every head; the types of layers say what counts."""
    windows: dict[str, Any] = {"use_sliding_window": False, "sliding_window": 2048}
    head = write_eagle3(tmp_path, tiny_target, fit=False, **windows)
    write_config(head, layer_types=["full_attention"])
    assert read_eagle3_config(HeadCheckpoint(as_wrapper(head))).layers.sliding_windows == (None,)
    write_config(head, transformer_layer_config={"layer_types": ["sliding_attention"]})
    with pytest.raises(CheckpointError, match='"layer_types" has sliding_attention, but'):
        read_eagle3_config(HeadCheckpoint(head))


@pytest.mark.parametrize("first", [0, 1])
def test_a_head_slides_from_the_layer_that_its_config_names(
    first: int, tiny_target: str, tmp_path: Path
) -> None:
    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 6}
    head = write_eagle3(tmp_path, tiny_target, fit=False, max_window_layers=first, **windows)
    found = read_eagle3_config(HeadCheckpoint(head)).layers.sliding_windows
    assert found == ((None,) if first else (6,))


@pytest.mark.parametrize("form", ["nested", "mixtral"])
def test_other_forms_of_eagle1_configs(form: str, tiny_target: str, tmp_path: Path) -> None:
    """Those of old conversions, and a llama layer under the name of a mixture of experts."""
    head = write_eagle1(tmp_path, tiny_target)
    plain = make(tiny_target, head).generate({"prompt_token_ids": [4, 9]}, LONG)[0]
    file = head / "config.json"
    config = json.loads(file.read_text())
    if form == "nested":
        config = {"model_type": "eagle", "model": config, "eagle_fc_bias": True}
        config |= {"architectures": ["EagleModel"], "truncated_vocab_size": 96}
    else:
        config |= {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    file.write_text(json.dumps(config))
    other = make(tiny_target, head).generate({"prompt_token_ids": [4, 9]}, LONG)[0]
    assert other.metrics.num_drafts > 0
    ours, theirs = other.metrics, plain.metrics
    assert ours.num_accepted_tokens_per_pos == theirs.num_accepted_tokens_per_pos
