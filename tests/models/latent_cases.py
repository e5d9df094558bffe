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
