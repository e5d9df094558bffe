"""Checkpoints of transformers as GGUF files, by what llama.cpp's converter does with them."""

import json
import math
import re
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.models.gguf.blocks import F32, GgufType
from tests.gguf_files import Stored, floats, random_blocks, write_gguf

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_ARCHITECTURES = {
    **{"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"},
    **{"gpt_oss": "gpt-oss", "gemma3_text": "gemma3"},
}
_POST_NORMS = ("gpt_oss", "gemma3_text")  # whose norm behind attention has another name


def as_gguf(folder: Path, file: Path, kind: GgufType = F32, **more: Any) -> Path:
    """The checkpoint of a directory as a GGUF file.

    Args:
        kind: of its matrices: floats, or blocks of random numbers in their place.
        more: metadata, with two underscores for a dot; None leaves a key out.
    """
    metadata, tensors = converted(folder)
    metadata |= {key.replace("__", "."): value for key, value in more.items()}
    given = {key: value for key, value in metadata.items() if value is not None}
    generator = torch.Generator().manual_seed(1)
    stored: dict[str, Stored] = {}
    for name, values in tensors.items():
        if values.ndim < 2 or name.endswith(".bias"):
            stored[name] = floats(values)
        elif kind.floats is not None:
            stored[name] = floats(values, kind)
        else:
            stored[name] = random_blocks(kind, tuple(values.shape), generator, 0.1)
    return write_gguf(file, given, stored)


def converted(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata and tensors in float32, all under llama.cpp's names."""
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    weights: dict[str, Tensor] = {}
    for part in sorted(folder.glob("*.safetensors")):
        weights |= load_file(part)
    tensors: dict[str, Tensor] = {}
    for name, values in _stacked(weights).items():
        tensors |= _renamed(name, values.float(), config)
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = _llama3_factors(rope, config["head_dim"])
    prefix = _ARCHITECTURES[family]
    own = {f"{prefix}.{key}": value for key, value in _own_metadata(config).items()}
    return {"general.architecture": prefix, **own}, tensors


def _own_metadata(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    head_dim = config["head_dim"] if "head_dim" in config else _even(config)
    found = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.sliding_window": config.get("sliding_window"),
        "rope.freq_base": float(rope.get("rope_theta", 1e4)),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_count": config.get("num_experts") or config.get("num_local_experts"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
    }
    if config["model_type"] == "gpt_oss":
        found["expert_feed_forward_length"] = config["intermediate_size"]
    if config["model_type"] == "gemma3_text":
        full, local = rope["full_attention"], rope["sliding_attention"]
        found["rope.freq_base"] = float(full["rope_theta"])
        found["rope.freq_base_swa"] = float(local["rope_theta"])
        rope = full
    if rope.get("rope_type") in ("linear", "yarn"):
        found["rope.scaling.type"] = rope["rope_type"]
        found["rope.scaling.factor"] = float(rope["factor"])
        found["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
        for key in ("beta_fast", "beta_slow"):
            found[f"rope.scaling.yarn_{key}"] = rope.get(key)
    kept = config["model_type"] in ("gpt_oss", "gemma3_text") or not config.get("sliding_window")
    if not kept:
        del found["attention.sliding_window"]
    return {key: value for key, value in found.items() if value is not None}


def _stacked(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the matrices of all experts of a layer to one tensor [E, ...]."""
    found: dict[str, Tensor] = {}
    for name, values in weights.items():
        if re.search(r"\.experts\.\d", name) is None:
            found[name] = values
        elif ".experts.0." in name:
            each = (name.replace(".experts.0.", f".experts.{index}.") for index in count())
            held = takewhile(weights.__contains__, each)
            found[name.replace(".experts.0.", ".experts.")] = torch.stack(
                [weights[it] for it in held]
            )
    return found


def _even(config: dict[str, Any]) -> int:
    return int(config["hidden_size"] // config["num_attention_heads"])


def _renamed(name: str, values: Tensor, config: dict[str, Any]) -> dict[str, Tensor]:
    family = config["model_type"]
    if family == "gemma3_text" and name.endswith("norm.weight"):
        values = values + 1
    module, _, ending = name.rpartition(".")
    if not name.startswith("model.layers."):
        return {f"{_NAMES[module]}.{ending}": values}
    _, _, layer, rest = name.split(".", 3)
    if ".experts." in name:
        return {f"blk.{layer}.{key}": part for key, part in _experts(rest, values, family)}
    if rest == "self_attn.sinks":
        return {f"blk.{layer}.attn_sinks.weight": values}
    module = rest.rpartition(".")[0]
    own = _NAMES[module]
    if module == "post_attention_layernorm" and family in _POST_NORMS:
        own = "post_attention_norm"
    if family == "llama" and own in ("attn_q", "attn_k"):
        values = _paired(values, config, own)
    return {f"blk.{layer}.{own}.{ending}": values}


def _paired(values: Tensor, config: dict[str, Any], name: str) -> Tensor:
    """Rows of each head so that those which are rotated together are neighbours."""
    heads = config["num_attention_heads" if name == "attn_q" else "num_key_value_heads"]
    halves = values.view(heads, 2, -1, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape)


def _experts(rest: str, values: Tensor, family: str) -> list[tuple[str, Tensor]]:
    """Tensors of all experts [E, ...]; gate and up apart."""
    kind = rest.removeprefix("mlp.experts.")
    ending = "bias" if kind.endswith("_bias") else "weight"
    if family == "gpt_oss" and ending == "weight":
        values = values.transpose(1, 2)
    if kind.startswith("down_proj"):
        return [(f"ffn_down_exps.{ending}", values.contiguous())]
    if not kind.startswith("gate_up"):
        return [(f"ffn_{kind.partition('_')[0]}_exps.{ending}", values)]
    gate, up = values[:, 0::2], values[:, 1::2]
    if family != "gpt_oss":
        gate, up = values.chunk(2, 1)
    return [
        (f"ffn_{part}_exps.{ending}", rows.contiguous())
        for part, rows in (("gate", gate), ("up", up))
    ]


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> Tensor:
    """[head_dim / 2], what frequencies are divided by."""
    factors = []
    for pair in range(head_dim // 2):
        frequency = rope["rope_theta"] ** (-2 * pair / head_dim)
        turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = min(max((turns - low) / (high - low), 0), 1)
        factors.append(1 / (kept + (1 - kept) / rope["factor"]))
    return torch.tensor(factors)
