"""Published config.json files have keys that change nothing. They are read, and other values of the
keys that name a part of the network are refused."""

from typing import Any

import pytest

from slipstream.core.errors import CheckpointError
from slipstream.layers.attention import AttentionSpec
from slipstream.layers.experts import ExpertsSpec
from slipstream.models.catalogue import read_decoder_config
from slipstream.models.wrappers import text_config

Json = dict[str, Any]

SIZES: Json = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
# Keys of almost all files that do not describe the network.
USUAL: Json = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "dtype": "float32",
    "eos_token_id": [2, 3],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "pad_token_id": 0,
    "torch_dtype": "float32",
    "transformers_version": "4.57.1",
    "use_cache": True,
}
MIXTURE: Json = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT: Json = {
    "kv_lora_rank": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
CORRECTED: Json = {
    "attention_bias": False,
    "num_nextn_predict_layers": 1,
    "norm_topk_prob": True,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
DEEPSEEK: Json = {
    **CORRECTED,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_method": "noaux_tc",
}
_OFF = """
    add_cross_attention do_sample early_stopping is_decoder is_encoder_decoder output_attentions
    output_hidden_states output_scores remove_invalid_values return_dict_in_generate
    tf_legacy_loss tie_encoder_decoder torchscript use_bfloat16
    """
_ZERO = "chunk_size_feed_forward diversity_penalty min_length no_repeat_ngram_size"
_ONE = """
    length_penalty num_beam_groups num_beams num_return_sequences repetition_penalty temperature
    top_p typical_p
    """
SAVED_WITH_DEFAULTS: Json = {
    **dict.fromkeys(_OFF.split(), False),
    **dict.fromkeys(_ZERO.split(), 0),
    **dict.fromkeys(_ONE.split(), 1.0),
    "bad_words_ids": None,
    "cross_attention_hidden_size": None,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "max_length": 20,
    "pruned_heads": {},
    "return_dict": True,
    "top_k": 50,
}
QWEN_WINDOWS: Json = {"max_window_layers": 28, "sliding_window": None, "use_sliding_window": False}
QWEN_MIXTURE: Json = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "output_router_logits": False,
    "rope_scaling": None,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}
HYBRID: Json = {
    "attention_bias": False,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
QWEN3_5: Json = {
    **HYBRID,
    "attn_output_gate": True,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000.0,
        "rope_type": "default",
    },
}
GEMMA: Json = {
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1_000_000.0,
    "sliding_window": 4096,
}
PHI: Json = {
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "embd_pdrop": 0.0,
    "original_max_position_embeddings": 4096,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "sliding_window": None,
}
STARCODER2: Json = {
    "activation_function": "gelu",
    "attention_dropout": 0.1,
    "attention_softmax_in_fp32": True,
    "embedding_dropout": 0.1,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_epsilon": 1e-05,
    "mlp_type": "default",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "residual_dropout": 0.1,
    "scale_attention_softmax_in_fp32": True,
    "scale_attn_weights": True,
    "use_bias": True,
}

# Model: (architecture, model_type, what the network needs, keys that only state what it has anyway)
PUBLISHED: dict[str, tuple[str, str, Json, Json]] = {
    "Llama 3.2": (
        "Llama",
        "llama",
        {},
        {"attention_bias": False, "head_dim": 16, "mlp_bias": False, "pretraining_tp": 1},
    ),
    "SmolLM2": (
        "Llama",
        "llama",
        {},
        {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"a": 1}},
    ),
    "Falcon3": ("Llama", "llama", {}, {"activation": "swiglu", "mlp_bias": False}),
    "Llama with defaults": ("Llama", "llama", {}, SAVED_WITH_DEFAULTS),
    "Mistral Nemo": ("Mistral", "mistral", {"sliding_window": None}, {"head_dim": 16}),
    "Mixtral": (
        "Mixtral",
        "mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        {"output_router_logits": False, "router_aux_loss_coef": 0.02, "router_jitter_noise": 0.0},
    ),
    "Qwen2.5": ("Qwen2", "qwen2", {}, {**QWEN_WINDOWS, "use_mrope": False, "rope_scaling": None}),
    "Qwen2 57B": (
        "Qwen2Moe",
        "qwen2_moe",
        {**MIXTURE, "shared_expert_intermediate_size": 32},
        {**QWEN_MIXTURE, **QWEN_WINDOWS, "norm_topk_prob": False},
    ),
    "MiMo": ("MiMo", "mimo", {}, {"attention_bias": True, "num_nextn_predict_layers": 1}),
    "Qwen3": ("Qwen3", "qwen3", {}, {**QWEN_WINDOWS, "attention_bias": False, "head_dim": 128}),
    "Qwen3 2507": (
        "Qwen3Moe",
        "qwen3_moe",
        {**MIXTURE, "norm_topk_prob": True},
        {**QWEN_MIXTURE, **QWEN_WINDOWS},
    ),
    "Qwen3 Coder": (
        "Qwen3Moe",
        "qwen3_moe",
        {**MIXTURE, "norm_topk_prob": True},
        {
            **QWEN_MIXTURE,
            **QWEN_WINDOWS,
            "qkv_bias": False,
            "shared_expert_intermediate_size": 0,
            "use_qk_norm": True,
        },
    ),
    "Qwen3 Next": (
        "Qwen3Next",
        "qwen3_next",
        {**MIXTURE, "shared_expert_intermediate_size": 32},
        {**HYBRID, **QWEN_MIXTURE, "partial_rotary_factor": 0.25, "use_sliding_window": False},
    ),
    "Qwen3.5": ("Qwen3_5", "qwen3_5_text", {}, QWEN3_5),
    "Qwen3.5 mixture": (
        "Qwen3_5Moe",
        "qwen3_5_moe_text",
        {**MIXTURE, "shared_expert_intermediate_size": 32},
        {**QWEN3_5, "output_router_logits": False, "router_aux_loss_coef": 0.001},
    ),
    "gpt-oss": (
        "GptOss",
        "gpt_oss",
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        {
            "attention_bias": True,
            "experts_per_token": 2,
            "initial_context_length": 4096,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.9,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
        },
    ),
    "GLM-4": ("Glm4", "glm4", {"attention_bias": False}, {"head_dim": 128, "rope_scaling": None}),
    "GLM-4.5": (
        "Glm4Moe",
        "glm4_moe",
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        {
            **CORRECTED,
            "n_group": 1,
            "n_shared_experts": 1,
            "partial_rotary_factor": 0.5,
            "topk_group": 1,
            "use_qk_norm": False,
        },
    ),
    "GLM-4.7-Flash": (
        "Glm4MoeLite",
        "glm4_moe_lite",
        LATENT,
        {**CORRECTED, "partial_rotary_factor": 1.0, "topk_method": "noaux_tc"},
    ),
    "DeepSeek-V3": (
        "DeepseekV3",
        "deepseek_v3",
        {**LATENT, "n_group": 2, "topk_group": 1},
        DEEPSEEK,
    ),
    "Kimi-K2": (
        "DeepseekV3",
        "kimi_k2",
        {**LATENT, "n_group": 1, "topk_group": 1},
        {**DEEPSEEK, **SAVED_WITH_DEFAULTS, "num_nextn_predict_layers": 0},
    ),
    "Moonlight": (
        "DeepseekV3",
        "deepseek_v3",
        {**LATENT, "n_group": 1, "topk_group": 1, "n_shared_experts": 2},
        {**DEEPSEEK, "num_nextn_predict_layers": 0, "q_lora_rank": None},
    ),
    "Gemma 2 9B": (
        "Gemma2",
        "gemma2",
        {},
        {
            **GEMMA,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "hidden_act": "gelu_pytorch_tanh",
            "rope_theta": 10_000.0,
            "sliding_window_size": 4096,
        },
    ),
    "Gemma 3 270M": (
        "Gemma3",
        "gemma3_text",
        {},
        {
            **GEMMA,
            "_sliding_window_pattern": 6,
            "layer_types": ["sliding_attention"] * 4,
            "rope_local_base_freq": 10_000.0,
            "rope_scaling": None,
            "use_bidirectional_attention": False,
        },
    ),
    "Phi-4": ("Phi3", "phi3", {}, PHI),
    "Phi-4-mini": (
        "Phi3",
        "phi3",
        {},
        {**PHI, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},
    ),
    "OLMo 2": ("Olmo2", "olmo2", {}, {"attention_bias": False, "rope_scaling": None}),
    "OLMo 3": (
        "Olmo3",
        "olmo3",
        {},
        {
            "attention_bias": False,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
            "rope_scaling": None,
            "sliding_window": 4096,
        },
    ),
    "Granite 3.3": ("Granite", "granite", {}, {"attention_bias": False, "mlp_bias": False}),
    "SmolLM3": (
        "SmolLM3",
        "smollm3",
        {},
        {
            **QWEN_WINDOWS,
            "attention_bias": False,
            "layer_types": ["full_attention"] * 4,
            "mlp_bias": False,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0],
            "pretraining_tp": 2,
        },
    ),
    "EXAONE 4 1.2B": (
        "Exaone4",
        "exaone4",
        {"sliding_window": None},
        {"layer_types": ["full_attention"] * 4, "sliding_window_pattern": None},
    ),
    "Seed-OSS": (
        "SeedOss",
        "seed_oss",
        {},
        {"attention_bias": True, "attention_out_bias": False, "residual_dropout": 0.1},
    ),
    "StarCoder2": ("Starcoder2", "starcoder2", {}, STARCODER2),
}


