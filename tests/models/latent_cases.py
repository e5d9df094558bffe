"""Models with latent attention that are compared with those of transformers."""

from typing import Any

from tests.models.expert_cases import of_glm
from tests.models.parity_cases import DEFAULT, TIED, Case, shape

YARN = {
    "rope_type": "yarn",
    "rope_theta": 3000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 24,
}


def latent(
    heads: int,
    hidden: int,
    rank: int = 16,
    query_rank: int | None = 12,
    sizes: tuple[int, int, int] = (8, 4, 6),
    **more: Any,
) -> dict[str, Any]:
    """Latent attention; sizes are those of heads that do not turn, that turn, and of values."""
    plain, turned, value = sizes
    return {
        **shape(heads, heads, hidden),
        "kv_lora_rank": rank,
        "q_lora_rank": query_rank,
        "qk_nope_head_dim": plain,
        "qk_rope_head_dim": turned,
        "v_head_dim": value,
        **more,
    }


GLM_LITE = [
    Case(
        "Glm4MoeLite",
        "plain",
        {**latent(4, 40), **of_glm(4, 2, n_shared_experts=2), "rope_parameters": DEFAULT},
    ),
    Case(
        "Glm4MoeLite",
        "whole-queries-tied",
        {
            **latent(3, 36, 20, None, (6, 8, 10)),
            **of_glm(
                6, 3, routed_scaling_factor=1.5, mlp_layer_types=["sparse", "dense", "sparse"]
            ),
            **TIED,
            "rope_parameters": YARN,
        },
        "19KB",
        seed=8,
    ),
]
DEEPSEEK = [
    Case(
        "DeepseekV3",
        "groups-yarn-old",
        {
            **latent(5, 48, 24, 16, (10, 8, 6)),
            **of_glm(8, 2, n_group=4, topk_group=2, first_k_dense_replace=1),
            "rope_parameters": {**YARN, "mscale": 0.7},
        },
        old_style=True,
        seed=1,
    ),
    Case(
        "DeepseekV3",
        "plain",
        {
            **latent(2, 32, 12, None),
            **of_glm(6, 4, n_group=3, topk_group=2, first_k_dense_replace=0, norm_topk_prob=False),
            "rope_parameters": DEFAULT,
        },
        "19KB",
    ),
]
MISTRAL4 = [
    Case(
        "Mistral4",
        "plain",
        {
            **latent(4, 40, 20, 16, (4, 4, 6)),
            **of_glm(6, 2, routed_scaling_factor=1.5),
            "head_dim": 8,
            "rope_parameters": {
                **YARN,
                "partial_rotary_factor": 0.5,
                "llama_4_scaling_beta": 0.3,
                "max_position_embeddings": 192,
            },
        },
    ),
]
LATENT = [*GLM_LITE, *DEEPSEEK, *MISTRAL4]


def routed(experts: int, chosen: int, inner: int = 16, **more: Any) -> dict[str, Any]:
    return {**of_glm(experts, chosen, inner), "rope_parameters": DEFAULT, **more}


GROWING = {
    **YARN,
    "partial_rotary_factor": 0.5,
    "llama_4_scaling_beta": 0.3,
    "max_position_embeddings": 192,
}


def mistral4(experts: int, chosen: int, turned: int, **more: Any) -> dict[str, Any]:
    """Half of a head turns, as its RoPE says."""
    return routed(experts, chosen, **{"head_dim": 2 * turned, "rope_parameters": GROWING, **more})


# So that each family has six: for `scripts/test --all`.
MORE_LATENT = [
    Case(
        "Glm4MoeLite", "one-of-many", {**latent(7, 56, 12, 20, (4, 6, 8)), **routed(16, 1)}, seed=1
    ),
    Case(
        "Glm4MoeLite",
        "groups",
        {**latent(2, 32, 24, 8, (12, 2, 4)), **routed(8, 2, n_group=4, topk_group=2)},
        "19KB",
        seed=4,
    ),
    Case(
        "Glm4MoeLite",
        "not-normalised-odd-vocabulary",
        {**latent(1, 40, 8, None), **routed(5, 5, norm_topk_prob=False), "vocab_size": 131},
    ),
    Case(
        "Glm4MoeLite",
        "all-sparse-three-shared",
        {
            **latent(6, 48, 16, 12, (6, 8, 6)),
            **routed(6, 2, 20, n_shared_experts=3, mlp_layer_types=["sparse"] * 3),
            "rms_norm_eps": 1e-2,
        },
    ),
    Case(
        "DeepseekV3",
        "one-of-many-tied",
        {
            **latent(7, 56, 12, 20, (4, 6, 8)),
            **routed(16, 1, n_group=1, topk_group=1, first_k_dense_replace=2),
            **TIED,
        },
    ),
    Case(
        "DeepseekV3",
        "two-shared-odd-vocabulary",
        {
            **latent(1, 40, 8, 12),
            **routed(8, 3, n_group=2, topk_group=1, first_k_dense_replace=1, n_shared_experts=2),
            "vocab_size": 131,
        },
        old_style=True,
    ),
    Case(
        "DeepseekV3",
        "all-dense",
        {
            **latent(4, 32, 24, None, (12, 2, 4)),
            **routed(4, 2, n_group=1, topk_group=1, first_k_dense_replace=3),
            "rope_parameters": YARN,
        },
        seed=2,
    ),
    Case(
        "DeepseekV3",
        "all-chosen-eps",
        {
            **latent(6, 48, 16, 12, (6, 8, 6)),
            **routed(
                6, 6, n_group=3, topk_group=3, first_k_dense_replace=0, routed_scaling_factor=1.0
            ),
            "rms_norm_eps": 1e-2,
        },
        "19KB",
        seed=2,
    ),
    Case(
        "Mistral4",
        "one-of-many-tied",
        {**latent(7, 56, 12, 20, (6, 6, 8)), **mistral4(16, 1, 6), **TIED},
        seed=4,
    ),
    Case(
        "Mistral4",
        "whole-queries",
        {**latent(2, 32, 24, None, (4, 4, 4)), **mistral4(8, 2, 4, n_shared_experts=2)},
        "19KB",
        seed=1,
    ),
    Case(
        "Mistral4",
        "not-normalised-odd-vocabulary",
        {**latent(1, 40, 8, 12, (2, 2, 6)), **mistral4(5, 5, 2, norm_topk_prob=False)}
        | {"vocab_size": 131},
        seed=4,
    ),
    Case(
        "Mistral4",
        "first-layers-dense",
        {**latent(6, 48, 16, 12, (8, 8, 6)), **mistral4(6, 2, 8, first_k_dense_replace=2)},
    ),
    Case(
        "Mistral4",
        "fast-growth-eps",
        {
            **latent(3, 36, 12, 16, (4, 4, 10)),
            **mistral4(4, 1, 4, rope_parameters={**GROWING, "llama_4_scaling_beta": 1.0}),
            "rms_norm_eps": 1e-2,
        },
    ),
]
