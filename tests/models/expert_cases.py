"""Mixtures of experts that are compared with those of transformers."""

from typing import Any

from tests.models.parity_cases import DEFAULT, LINEAR, LLAMA3, TIED, Case, shape


def mixture(experts: int, chosen: int, inner: int = 16, **more: Any) -> dict[str, Any]:
    return {
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": inner,
        **more,
    }


QWEN3_MOE = [
    Case(
        "Qwen3Moe",
        "plain",
        {**shape(4, 4, 48, 8), **mixture(4, 2), "rope_parameters": DEFAULT},
        seed=2,
    ),
    Case(
        "Qwen3Moe",
        "normalised-tied",
        {
            **shape(6, 2, 40, 16),
            **mixture(8, 3, 20, norm_topk_prob=True),
            **TIED,
            "rope_parameters": LINEAR,
        },
        "19KB",
    ),
    Case(
        "Qwen3Moe",
        "every-second-layer-biases-old",
        {
            **shape(7, 1, 56, 10),
            **mixture(5, 2, decoder_sparse_step=2, norm_topk_prob=True),
            "rope_parameters": LLAMA3,
            "attention_bias": True,
        },
        old_style=True,
    ),
    Case(
        "Qwen3Moe",
        "window-some-dense",
        {
            **shape(4, 2, 32, 12),
            **mixture(6, 1, 24, mlp_only_layers=[0, 2]),
            "rope_parameters": DEFAULT,
            "use_sliding_window": True,
            "sliding_window": 9,
        },
        seed=2,
    ),
    Case(
        "Qwen3Moe",
        "all-chosen",
        {**shape(3, 1, 36, 24), **mixture(4, 4), "rope_parameters": LINEAR},
    ),
    Case(
        "Qwen3Moe",
        "default-head-dim",
        {**shape(2, 1, 32), **mixture(7, 2, norm_topk_prob=True), "rope_parameters": LLAMA3},
        "19KB",
    ),
]


def with_shared(experts: int, chosen: int, shared: int, **more: Any) -> dict[str, Any]:
    return mixture(experts, chosen, shared_expert_intermediate_size=shared, **more)


