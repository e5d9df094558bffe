"""Gemmas whose logits and text are compared with those of transformers."""

from typing import Any

from tests.models.parity_cases import DEFAULT, Case, shape

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

_GEMMA2 = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0}


def _gemma2(heads: int, kv_heads: int, hidden: int, head_dim: int, **more: Any) -> dict[str, Any]:
    usual = {"query_pre_attn_scalar": head_dim, "sliding_window": 9, "rope_parameters": DEFAULT}
    return {**shape(heads, kv_heads, hidden, head_dim), **usual, **_GEMMA2, **more}


def _gemma3(heads: int, kv_heads: int, hidden: int, head_dim: int, **more: Any) -> dict[str, Any]:
    usual = {"query_pre_attn_scalar": head_dim, "sliding_window": 5}
    return {**shape(heads, kv_heads, hidden, head_dim), **usual, **more}


def _gemma4(heads: int, kv_heads: int, hidden: int, head_dim: int, **more: Any) -> dict[str, Any]:
    return {**shape(heads, kv_heads, hidden, head_dim), **_FOUR, **more}


# So that each family has six: for `scripts/test --all`.
MORE_GEMMA = [
    Case("Gemma2", "no-caps-mqa", _gemma2(4, 1, 40, 12, **dict.fromkeys(_GEMMA2))),
    Case("Gemma2", "narrow-window-gqa7", _gemma2(7, 1, 56, 10, sliding_window=3), "9KB"),
    Case("Gemma2", "scores-capped", _gemma2(2, 2, 32, 8, final_logit_softcapping=None)),
    Case(
        "Gemma2",
        "full-first-odd-vocabulary",
        _gemma2(3, 3, 36, 16, vocab_size=131, layer_types=[_FULL, _SLIDING, _FULL]),
        seed=1,
    ),
    Case(
        "Gemma2",
        "logits-capped-untied",
        _gemma2(6, 2, 48, 8, attn_logit_softcapping=None, tie_word_embeddings=False),
    ),
    Case("Gemma3", "all-full-mqa", _gemma3(4, 1, 40, 12, layer_types=[_FULL] * 3), seed=1),
    Case(
        "Gemma3",
        "gqa7-narrow-window-capped",
        _gemma3(
            7,
            1,
            56,
            10,
            sliding_window=3,
            final_logit_softcapping=6.0,
            layer_types=[_FULL, _SLIDING, _SLIDING],
        ),
        "9KB",
    ),
    Case(
        "Gemma3",
        "seven-layers-odd-vocabulary",
        _gemma3(2, 2, 32, 8, num_hidden_layers=7, vocab_size=131),
    ),
    Case(
        "Gemma3",
        "untied-eps",
        _gemma3(6, 3, 48, 8, tie_word_embeddings=False, rms_norm_eps=1e-2, sliding_window=2),
        seed=1,
    ),
    Case(
        "Gemma4",
        "narrow-window-gqa7",
        _gemma4(
            7,
            1,
            56,
            8,
            sliding_window=3,
            global_head_dim=16,
            layer_types=[_SLIDING, _SLIDING, _FULL],
        ),
        "19KB",
        seed=1,
    ),
    Case(
        "Gemma4",
        "experts-keys-as-values",
        _gemma4(
            6,
            3,
            36,
            12,
            num_global_key_value_heads=2,
            attention_k_eq_v=True,
            final_logit_softcapping=None,
            layer_types=[_FULL, _SLIDING, _FULL],
            enable_moe_block=True,
            num_experts=8,
            top_k_experts=1,
            moe_intermediate_size=20,
        ),
        seed=1,
    ),
]
