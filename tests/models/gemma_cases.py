"""Gemmas whose logits and text are compared with those of transformers."""

from tests.models.parity_cases import Case, shape

_LINEAR = {"rope_type": "linear", "rope_theta": 7000.0, "factor": 2.0}
_LOCAL = {"rope_type": "default", "rope_theta": 300.0}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_FOUR = {
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 6.0,
    "sliding_window": 9,
}

GEMMA = [
    Case(
        "Gemma2",
        "gqa2-caps",
        {
            **shape(4, 2, 48, 16),
            "query_pre_attn_scalar": 12,
            "sliding_window": 9,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
        },
    ),
    Case(
        "Gemma3",
        "two-ropes",
        {
            **shape(4, 2, 48, 16),
            "query_pre_attn_scalar": 9,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": _LINEAR, "sliding_attention": _LOCAL},
        },
        seed=1,
    ),
    Case("Gemma3", "gqa3-pattern", {**shape(3, 1, 36, 8), "sliding_window": 5}, seed=1),
    Case(
        "Gemma4",
        "two-heads",
        {
            **shape(4, 2, 48, 16),
            **_FOUR,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "layer_types": [_SLIDING, _FULL, _FULL],
        },
    ),
    Case(
        "Gemma4",
        "shared",
        {
            **shape(4, 2, 48, 16),
            **_FOUR,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
        },
    ),
    Case(
        "Gemma4",
        "experts",
        {
            **shape(4, 2, 48, 8),
            **_FOUR,
            "global_head_dim": 12,
            "layer_types": [_SLIDING, _FULL, _FULL],
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
        seed=4,
    ),
    Case(
        "Gemma4",
        "inputs",
        {
            **shape(4, 2, 48, 8),
            **_FOUR,
            "global_head_dim": 12,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 97,
        },
        seed=4,
    ),
]
