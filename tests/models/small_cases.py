"""The parity cases of families that differ from others in a detail or two."""

from tests.models.parity_cases import DEFAULT, LINEAR, LLAMA3, TIED, YARN, Case, shape

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 3000.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [2.0, 2.5, 3.0],
    "original_max_position_embeddings": 48,
    "partial_rotary_factor": 0.75,
}
GROWING = {**YARN, "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}
HALF = {**DEFAULT, "partial_rotary_factor": 0.5}
QUARTER = {**LINEAR, "partial_rotary_factor": 0.25}

ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

SMALL = [
    Case(
        "Starcoder2",
        "window",
        {
            **shape(6, 2, 48),
            "tie_word_embeddings": False,
            "rope_parameters": DEFAULT,
            "sliding_window": 11,
        },
        seed=1,
    ),
    Case(
        "Starcoder2",
        "no-biases-tied",
        {**shape(3, 3, 36), **TIED, "rope_parameters": LINEAR, "use_bias": False},
        "9KB",
        seed=5,
    ),
    Case(
        "Granite",
        "multipliers",
        {
            **shape(6, 2, 48),
            "rope_parameters": DEFAULT,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 1.6,
        },
    ),
    Case(
        "Granite",
        "biases-tied",
        {
            **shape(4, 4, 48),
            **TIED,
            "rope_parameters": LLAMA3,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
            "logits_scaling": 1.25,
            "attention_bias": True,
            "mlp_bias": True,
        },
        "9KB",
        True,
        11,
    ),
    Case(
        "Exaone4",
        "hybrid",
        {
            **shape(6, 2, 48, 16),
            "rope_parameters": LLAMA3,
            "sliding_window": 9,
            "layer_types": ALTERNATING,
        },
    ),
    Case(
        "Exaone4",
        "full-tied",
        {
            **shape(4, 4, 36, 12),
            **TIED,
            "rope_parameters": DEFAULT,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 3,
        },
        "9KB",
    ),
    Case("Glm4", "half-rotated", {**shape(6, 2, 48, 16), "rope_parameters": HALF}),
    Case("Olmo2", "plain", {**shape(6, 2, 48), "rope_parameters": DEFAULT}),
    Case(
        "Olmo2",
        "biases-old",
        {**shape(3, 3, 36), "rope_parameters": LINEAR, "attention_bias": True},
        "9KB",
        True,
    ),
    Case(
        "Olmo3",
        "pattern",
        {
            **shape(6, 2, 48),
            "rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT},
            "sliding_window": 9,
            "layer_types": ALTERNATING,
        },
    ),
    Case("Glm", "half-rotated", {**shape(6, 2, 48, 16), "rope_parameters": HALF}),
    Case(
        "Glm",
        "quarter-rotated-tied",
        {**shape(4, 4, 36, 8), **TIED, "rope_parameters": QUARTER, "attention_bias": False},
        "9KB",
        seed=1,
    ),
    Case("Phi3", "window", {**shape(4, 2, 48), "rope_parameters": DEFAULT, "sliding_window": 13}),
    Case(
        "Phi3",
        "partial-longrope-tied",
        {**shape(6, 2, 48), **TIED, "rope_parameters": LONGROPE},
        "9KB",
    ),
    Case("SeedOss", "plain", {**shape(6, 2, 48, 16), "rope_parameters": DEFAULT}, seed=3),
    Case(
        "SeedOss",
        "other-biases",
        {
            **shape(4, 2, 36, 8),
            "rope_parameters": LINEAR,
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
        },
        old_style=True,
        seed=1,
    ),
    Case(
        "SmolLM3",
        "interval-2",
        {**shape(4, 2, 48), "rope_parameters": LLAMA3, "no_rope_layer_interval": 2},
    ),
    Case(
        "SmolLM3",
        "listed-biases",
        {
            **shape(6, 2, 48),
            "tie_word_embeddings": False,
            "rope_parameters": DEFAULT,
            "no_rope_layers": [0, 1, 0],
            "attention_bias": True,
            "mlp_bias": True,
        },
        seed=1,
    ),
    Case("Ministral3", "growing", {**shape(6, 2, 48, 16), "rope_parameters": GROWING}, seed=2),
    Case(
        "Ministral3",
        "window",
        {**shape(4, 4, 36, 12), "rope_parameters": GROWING, "sliding_window": 11},
        seed=5,
    ),
]
