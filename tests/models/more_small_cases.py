"""Further parity cases of the small families, so that each has six: for `scripts/test --all`."""

from typing import Any

from tests.models.parity_cases import DEFAULT, LINEAR, LLAMA3, TIED, YARN, Case, model, turned
from tests.models.small_cases import ALTERNATING, GROWING, HALF, LONGROPE, QUARTER

SLIDING = "sliding_attention"
BIASED: dict[str, Any] = {"attention_bias": True}


def granite(embedding: float, residual: float, attention: float, logits: float) -> dict[str, Any]:
    return {
        "embedding_multiplier": embedding,
        "residual_multiplier": residual,
        "attention_multiplier": attention,
        "logits_scaling": logits,
    }


STARCODER2 = [
    Case("Starcoder2", "mqa-narrow-window", model(4, 1, 40, rope=LLAMA3, sliding_window=3), seed=3),
    Case(
        "Starcoder2", "gqa7-yarn-tied", model(7, 1, 56, rope=YARN, vocab_size=131, **TIED), seed=1
    ),
    Case(
        "Starcoder2",
        "no-biases-old",
        model(6, 3, 36, rope=LINEAR, use_bias=False, sliding_window=2),
        old_style=True,
        seed=2,
    ),
    Case("Starcoder2", "eps", model(2, 2, 32, norm_epsilon=1e-2, vocab_size=101), "9KB"),
]
GRANITE = [
    Case("Granite", "gqa7-yarn", model(7, 1, 56, rope=YARN, **granite(3.0, 1.5, 0.5, 0.7))),
    Case(
        "Granite",
        "mlp-biases-odd-vocabulary",
        model(4, 1, 40, rope=LINEAR, mlp_bias=True, vocab_size=101, **granite(1.0, 0.5, 0.4, 2.0)),
        "9KB",
        seed=1,
    ),
    Case(
        "Granite",
        "eps-old",
        model(2, 2, 32, rope=LLAMA3, rms_norm_eps=1e-2, **granite(6.0, 0.3, 0.25, 1.1)),
        old_style=True,
    ),
    Case("Granite", "ones-tied", model(6, 3, 36, **BIASED, **TIED), seed=2),
]
EXAONE4 = [
    Case(
        "Exaone4",
        "narrow-window-of-five-layers",
        model(
            7, 1, 56, 10, LINEAR, sliding_window=3, num_hidden_layers=5, sliding_window_pattern=4
        ),
        seed=2,
    ),
    Case(
        "Exaone4",
        "full-first-tied",
        model(
            4, 2, 40, 8, sliding_window=5, layer_types=["full_attention", SLIDING, SLIDING], **TIED
        ),
        "9KB",
    ),
    Case(
        "Exaone4",
        "full-yarn",
        model(6, 1, 36, 8, YARN, sliding_window=None, layer_types=["full_attention"] * 3),
    ),
    Case(
        "Exaone4",
        "odd-vocabulary",
        model(2, 2, 32, 24, LLAMA3, sliding_window=2, layer_types=ALTERNATING, vocab_size=131),
    ),
]
GLM4 = [
    Case("Glm4", "biases-mqa", model(4, 1, 40, 12, HALF, **BIASED), seed=1),
    Case("Glm4", "quarter-rotated-tied", model(4, 4, 36, 8, QUARTER, **TIED), "9KB", seed=1),
    Case("Glm4", "whole-heads-turned", model(7, 1, 56, 6, turned(LLAMA3, 1.0), **BIASED)),
    Case("Glm4", "yarn", model(3, 3, 48, 16, turned(YARN, 0.75), vocab_size=131), seed=1),
    Case("Glm4", "eps", model(14, 2, 56, 4, HALF, rms_norm_eps=1e-2), seed=1),
]
GLM = [
    Case(
        "Glm", "mqa-llama3", model(4, 1, 40, 12, turned(LLAMA3, 0.5), attention_bias=False), seed=1
    ),
    Case("Glm", "gqa7-old", model(7, 1, 56, 10, turned(LINEAR, 0.8)), old_style=True, seed=2),
    Case("Glm", "yarn-odd-vocabulary", model(3, 3, 48, 16, turned(YARN, 0.75), vocab_size=131)),
    Case("Glm", "whole-heads-turned", model(2, 2, 32, 6, turned(DEFAULT, 1.0)), "9KB"),
]
OLMO2 = [
    Case("Olmo2", "mqa-tied", model(4, 1, 40, rope=LLAMA3, **TIED)),
    Case("Olmo2", "gqa7-yarn-biases", model(7, 1, 56, rope=YARN, **BIASED), seed=3),
    Case("Olmo2", "head-dim", model(4, 2, 36, 14, LINEAR, vocab_size=131), "9KB"),
    Case("Olmo2", "eps", model(2, 2, 32, rms_norm_eps=1e-2)),
]
OLMO3_ROPES = {"full_attention": YARN, SLIDING: DEFAULT}
OLMO3 = [
    Case(
        "Olmo3",
        "pattern-of-five",
        model(4, 1, 40, rope=OLMO3_ROPES, sliding_window=3, num_hidden_layers=5),
    ),
    Case(
        "Olmo3",
        "biases-tied",
        model(
            7, 1, 56, rope=OLMO3_ROPES, sliding_window=2, layer_types=ALTERNATING, **BIASED, **TIED
        ),
        "9KB",
    ),
    Case(
        "Olmo3",
        "full-first",
        model(
            3,
            3,
            36,
            rope={"full_attention": LINEAR, SLIDING: DEFAULT},
            sliding_window=5,
            layer_types=["full_attention", SLIDING, SLIDING],
        ),
    ),
    Case(
        "Olmo3",
        "odd-vocabulary",
        model(
            2, 2, 32, rope=OLMO3_ROPES, vocab_size=131, sliding_window=16, layer_types=[SLIDING] * 3
        ),
    ),
    Case(
        "Olmo3",
        "all-full",
        model(
            6,
            3,
            48,
            rope={"full_attention": LLAMA3, SLIDING: DEFAULT},
            rms_norm_eps=1e-2,
            layer_types=["full_attention"] * 3,
        ),
    ),
]
PHI3 = [
    Case("Phi3", "mqa-narrow-window", model(4, 1, 40, sliding_window=3, vocab_size=131), seed=1),
    Case("Phi3", "quarter-rotated-tied", model(3, 3, 48, rope=turned(DEFAULT, 0.25), **TIED)),
    Case(
        "Phi3",
        "gqa7-longrope-window",
        model(7, 1, 56, rope=LONGROPE, sliding_window=16),
        "9KB",
        seed=3,
    ),
    Case("Phi3", "eps", model(4, 4, 32, sliding_window=2, rms_norm_eps=1e-2)),
]
SEED_OSS = [
    Case("SeedOss", "mqa-tied", model(4, 1, 40, 12, LLAMA3, **BIASED, **TIED), "9KB"),
    Case(
        "SeedOss",
        "gqa7-all-biases",
        model(7, 1, 56, 10, YARN, attention_out_bias=True, mlp_bias=True, **BIASED),
    ),
    Case("SeedOss", "no-biases", model(2, 2, 32, 24, LINEAR, attention_bias=False, vocab_size=131)),
    Case(
        "SeedOss", "mlp-biases-eps", model(6, 3, 36, 6, **BIASED, mlp_bias=True, rms_norm_eps=1e-2)
    ),
]
SMOLLM3 = [
    Case("SmolLM3", "mqa-yarn", model(4, 1, 40, rope=YARN, no_rope_layer_interval=3, **TIED)),
    Case("SmolLM3", "gqa7", model(7, 1, 56, rope=LINEAR, no_rope_layers=[1, 0, 0], mlp_bias=True)),
    Case(
        "SmolLM3", "four-layers-eps", model(2, 2, 32, num_hidden_layers=4, rms_norm_eps=1e-2), "9KB"
    ),
    Case(
        "SmolLM3",
        "nowhere",
        model(6, 3, 36, rope=LLAMA3, no_rope_layers=[0, 0, 0], vocab_size=131, **BIASED),
        seed=3,
    ),
]
MINISTRAL3 = [
    Case("Ministral3", "gqa7-narrow-window", model(7, 1, 56, 10, GROWING, sliding_window=3), "9KB"),
    Case("Ministral3", "tied", model(4, 1, 40, 12, {**GROWING, "mscale": 0.7}, **TIED)),
    Case(
        "Ministral3",
        "fast-growth",
        model(3, 3, 36, 16, {**GROWING, "llama_4_scaling_beta": 1.0}, vocab_size=131),
    ),
    Case(
        "Ministral3",
        "default-rope",
        model(2, 2, 32, 8, {**GROWING, "factor": 8.0, "beta_fast": 4.0, "beta_slow": 0.5}),
        seed=2,
    ),
]
MORE_SMALL = [
    *[*STARCODER2, *GRANITE, *EXAONE4, *GLM4, *GLM, *OLMO2],
    *[*OLMO3, *PHI3, *SEED_OSS, *SMOLLM3, *MINISTRAL3],
]
