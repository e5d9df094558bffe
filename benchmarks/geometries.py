"""The shapes of published models, by name, and checkpoints of these shapes with random weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def _qwen3(width: int, inner: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        **_QWEN3,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "tie_word_embeddings": tied,
    }


GEOMETRIES = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, True),
}


def write_config(folder: Path, geometry: str, **changes: Any) -> Path:
    """A directory with a config.json alone, for `load_format="dummy"`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**GEOMETRIES[geometry], **changes}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def write_checkpoint(folder: Path, geometry: str, seed: int = 0) -> Path:
    """A checkpoint of tied Qwen3 shape in bf16, weights drawn at random."""
    config = GEOMETRIES[geometry]
    assert config["tie_word_embeddings"], "only tied geometries are written"
    torch.manual_seed(seed)
    width, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query = config["num_attention_heads"] * head_dim
    key = config["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(std=0.02)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], width)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        tensors |= {
            name + "input_layernorm.weight": ones(width),
            name + "post_attention_layernorm.weight": ones(width),
            name + "self_attn.q_proj.weight": matrix(query, width),
            name + "self_attn.k_proj.weight": matrix(key, width),
            name + "self_attn.v_proj.weight": matrix(key, width),
            name + "self_attn.o_proj.weight": matrix(width, query),
            name + "self_attn.q_norm.weight": ones(head_dim),
            name + "self_attn.k_norm.weight": ones(head_dim),
            name + "mlp.gate_proj.weight": matrix(inner, width),
            name + "mlp.up_proj.weight": matrix(inner, width),
            name + "mlp.down_proj.weight": matrix(width, inner),
        }
    tensors["model.norm.weight"] = ones(width)
    write_config(folder, geometry)
    save_file(tensors, folder / "model.safetensors")
    return folder
