"""Models that mix gated delta nets with gated attention, for comparisons with transformers."""

from typing import Any

from tests.models.parity_cases import DEFAULT, LLAMA3, TIED, Case, model, shape, turned

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

NARROW = turned(DEFAULT, 0.25)
HALF = turned(DEFAULT, 0.5)
BIASED: dict[str, Any] = {"attention_bias": True}


def experts(count: int, chosen: int, inner: int = 16, shared: int = 24) -> dict[str, Any]:
    return {
        **MIXED,
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": shared,
    }


QWEN3_5 = [
    Case(
        "Qwen3_5",
        "mqa-half-rotated",
        model(4, 1, 40, 12, HALF, **delta(2, 2, 6, 4, DELTA, DELTA, FULL, taps=3)),
        "9KB",
    ),
    Case(
        "Qwen3_5",
        "interval",
        model(7, 1, 56, 8, NARROW, num_hidden_layers=4, **delta(1, 7, 4, 8))
        | {"layer_types": None},
    ),
    Case(
        "Qwen3_5",
        "odd-vocabulary",
        model(2, 2, 32, 16, NARROW, **delta(4, 4, 8, 8, DELTA, DELTA, FULL), vocab_size=131),
    ),
    Case(
        "Qwen3_5",
        "llama3-eps-tied",
        model(
            6,
            2,
            48,
            16,
            turned(LLAMA3, 0.5),
            **delta(3, 6, 10, 6, FULL, DELTA, FULL),
            rms_norm_eps=1e-2,
            **TIED,
        ),
    ),
]
QWEN3_NEXT = [
    Case(
        "Qwen3Next",
        "one-of-many-tied",
        model(4, 1, 40, 12, HALF, **experts(16, 1), **delta(1, 3, 6, 4, DELTA, FULL, DELTA)) | TIED,
    ),
    Case(
        "Qwen3Next",
        "not-normalised",
        model(7, 1, 56, 8, NARROW, **experts(6, 3), **delta(2, 4, 4, 8, FULL, DELTA, DELTA))
        | {"norm_topk_prob": False, "vocab_size": 131},
        "19KB",
        seed=2,
    ),
    Case(
        "Qwen3Next",
        "all-chosen-every-second-layer",
        model(
            2, 2, 32, 16, NARROW, **experts(4, 4, 24, 40), **delta(2, 2, 8, 6, DELTA, DELTA, FULL)
        )
        | {"decoder_sparse_step": 2},
    ),
    Case(
        "Qwen3Next",
        "biases-three-taps",
        model(6, 2, 48, 8, NARROW, **experts(7, 2), **delta(1, 4, 8, 10, DELTA, DELTA, FULL))
        | {**BIASED, "linear_conv_kernel_dim": 3},
    ),
]
QWEN3_5_MOE = [
    Case(
        "Qwen3_5Moe",
        "one-of-many-tied",
        model(4, 2, 40, 12, HALF, **experts(16, 1), **delta(1, 3, 6, 4, DELTA, FULL, DELTA)) | TIED,
        seed=1,
    ),
    Case(
        "Qwen3_5Moe",
        "all-chosen",
        model(7, 1, 56, 8, NARROW, **experts(4, 4, 24, 40), **delta(2, 4, 4, 8, FULL, DELTA, DELTA))
        | {"vocab_size": 131},
        "19KB",
        seed=1,
    ),
    Case(
        "Qwen3_5Moe",
        "attention-last",
        model(2, 2, 32, 16, NARROW, **experts(6, 3), **delta(2, 2, 8, 6, DELTA, DELTA, FULL)),
    ),
    Case(
        "Qwen3_5Moe",
        "biases-two-taps",
        model(6, 2, 48, 8, NARROW, **experts(7, 2), **delta(1, 4, 8, 10, DELTA, DELTA, FULL))
        | {**BIASED, "linear_conv_kernel_dim": 2},
        seed=1,
    ),
    Case(
        "Qwen3_5Moe",
        "full-first-eps",
        model(3, 3, 36, 16, NARROW, **experts(5, 2), **delta(3, 3, 4, 12, FULL, FULL, DELTA))
        | {"rms_norm_eps": 1e-2},
    ),
]
MORE_HYBRID = [*QWEN3_5, *QWEN3_NEXT, *QWEN3_5_MOE]
