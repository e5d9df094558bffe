"""Tiny random models with mixtures of experts, as transformers writes them."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from tests.float4_checkpoints import mxfp4_numbers

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
# By model_type: the prefix of transformers' classes, and the family's own config keys.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 8, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 6,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": YARN,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 700.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 7,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 56,
            "decoder_sparse_step": 2,
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "moe_intermediate_size": 24,
            "num_key_value_heads": 6,
            "q_lora_rank": 20,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "sliding_window": 9}),
}
# Matrices with larger weights, so that logits differ and texts do not only repeat.
_SCALES = {
    "q_proj": 2.0,
    "q_b_proj": 2.0,
    "k_proj": 2.0,
    "gate.weight": 2.0,
    "router.weight": 2.0,
    "lm_head": 2.0,
}


def write_mixture(
    folder: Path, kind: str, keep_layers: int | None = None, seed: int = 0, **changes: Any
) -> Path:
    """A model of the family `kind`, or its first layers, which agree with it now and then."""
    name, own = FAMILIES[kind]
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **own, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    _randomise(model, torch.Generator().manual_seed(seed))
    if keep_layers is not None:
        model.model.layers = model.model.layers[:keep_layers]
        config.num_hidden_layers = keep_layers
        for key in ("layer_types", "mlp_layer_types"):
            if getattr(config, key, None) is not None:
                setattr(config, key, getattr(config, key)[:keep_layers])
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
    return folder


def with_packed_experts(folder: Path, like: Path) -> Path:
    """A gpt-oss as it is published, its experts in MXFP4; `like` gets their numbers as floats."""
    weights = load_file(like / "model.safetensors")
    packed = dict(weights)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        matrices = packed.pop(name).transpose(1, 2).contiguous()  # [E, rows, columns]
        count, rows, columns = matrices.shape
        values, scales, meant = mxfp4_numbers(matrices.flatten(0, 1).numpy())
        packed[f"{name}_blocks"] = values.view(count, rows, columns // 32, 16)
        packed[f"{name}_scales"] = scales.view(count, rows, columns // 32)
        weights[name] = meant.view(matrices.shape).transpose(1, 2).contiguous()
    save_file(weights, like / "model.safetensors")
    folder.mkdir()
    save_file(packed, folder / "model.safetensors")
    config = json.loads((like / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.no_grad()
def _randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Every parameter and buffer that is stored, norms and biases too."""
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("inv_freq"):
            continue
        if name.endswith("norm.weight"):
            parameter.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith(("bias", "sinks")):
            parameter.normal_(std=0.25, generator=generator)
        else:
            scale = next((scale for part, scale in _SCALES.items() if part in name), 1.0)
            # Fused experts of gpt-oss are transposed: what they read comes before what they give.
            inputs = parameter.shape[-2 if "experts" in name and parameter.dim() == 3 else -1]
            parameter.normal_(std=scale / inputs**0.5, generator=generator)
