"""Assistants: what may stand in their checkpoints, and what configs leave out."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from slipstream import LLM, CheckpointError, SamplingParams
from slipstream.layers.rope import RopeConfig
from slipstream.speculative.gemma4_assistant.config import read_assistant_config
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from tests.checkpoints import write_qwen3
from tests.drafters.assistants import write_assistant
from tests.drafters.broken import make

PARAMS = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=1)


def test_suppressed_tokens_outside_of_the_vocabulary(tiny_target: str, tmp_path: Path) -> None:
    folder = write_assistant(tmp_path, tiny_target)
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
    """A copy of the target in float32, for the oracle that fits an assistant to it."""
    folder = target.parent / "float"
    folder.mkdir(exist_ok=True)
    weights = load_file(target / "model.safetensors")
    save_file({name: it.float() for name, it in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text((target / "config.json").read_text())
    return folder


def test_defaults_of_a_published_config(tmp_path: Path) -> None:
    """The largest published config leaves out keys with the library's default values."""
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
    assert [layer.window for layer in read.attention] == [1024, 1024, 1024, None]
    assert [layer.head_dim for layer in read.attention] == [256, 256, 256, 512]
    assert [layer.num_kv_heads for layer in read.attention] == [16, 16, 16, 4]
    assert read.attention[0].rope == RopeConfig(10000.0)
    assert read.attention[3].rope == RopeConfig(1e6, "proportional", rotated=0.25)
    assert read.layers.vocab_size == 262144
    assert read.centroids is None