QWEN2_MOE = [
    Case(
        "Qwen2Moe",
        "plain",
        {**shape(4, 4, 48), **with_shared(4, 2, 24), "rope_parameters": DEFAULT},
    ),
    Case(
        "Qwen2Moe",
        "normalised-tied",
        {
            **shape(6, 2, 48),
            **with_shared(8, 3, 40, norm_topk_prob=True),
            **TIED,
            "rope_parameters": LINEAR,
        },
        "19KB",
    ),
    Case(
        "Qwen2Moe",
        "window-of-early-layers-old",
        {
            **shape(7, 1, 56),
            **with_shared(5, 2, 16, decoder_sparse_step=2),
            "rope_parameters": DEFAULT,
            "use_sliding_window": True,
            "sliding_window": 11,
            "max_window_layers": 2,
        },
        old_style=True,
    ),
    Case(
        "Qwen2Moe",
        "layer-types-some-dense",
        {
            **shape(3, 1, 36),
            **with_shared(6, 1, 20, mlp_only_layers=[1]),
            "rope_parameters": LLAMA3,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
        seed=1,
    ),
    Case(
        "Qwen2Moe",
        "no-biases",
        {
            **shape(2, 2, 40, 12),
            **with_shared(4, 4, 24, qkv_bias=False),
            "rope_parameters": LLAMA3,
        },
        "19KB",
        True,
        seed=2,
    ),
    Case(
        "Qwen2Moe",
        "one-of-many",
        {**shape(14, 2, 56), **with_shared(16, 1, 32), "rope_parameters": LINEAR},
    ),
]


def of_mixtral(experts: int, chosen: int, inner: int = 24) -> dict[str, Any]:
    return {
        "num_local_experts": experts,
        "num_experts_per_tok": chosen,
        "intermediate_size": inner,
    }


MIXTRAL = [
    Case(
        "Mixtral",
        "plain",
        {**shape(4, 4, 48), **of_mixtral(4, 2), "rope_parameters": DEFAULT},
        seed=1,
    ),
    Case(
        "Mixtral",
        "gqa3-window",
        {
            **shape(6, 2, 48, 16),
            **of_mixtral(8, 2, 16),
            "rope_parameters": DEFAULT,
            "sliding_window": 13,
        },
        "19KB",
    ),
    Case(
        "Mixtral",
        "window-tied-old",
        {
            **shape(7, 1, 56),
            **of_mixtral(5, 3),
            **TIED,
            "rope_parameters": LINEAR,
            "sliding_window": 16,
        },
        old_style=True,
        seed=2,
    ),
    Case(
        "Mixtral",
        "one-chosen",
        {**shape(14, 2, 56, 6), **of_mixtral(6, 1, 40), "rope_parameters": LLAMA3},
    ),
    Case(
        "Mixtral",
        "all-chosen",
        {**shape(2, 2, 40, 8), **of_mixtral(4, 4), "rope_parameters": DEFAULT},
        "19KB",
    ),
    Case(
        "Mixtral",
        "narrow-window-old",
        {
            **shape(3, 1, 36),
            **of_mixtral(8, 3, 32),
            "rope_parameters": LINEAR,
            "sliding_window": 2,
        },
        old_style=True,
    ),
]

YARN = {
    "rope_type": "yarn",
    "rope_theta": 900.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "truncate": False,
    "original_max_position_embeddings": 24,
}


def of_gpt_oss(experts: int, chosen: int, inner: int = 24, **more: Any) -> dict[str, Any]:
    """Limits and gains with which the clamps show."""
    return {
        **of_mixtral(experts, chosen, inner),
        "sliding_window": 4,
        "swiglu_limit": 0.7,
        "rope_parameters": YARN,
        **more,
    }


SLIDES = ["full_attention", "sliding_attention", "sliding_attention"]
GPT_OSS = [
    Case("GptOss", "plain", {**shape(4, 2, 48, 8), **of_gpt_oss(4, 2)}, seed=3),
    Case("GptOss", "tied", {**shape(6, 2, 40, 16), **of_gpt_oss(8, 4, 16), **TIED}, "19KB", seed=2),
    Case("GptOss", "old", {**shape(7, 1, 56, 10), **of_gpt_oss(5, 1)}, old_style=True),
    Case(
        "GptOss",
        "layer-types-no-biases",
        {
            **shape(8, 2, 32, 6),
            **of_gpt_oss(6, 3, 40, layer_types=SLIDES, attention_bias=False, swiglu_alpha=0.9),
        },
    ),
    Case(
        "GptOss",
        "square-experts",
        {**shape(4, 4, 32, 12), **of_gpt_oss(4, 2, 32, sliding_window=19, swiglu_limit=2.0)},
        "19KB",
        True,
    ),
    Case(
        "GptOss",
        "other-rope",
        {**shape(2, 1, 36, 24), **of_gpt_oss(3, 3, 20, rope_parameters=LLAMA3)},
    ),
]


def of_glm(experts: int, chosen: int, inner: int = 16, **more: Any) -> dict[str, Any]:
    return {
        "n_routed_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": inner,
        **more,
    }


def half_turned(rope: dict[str, Any], share: float = 0.5) -> dict[str, Any]:
    return {"rope_parameters": {**rope, "partial_rotary_factor": share}}


GLM = [
    Case(
        "Glm4Moe", "plain", {**shape(4, 2, 48, 8), **of_glm(4, 2), **half_turned(DEFAULT)}, seed=1
    ),
    Case(
        "Glm4Moe",
        "groups",
        {
            **shape(6, 2, 40, 16),
            **of_glm(8, 2, n_group=4, topk_group=2, routed_scaling_factor=2.5),
            **half_turned(LINEAR),
        },
        "19KB",
        seed=1,
    ),
    Case(
        "Glm4Moe",
        "biases-norms-old",
        {
            **shape(7, 1, 56, 12),
            **of_glm(6, 3, n_group=2, topk_group=1, use_qk_norm=True, attention_bias=True),
            **half_turned(DEFAULT),
        },
        old_style=True,
        seed=3,
    ),
    Case(
        "Glm4Moe",
        "all-sparse-two-shared",
        {
            **shape(3, 1, 36, 16),
            **of_glm(5, 1, 20, first_k_dense_replace=0, n_shared_experts=2),
            **half_turned(LLAMA3, 0.25),
        },
        seed=3,
    ),
    Case(
        "Glm4Moe",
        "not-normalised-tied",
        {
            **shape(4, 4, 32, 12),
            **of_glm(8, 3, norm_topk_prob=False, first_k_dense_replace=2, use_qk_norm=True),
            **TIED,
            **half_turned(DEFAULT),
        },
        "19KB",
        seed=4,
    ),
    Case(
        "Glm4Moe",
        "whole-heads-turned",
        {
            **shape(14, 2, 56, 4),
            **of_glm(6, 4, n_group=3, topk_group=2),
            **half_turned(YARN, 1.0),
        },
        old_style=True,
        seed=2,
    ),
]
EXPERTS = [*QWEN3_MOE, *QWEN2_MOE, *MIXTRAL, *GPT_OSS, *GLM]
