"""The shapes of published models, by name, and directories that have such a shape."""

import json
from pathlib import Path
from typing import Any

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

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "attention_bias": False,
    "mlp_bias": False,
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


def _llama(
    width: int, inner: int, layers: int, head_dim: int, tied: bool, stretch: float
) -> dict[str, Any]:
    return {
        **_LLAMA,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "head_dim": head_dim,
        "tie_word_embeddings": tied,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": stretch,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


# The settings of most checkpoints that are published in FP8.
_FP8_BLOCKS: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "attention_bias": True,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}


def _gpt_oss(layers: int, experts: int, **changes: Any) -> dict[str, Any]:
    return {**_GPT_OSS, "num_hidden_layers": layers, "num_local_experts": experts, **changes}


def _without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


# For CPUs: 1.6 billion parameters, 0.28 of them active; a quarter of a gpt-oss.
_GPT_OSS_SMALL = _gpt_oss(
    14,
    32,
    hidden_size=1024,
    intermediate_size=1024,
    num_attention_heads=16,
    num_key_value_heads=4,
    vocab_size=65536,
)
_QWEN3_30B_A3B = {
    **_qwen3(2048, 6144, 48, 32, False),
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
_GLM_4_5_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "use_qk_norm": False,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "vocab_size": 151552,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    # In bf16 it is larger than the memory of one H200.
    "quantization_config": _FP8_BLOCKS,
}
_GLM_4_7_FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "attention_bias": False,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202752,
    "vocab_size": 154880,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# Three gated delta nets to one layer of attention with gates, and one module that drafts.
_QWEN3_5: dict[str, Any] = {
    **_QWEN3,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_attention_heads": 16,
    "head_dim": 256,
    "vocab_size": 248320,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "attn_output_gate": True,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000.0,
    "mtp_num_hidden_layers": 1,
    "tie_word_embeddings": False,
}
_QWEN3_5_9B = {
    **_QWEN3_5,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
_QWEN3_5_08B = {
    **_QWEN3_5,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 16,
    "tie_word_embeddings": True,
}
_QWEN3_5_35B_A3B = {
    **_QWEN3_5,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_LLAMA_70B = {
    **_llama(8192, 28672, 80, 128, False, 8.0),
    "num_attention_heads": 64,
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "group_size": 16,
        "ignore": ["lm_head"],
    },
}

GEOMETRIES = {
    # For tests: an engine that is ready in no time.
    "tiny": {**_qwen3(64, 160, 4, 8, True), "head_dim": 16, "vocab_size": 512},
    # With the vocabulary of the bundled demo, so that a checkpoint can have its tokenizer.
    "tiny-text": {**_qwen3(64, 160, 4, 8, True), "head_dim": 16, "vocab_size": 4096},
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, False),
    # Its published checkpoint in FP8.
    "qwen3-8b-fp8": {
        **_qwen3(4096, 12288, 36, 32, False),
        "quantization_config": _FP8_BLOCKS,
    },
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, False),
    "llama-3.2-1b": _llama(2048, 8192, 16, 64, True, 32.0),
    "llama-3.1-8b": _llama(4096, 14336, 32, 128, False, 8.0),
    "llama-70b-nvfp4": _LLAMA_70B,
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "gpt-oss-1.5b": _GPT_OSS_SMALL,
    # With experts in bf16, to be rounded.
    "gpt-oss-1.5b-bf16": _without(_GPT_OSS_SMALL, "quantization_config"),
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "glm-4.5-air": _GLM_4_5_AIR,
    "glm-4.7-flash": _GLM_4_7_FLASH,
    "qwen3.5-0.8b": _QWEN3_5_08B,
    "qwen3.5-9b": _QWEN3_5_9B,
    "qwen3.5-35b-a3b": _QWEN3_5_35B_A3B,
    "tiny-moe": _gpt_oss(
        4,
        16,
        hidden_size=64,
        intermediate_size=32,
        head_dim=16,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=512,
    ),
}

# Drafting heads of Qwen3-8B, as SpecForge has them: a Llama layer over [embedding, feature], more
# of them in a parallel head, and an lm_head over the tokens that come most often.
_HEAD: dict[str, Any] = {
    **_LLAMA,
    **{key: _QWEN3[key] for key in ("head_dim", "vocab_size", "rope_theta", "rms_norm_eps")},
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 1,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "draft_vocab_size": 32000,
}
# SpecForge's head for gpt-oss-120b.
_GPT_OSS_HEAD = {
    **_HEAD,
    "hidden_size": 2880,
    "intermediate_size": 17280,
    "num_attention_heads": 64,
    "head_dim": 64,
    "vocab_size": 201088,
    "rms_norm_eps": 1e-5,
}
HEADS = {
    "gpt-oss-120b-eagle3": _GPT_OSS_HEAD,
    "gpt-oss-120b-p-eagle": {
        **_GPT_OSS_HEAD,
        "architectures": ["PEagleDraftModel"],
        "num_hidden_layers": 4,
        "ptd_token_id": 200017,
    },
    "qwen3-8b-eagle3": _HEAD,
    "qwen3-8b-p-eagle": {
        **_HEAD,
        "architectures": ["PEagleDraftModel"],
        "num_hidden_layers": 4,
        "ptd_token_id": 151670,
    },
}
_STREAMS = 3  # of the target, which a head's first matrix joins


def head_matrix_parameters(name: str) -> int:
    """The numbers that one pass of a head reads; the first matrix, once a step, is among them."""
    config = HEADS[name]
    width, inner, depth = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    mixer, mlp = width * (query + 2 * key), 3 * width * inner
    layers = depth * (mixer + query * width + mlp) + mixer  # the first reads twice the width
    total: int = layers + (_STREAMS * width + config["draft_vocab_size"]) * width
    return total


def geometry_named(name: str) -> dict[str, Any]:
    """The config of a geometry: "qwen3-8b", or "qwen3-8b:3" for its first 3 layers.

    Raises ValueError for a name that is not known.
    """
    known, _, layers = name.partition(":")
    if known not in GEOMETRIES or not (layers.isdecimal() or not layers):
        raise ValueError(f"unknown geometry {name!r}; there are {', '.join(GEOMETRIES)}")
    config = dict(GEOMETRIES[known])
    if layers:
        config["num_hidden_layers"] = int(layers)
    return config


def write_config(folder: Path, geometry: str, **changes: Any) -> Path:
    """A directory with a config.json alone, for `load_format` "dummy" and "twin"."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**(HEADS.get(geometry) or geometry_named(geometry)), **changes}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
