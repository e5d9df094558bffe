"""The checkpoints whose logits and text are compared with those of transformers."""

from dataclasses import dataclass
from typing import Any

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 48,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5}
DEFAULT = {"rope_type": "default", "rope_theta": 3000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 24,
}


@dataclass(frozen=True)
class Case:
    """One checkpoint.

    Attributes:
        changes: keys of its config.
        shard_size: of its files; None writes one file.
        old_style: config.json is rewritten to the keys that transformers 4 wrote.
        seed: of its weights, chosen so that greedy text has no near ties.
    """

    architecture: str
    name: str
    changes: dict[str, Any]
    shard_size: str | None = None
    old_style: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.architecture}-{self.name}"


def shape(heads: int, kv_heads: int, hidden: int, head_dim: int | None = None) -> dict[str, Any]:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": hidden}
    return sizes if head_dim is None else {**sizes, "head_dim": head_dim}


def model(
    heads: int,
    kv_heads: int,
    hidden: int,
    head_dim: int | None = None,
    rope: dict[str, Any] = DEFAULT,
    **more: Any,
) -> dict[str, Any]:
    sizes = shape(heads, kv_heads, hidden, head_dim)
    return {**sizes, "tie_word_embeddings": False, "rope_parameters": rope, **more}


def turned(rope: dict[str, Any], share: float) -> dict[str, Any]:
    return {**rope, "partial_rotary_factor": share}


TIED: dict[str, Any] = {"tie_word_embeddings": True}

LLAMA = [
    Case("Llama", "plain", {**shape(4, 4, 48), "rope_parameters": DEFAULT}),
    Case("Llama", "llama3-gqa3-tied", {**shape(6, 2, 48, 10), **TIED, "rope_parameters": LLAMA3}),
    Case("Llama", "llama3-gqa7-old", {**shape(7, 1, 56), "rope_parameters": LLAMA3}, "9KB", True),
    Case(
        "Llama",
        "linear-gqa3-biases-old",
        {
            **shape(3, 1, 36, 16),
            "rope_parameters": LINEAR,
            "attention_bias": True,
            "mlp_bias": True,
        },
        old_style=True,
        seed=1,
    ),
    Case("Llama", "linear-tied", {**shape(2, 2, 40, 8), **TIED, "rope_parameters": LINEAR}, "9KB"),
    Case(
        "Llama",
        "llama3-gqa7-biases",
        {
            **shape(14, 2, 56, 6),
            "rope_parameters": LLAMA3,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
        },
    ),
]

QWEN2 = [
    Case("Qwen2", "plain", {**shape(4, 4, 48), "rope_parameters": DEFAULT}, seed=1),
    Case("Qwen2", "gqa3-tied", {**shape(6, 2, 48), **TIED, "rope_parameters": LINEAR}, "9KB"),
    Case(
        "Qwen2",
        "gqa7-window-from-layer-1",
        {
            **shape(7, 1, 56),
            "rope_parameters": DEFAULT,
            "use_sliding_window": True,
            "sliding_window": 11,
            "max_window_layers": 1,
        },
        seed=2,
    ),
    Case(
        "Qwen2",
        "gqa7-window-from-layer-2-old",
        {
            **shape(14, 2, 56),
            **TIED,
            "rope_parameters": DEFAULT,
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 2,
        },
        "9KB",
        True,
        8,
    ),
    Case(
        "Qwen2",
        "gqa3-layer-types",
        {
            **shape(3, 1, 36),
            "rope_parameters": LLAMA3,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    Case(
        "Qwen2",
        "head-dim-llama3-old",
        {**shape(2, 2, 40, 12), "rope_parameters": LLAMA3},
        "9KB",
        True,
    ),
    Case(
        "Qwen2",
        "switched-off-window-old",
        {
            **shape(2, 2, 40),
            "rope_parameters": LINEAR,
            "use_sliding_window": False,
            "max_window_layers": 0,
        },
        old_style=True,
        seed=2,
    ),
]

QWEN3 = [
    Case("Qwen3", "plain", {**shape(4, 4, 48, 12), "rope_parameters": DEFAULT}),
    Case(
        "Qwen3",
        "gqa3-tied",
        {**shape(6, 2, 48, 16), **TIED, "rope_parameters": LINEAR},
        "9KB",
        seed=2,
    ),
    Case(
        "Qwen3",
        "gqa7-biases-old",
        {**shape(7, 1, 56, 10), "rope_parameters": LLAMA3, "attention_bias": True},
        old_style=True,
        seed=1,
    ),
    Case(
        "Qwen3",
        "gqa7-window-from-layer-1",
        {
            **shape(14, 2, 42, 4),
            "rope_parameters": DEFAULT,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
        },
    ),
    Case(
        "Qwen3",
        "gqa3-layer-types-tied",
        {
            **shape(3, 1, 36, 24),
            **TIED,
            "rope_parameters": LINEAR,
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        "9KB",
    ),
    Case("Qwen3", "default-head-dim-yarn", {**shape(2, 1, 32), "rope_parameters": YARN}),
]

MISTRAL = [
    Case(
        "Mistral", "plain", {**shape(4, 4, 48), "rope_parameters": DEFAULT, "sliding_window": None}
    ),
    Case(
        "Mistral",
        "gqa3-window",
        {**shape(6, 2, 48, 16), "rope_parameters": DEFAULT, "sliding_window": 13},
    ),
    Case(
        "Mistral",
        "gqa7-window-tied-old",
        {**shape(7, 1, 56), **TIED, "rope_parameters": LINEAR, "sliding_window": 16},
        "9KB",
        True,
        1,
    ),
    Case(
        "Mistral",
        "gqa7-yarn-window",
        {**shape(14, 2, 56, 6), "rope_parameters": YARN, "sliding_window": 5},
        seed=4,
    ),
    Case(
        "Mistral",
        "wide-window-tied",
        {**shape(2, 2, 40, 8), **TIED, "rope_parameters": LLAMA3, "sliding_window": 4096},
        "9KB",
    ),
    Case(
        "Mistral",
        "gqa3-narrow-window-old",
        {**shape(3, 1, 36), "rope_parameters": DEFAULT, "sliding_window": 2},
        old_style=True,
    ),
]
