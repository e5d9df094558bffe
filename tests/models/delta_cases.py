"""Models that mix gated delta nets with gated attention, for comparisons with transformers."""

from typing import Any

from tests.models.parity_cases import DEFAULT, TIED, Case, shape

DELTA, FULL = "linear_attention", "full_attention"


def delta(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, *kinds: str, taps: int = 4
) -> dict[str, Any]:
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": taps,
        "layer_types": list(kinds),
    }


ROPE = {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.25}}
AXES = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}  # of which a text has one
MIXED: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}

HYBRID = [
    Case(
        "Qwen3_5",
        "gqa2",
        {
            **shape(4, 2, 40, 16),
            "rope_parameters": {**ROPE["rope_parameters"], **AXES},
            **delta(2, 4, 8, 6, DELTA, FULL, DELTA),
        },
    ),
    Case(
        "Qwen3_5",
        "tied-biases-two-taps",
        {
            **shape(3, 1, 48, 16),
            **ROPE,
            **TIED,
            **delta(1, 3, 6, 10, FULL, DELTA, DELTA, taps=2),
            "attention_bias": True,
        },
        "9KB",
        seed=1,
    ),
    Case(
        "Qwen3Next",
        "experts",
        {**shape(4, 2, 40, 16), **ROPE, **MIXED, **delta(2, 4, 8, 6, DELTA, FULL, DELTA)},
    ),
    Case(
        "Qwen3Next",
        "dense-first",
        {
            **shape(2, 1, 36, 24),
            **ROPE,
            **MIXED,
            **delta(3, 3, 4, 12, DELTA, DELTA, FULL),
            "mlp_only_layers": [0],
        },
        "9KB",
        seed=1,
    ),
    Case(
        "Qwen3_5Moe",
        "experts",
        {**shape(4, 1, 40, 16), **ROPE, **MIXED, **delta(2, 6, 8, 6, DELTA, FULL, DELTA)},
    ),
]
