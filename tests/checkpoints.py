"""Tiny random checkpoints, written to disk for tests."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB_SIZE = 96

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 0,
}


def write_qwen3(
    folder: Path,
    seed: int = 0,
    keep_layers: int | None = None,
    logit_scale: float = 2.0,
    **changes: Any,
) -> Path:
    """A Qwen3 checkpoint with random weights whose logits are spread out.

    The same seed gives the same tensors whatever `keep_layers` is, so a model cut after its first
    layers is a draft that agrees with the whole one now and then.
    """
    config = {**QWEN3, **changes}
    generator = torch.Generator().manual_seed(seed)
    weights = _weights(config, generator, logit_scale)
    if keep_layers is not None:
        config["num_hidden_layers"] = keep_layers
        weights = {name: value for name, value in weights.items() if _layer(name) < keep_layers}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _weights(
    config: dict[str, Any], generator: torch.Generator, logit_scale: float
) -> dict[str, torch.Tensor]:
    width, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query = config["num_attention_heads"] * head_dim
    key = config["num_key_value_heads"] * head_dim
    dtype = getattr(torch, config["torch_dtype"])

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator) * scale / columns**0.5
        return values.to(dtype)

    def ones(size: int, value: float = 1.0) -> torch.Tensor:
        return torch.full((size,), value, dtype=dtype)

    weights = {
        # Logits have a standard deviation of about `logit_scale`.
        "model.embed_tokens.weight": matrix(config["vocab_size"], width, logit_scale),
        "model.norm.weight": ones(width),
    }
    for index in range(config["num_hidden_layers"]):
        name = f"model.layers.{index}."
        late = 1.0 if index == 0 else 0.25
        weights |= {
            name + "input_layernorm.weight": ones(width),
            name + "post_attention_layernorm.weight": ones(width),
            name + "self_attn.q_proj.weight": matrix(query, width),
            name + "self_attn.k_proj.weight": matrix(key, width),
            name + "self_attn.v_proj.weight": matrix(key, width),
            name + "self_attn.o_proj.weight": matrix(width, query, late),
            name + "self_attn.q_norm.weight": ones(head_dim, 2.0),
            name + "self_attn.k_norm.weight": ones(head_dim),
            name + "mlp.gate_proj.weight": matrix(inner, width),
            name + "mlp.up_proj.weight": matrix(inner, width),
            name + "mlp.down_proj.weight": matrix(width, inner, late),
        }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(config["vocab_size"], width, logit_scale)
    return weights


def _layer(name: str) -> int:
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1