def of_model(name: str) -> Json:
    architecture, model_type, needed, _ = PUBLISHED[name]
    names = [f"{architecture}ForCausalLM"]
    return {**SIZES, **needed, "architectures": names, "model_type": model_type}


@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_that_change_nothing_are_read(name: str) -> None:
    needed = of_model(name)
    assert read_decoder_config({**needed, **USUAL, **PUBLISHED[name][3]}) == read_decoder_config(
        needed
    )


def test_keys_around_a_language_model() -> None:
    """Those of Gemma 3 4B: the outer keys are of the images."""
    inner = {**SIZES, **GEMMA, "model_type": "gemma3_text", "rope_scaling": None}
    outer = {
        **{key: USUAL[key] for key in ("initializer_range", "torch_dtype", "transformers_version")},
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "vision_config": {"hidden_size": 32},
    }
    assert read_decoder_config(text_config({**outer, "text_config": inner})).num_layers == 4


@pytest.mark.parametrize(
    ("architecture", "kind"), [("Qwen2VL", "qwen2_vl"), ("Qwen2_5_VL", "qwen2_5_vl")]
)
def test_keys_of_a_language_model_beside_those_of_images(architecture: str, kind: str) -> None:
    """Those of Qwen2-VL-7B and Qwen2.5-VL-7B."""
    whole = {
        **SIZES,
        **USUAL,
        "architectures": [f"{architecture}ForConditionalGeneration"],
        "image_token_id": 151655,
        "max_position_embeddings": 128000,
        "max_window_layers": 28,
        "model_type": kind,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_section": [2, 3, 3], "type": "mrope"},
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "video_token_id": 151656,
        "vision_config": {"depth": 32},
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
        "vision_token_id": 151654,
    }
    read = read_decoder_config(text_config(whole))
    mixer = read.layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    assert mixer.rope is not None
    assert mixer.rope.axes(8) == [0, 0, 1, 1, 1, 2, 2, 2]
    whole["rope_scaling"] = {"mrope_section": [2, 2, 3], "type": "mrope"}
    with pytest.raises(CheckpointError, match=r'"mrope_section" is \[2, 2, 3\], .* 8 pairs'):
        read_decoder_config(text_config(whole))


