"""The shapes of published models, by name, and directories that have such a shape."""

import json
from pathlib import Path
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def _qwen3(width: int, inner: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        **_QWEN3,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "tie_word_embeddings": tied,
    }


def _llama(
    width: int, inner: int, layers: int, head_dim: int, tied: bool, stretch: float
) -> dict[str, Any]:
    return {
        **_LLAMA,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "head_dim": head_dim,
        "tie_word_embeddings": tied,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": stretch,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


GEOMETRIES = {
    # For tests: an engine that is ready in no time.
    "tiny": {**_qwen3(64, 160, 4, 8, True), "head_dim": 16, "vocab_size": 512},
    # The same over the tokens of the bundled demo, whose tokenizer a checkpoint can then have.
    "tiny-text": {**_qwen3(64, 160, 4, 8, True), "head_dim": 16, "vocab_size": 4096},
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, False),
    "llama-3.2-1b": _llama(2048, 8192, 16, 64, True, 32.0),
    "llama-3.1-8b": _llama(4096, 14336, 32, 128, False, 8.0),
}

# Drafting heads of Qwen3-8B, as SpecForge has them: a Llama layer over [embedding, feature], more
# of them in a parallel head, and an lm_head over the tokens that come most often.
_HEAD: dict[str, Any] = {
    **_LLAMA,
    **{key: _QWEN3[key] for key in ("head_dim", "vocab_size", "rope_theta", "rms_norm_eps")},
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 1,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "draft_vocab_size": 32000,
}
HEADS = {
    "qwen3-8b-eagle3": _HEAD,
    "qwen3-8b-p-eagle": {
        **_HEAD,
        "architectures": ["PEagleDraftModel"],
        "num_hidden_layers": 4,
        "ptd_token_id": 151670,
    },
}
_STREAMS = 3  # of the target, which a head's first matrix joins


def head_matrix_parameters(name: str) -> int:
    """The numbers that one pass of a head reads; the first matrix, once a step, is among them."""
    config = HEADS[name]
    width, inner, depth = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    mixer, mlp = width * (query + 2 * key), 3 * width * inner
    layers = depth * (mixer + query * width + mlp) + mixer  # the first reads twice the width
    total: int = layers + (_STREAMS * width + config["draft_vocab_size"]) * width
    return total


def geometry_named(name: str) -> dict[str, Any]:
    """The config of a geometry: "qwen3-8b", or "qwen3-8b:3" for its first 3 layers.

    Raises ValueError for a name that is not known.
    """
    known, _, layers = name.partition(":")
    if known not in GEOMETRIES or not (layers.isdecimal() or not layers):
        raise ValueError(f"unknown geometry {name!r}; there are {', '.join(GEOMETRIES)}")
    config = dict(GEOMETRIES[known])
    if layers:
        config["num_hidden_layers"] = int(layers)
    return config


def write_config(folder: Path, geometry: str, **changes: Any) -> Path:
    """A directory with a config.json alone, for `load_format` "dummy" and "twin"."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**(HEADS.get(geometry) or geometry_named(geometry)), **changes}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
