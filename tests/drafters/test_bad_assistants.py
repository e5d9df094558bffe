"""Assistants that do not fit, or are broken: one sentence that names the cause."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM, CheckpointError, SamplingParams, UsageError
from slipstream.layers.rope import RopeConfig
from slipstream.speculative.catalogue import recognise
from slipstream.speculative.gemma4_assistant.config import read_assistant_config
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from tests.checkpoints import write_qwen3
from tests.drafters.assistants import FULL, SLIDING, write_assistant

PARAMS = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=1)
KINDS: list[dict[str, Any]] = [
    {"model_type": "gemma4_assistant"},
    {"model_type": "gemma4_unified_assistant"},
    {"architectures": ["Gemma4AssistantForCausalLM"]},
]


@pytest.mark.parametrize("config", KINDS, ids=str)
def test_recognition(config: dict[str, Any]) -> None:
    assert recognise(config, ()) == "gemma4_assistant"


def make(target: str, folder: Path, **options: Any) -> LLM:
    config = {"model": str(folder), **options}
    return LLM(target, speculative_config=config, skip_tokenizer_init=True, num_kv_blocks=16)


def write_config(folder: Path, text: dict[str, Any] | None = None, **changes: Any) -> Path:
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    config["text_config"] = {**config["text_config"], **(text or {})}
    file.write_text(json.dumps(config))
    return folder


ROPE = {"rope_type": "default", "rope_theta": 1e6}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"backbone_hidden_size": 64}, "of 64 numbers and the target's have 48"),
    "vocabulary": ({"text": {"vocab_size": 99}}, "vocabulary of 99 tokens"),
    "head size": (
        {"text": {"global_head_dim": 32}},
        "full attention read 2 heads of 32 numbers, and the target's cache has 2 of 16",
    ),
    "key heads": ({"text": {"num_global_key_value_heads": 1}}, "read 1 heads of 16 numbers"),
    "rope": ({"text": {"rope_parameters": {FULL: ROPE}}}, r"rope of theta 1e\+06 and kind default"),
    "partial rope": ({"text": {"rope_parameters": None}}, "kind proportional"),
    "sliding": ({"text": {"layer_types": [SLIDING, FULL]}}, "sliding .* target, which has none"),
    "kinds": ({"text": {"layer_types": [FULL]}}, "must name 2 layers"),
    "unshared": ({"text": {"num_kv_shared_layers": 1}}, "has no keys and values of its own"),
    "mixture": ({"text": {"enable_moe_block": True}}, "enable_moe_block.* only false"),
    "per layer": ({"text": {"hidden_size_per_layer_input": 256}}, "only 0 is supported"),
    "both ways": ({"text": {"use_bidirectional_attention": "all"}}, "only causal targets"),
    "activation": ({"text": {"hidden_activation": "silu"}}, "only .gelu_pytorch_tanh"),
    "heads": ({"text": {"num_attention_heads": 3}}, "must be a multiple"),
    "window": ({"text": {"sliding_window": 0}}, "sliding_window.* must be positive"),
    "listed": ({"text": {"per_layer_config": {"1": {"spin": 3}}}}, "per_layer_config.* must give"),
    "yarn": (
        {"text": {"rope_parameters": {FULL: {**ROPE, "rope_type": "yarn"}}}},
        "only default, linear and proportional",
    ),
    "turned": (
        {"text": {"rope_parameters": {FULL: {**ROPE, "partial_rotary_factor": 0.5}}}},
        "goes with proportional rope",
    ),
    "unknown": ({"spin": 3}, '"spin" is unknown'),
    "unknown within": ({"text": {"spin": 3}}, '"text_config.spin" is unknown'),
    "untied": ({"tie_word_embeddings": False}, "only true is supported"),
    "centroids": (
        {"use_ordered_embeddings": True, "num_centroids": 7},
        "must divide the vocabulary of 96",
    ),
    "ordering": ({"use_ordered_embeddings": True, "num_centroids": 32}, "token_ordering of 96"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_config_that_does_not_fit(name: str, tiny_target: str, tmp_path: Path) -> None:
    changes, message = WRONG[name]
    folder = write_assistant(tmp_path, tiny_target)
    with pytest.raises(CheckpointError, match=message) as caught:
        make(tiny_target, write_config(folder, **changes))
    assert "\n" not in str(caught.value)


def test_tensors_that_do_not_fit(tiny_target: str, tmp_path: Path) -> None:
    def edited(name: str, drop: str | None = None, **tensors: torch.Tensor) -> Path:
        folder = write_assistant(tmp_path / name, tiny_target, centroids=(16, 4))
        file = folder / "model.safetensors"
        weights = {key: value for key, value in load_file(file).items() if key != drop}
        save_file(weights | tensors, file)
        return folder

    ordering = "masked_embedding.token_ordering"
    with pytest.raises(CheckpointError, match=r"no tensor pre_projection.weight"):
        make(tiny_target, edited("none", "pre_projection.weight"))
    key = {"model.layers.0.self_attn.k_proj.weight": torch.ones(3)}
    with pytest.raises(CheckpointError, match=r"does not use \(model.layers.0.self_attn.k_proj"):
        make(tiny_target, edited("keys", **key))
    with pytest.raises(CheckpointError, match="must hold every token id once"):
        make(tiny_target, edited("twice", **{ordering: torch.arange(96).clamp_min(1)}))
    with pytest.raises(CheckpointError, match=r"needs a tensor .*token_ordering of 96 integers"):
        make(tiny_target, edited("short", **{ordering: torch.arange(95)}))
    folder = edited("suppressed")
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": [96]}))
    with pytest.raises(CheckpointError, match="list of token ids below 96"):
        make(tiny_target, folder)


def test_a_tied_head_may_be_stored_twice(tiny_target: str, tmp_path: Path) -> None:
    folder = write_assistant(tmp_path, tiny_target)
    weights = load_file(folder / "model.safetensors")
    copy = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    save_file(weights | copy, folder / "model.safetensors")
    output = make(tiny_target, folder).generate({"prompt_token_ids": [4, 9]}, PARAMS)
    assert output[0].metrics.num_drafts > 0


def test_options(tiny_target: str, tmp_path: Path) -> None:
    folder = write_assistant(tmp_path, tiny_target)
    with pytest.raises(UsageError, match="an assistant reads the target's cache; leave dtype out"):
        make(tiny_target, folder, dtype="bfloat16")
    method = {"method": "gemma4_assistant"}
    with pytest.raises(UsageError, match="needs model"):
        LLM(tiny_target, speculative_config=method, skip_tokenizer_init=True)
    with pytest.raises(CheckpointError, match="it is one for gemma4_assistant"):
        make(tiny_target, folder, method="eagle")
    with pytest.raises(UsageError, match="parallel_drafting=True is not supported"):
        make(tiny_target, folder, parallel_drafting=True)


def test_dummy_weights_and_other_precisions(tmp_path: Path) -> None:
    target = write_qwen3(tmp_path / "target", torch_dtype="bfloat16")
    for centroids in (None, (16, 4)):
        folder = write_assistant(tmp_path / "draft", _as_float(target), centroids=centroids)
        for extra in ({}, {"quantization": "fp8"}):
            output = make(str(target), folder, **extra).generate(
                {"prompt_token_ids": [4, 9]}, PARAMS
            )
            assert output[0].metrics.num_drafts > 0
        (folder / "model.safetensors").unlink()
        llm = LLM(
            str(target),
            load_format="dummy",
            speculative_config={"model": str(folder)},
            skip_tokenizer_init=True,
            num_kv_blocks=16,
        )
        assert llm.generate({"prompt_token_ids": [4, 9]}, PARAMS)[0].metrics.num_drafts > 0


def _as_float(target: Path) -> Path:
    """The same target in float32, for the oracle that fits an assistant to it."""
    folder = target.parent / "float"
    folder.mkdir(exist_ok=True)
    weights = load_file(target / "model.safetensors")
    save_file({name: it.float() for name, it in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text((target / "config.json").read_text())
    return folder


def test_defaults_of_a_published_config(tmp_path: Path) -> None:
    """That of the largest, which leaves out what its library knows."""
    text = {
        "hidden_size": 1024,
        "intermediate_size": 8192,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
    }
    config = {"model_type": "gemma4_assistant", "backbone_hidden_size": 5376, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = read_assistant_config(HeadCheckpoint(tmp_path))
    assert [layer.window for layer in read.own] == [1024, 1024, 1024, None]
    assert [layer.head_dim for layer in read.own] == [256, 256, 256, 512]
    assert [layer.num_kv_heads for layer in read.own] == [16, 16, 16, 4]
    assert read.own[0].rope == RopeConfig(10000.0)
    assert read.own[3].rope == RopeConfig(1e6, "proportional", rotated=0.25)
    assert read.layers.vocab_size == 262144
    assert read.centroids is None