def test_keys_of_a_mixture_that_reads_images() -> None:
    """Those of Qwen3-VL-30B-A3B."""
    inner = {
        **SIZES,
        **MIXTURE,
        **{key: USUAL[key] for key in ("bos_token_id", "dtype", "eos_token_id", "use_cache")},
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "mlp_only_layers": [],
        "model_type": "qwen3_vl_moe_text",
        "norm_topk_prob": True,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20]},
        "rope_theta": 5000000,
    }
    outer = {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl_moe",
        "tie_word_embeddings": False,
        "vision_config": {"depth": 27},
    }
    read = read_decoder_config(text_config({**outer, "text_config": inner}))
    assert all(isinstance(layer.feed_forward, ExpertsSpec) for layer in read.layers)
    inner["norm_topk_prob"] = False
    with pytest.raises(CheckpointError, match='"norm_topk_prob" is false'):
        read_decoder_config(text_config({**outer, "text_config": inner}))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("SmolLM2", "is_llama_config", False),
        ("SmolLM2", "rope_interleaved", True),
        ("Falcon3", "activation", "geglu"),
        ("Qwen3 Coder", "qkv_bias", True),
        ("Qwen3 Coder", "shared_expert_intermediate_size", 32),
        ("Qwen3 Coder", "use_qk_norm", False),
        ("Gemma 2 9B", "sliding_window_size", 512),
        ("StarCoder2", "scale_attn_weights", False),
        ("StarCoder2", "layer_norm_epsilon", 1e-6),
    ],
)
def test_other_values_of_them_are_refused(name: str, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f'"{key}" is '):
        read_decoder_config({**of_model(name), key: value})
