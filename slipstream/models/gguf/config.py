"""Translates the metadata of a GGUF file to the keys of config.json."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from slipstream.core.errors import CheckpointError
from slipstream.models.config_reader import ConfigReader
from slipstream.models.gguf.blocks import F32
from slipstream.models.gguf.container import Container, GgufTensor
from slipstream.models.gguf.families import FAMILIES, Config, Family, stored_types
from slipstream.models.gguf.tokenizer import end_ids, token_id
from slipstream.models.safetensors_file import dtype_name, read_into

QUANTIZATION_METHOD: Final = "gguf"
_ROPE_FREQS = "rope_freqs.weight"
_HARMLESS = {
    "vocab_size",  # taken from the embedding's shape
    "attention.causal",
    "rope.scaling.finetuned",
    "tensor_data_layout",
}
# Llama 3's RoPE scaling; GGUF files have the resulting factors instead.
_LLAMA3: Final = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def family_of(container: Container) -> Family:
    """The family of the model in a file; CheckpointError if it is not supported."""
    kind = container.metadata.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(
            f"{container.path} holds no model but the kind {kind!r} (general.type), which is not "
            "read; give the file of the model itself"
        )
    name = container.metadata.get("general.architecture")
    family = FAMILIES.get(str(name))
    if family is None:
        raise CheckpointError(
            f"{container.path}: general.architecture is {name!r}; read from GGUF files are "
            f"{', '.join(FAMILIES)}. Use the model's checkpoint in safetensors, if its family is "
            "supported there"
        )
    return family


def read_config(container: Container) -> Config:
    """Translate the metadata to the keys of config.json.

    Raises:
        CheckpointError: an unsupported family, or a key that is missing, of a wrong type, or
            unknown, so that it might affect the results.
    """
    family = family_of(container)
    prefix = f"{container.metadata['general.architecture']}."
    own = {
        key.removeprefix(prefix): value
        for key, value in container.metadata.items()
        if key.startswith(prefix)
    }
    reader = ConfigReader(own, container.path, prefix, _HARMLESS)
    common = _read_common(reader, container)
    types = stored_types(container)
    quantized = {"quant_method": QUANTIZATION_METHOD, "types": types}
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **common,
        **family.read(reader, common),
        "dtype": _dtype(container.tensors.values()),
        "eos_token_id": end_ids(container),
        "bos_token_id": token_id(container, "bos"),
        "quantization_config": quantized if types else None,
    }
    reader.finish()
    return config


def _read_common(reader: ConfigReader, container: Container) -> Config:
    """Read the keys that all families have."""
    tensors = container.tensors
    width, heads = reader.take("embedding_length", int), _of_layers(reader, "attention.head_count")
    if heads is None:
        raise reader.error("attention.head_count", "is missing; convert the model again")
    even = width // heads if heads > 0 and width % heads == 0 else None
    head_dim = reader.take_optional("attention.key_length", int, even)
    reader.expect("attention.value_length", head_dim)
    reader.expect("rope.dimension_count", head_dim)
    positions = reader.take("context_length", int)
    embeddings = tensors.get("token_embd.weight")
    if embeddings is None:
        raise CheckpointError(
            f"{container.path} has no tensor token_embd.weight; it holds no model"
        )
    return {
        "hidden_size": width,
        "num_hidden_layers": reader.take("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": _of_layers(reader, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": _of_layers(reader, "feed_forward_length", 0),
        "max_position_embeddings": positions,
        "rms_norm_eps": _short(reader.take("attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _short(reader.take("rope.freq_base", float, 10_000.0)),
        "rope_scaling": _rope_scaling(reader, container, positions),
        "vocab_size": embeddings.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }


def _of_layers(reader: ConfigReader, key: str, default: int | None = None) -> int | None:
    """Read a number for all layers, which may be a list of equal numbers, one for each layer."""
    value = reader.take_any(key)
    if not isinstance(value, list):
        return reader.take_optional(key, int, default)
    if not value or len(set(value)) > 1 or type(value[0]) is not int:
        raise reader.error(key, "differs between layers, which is not supported; use another model")
    return value[0]


def _short(value: float) -> float:
    """A float32 number rounded to 7 digits, most likely the decimal number that was written."""
    return float(f"{value:.7g}")


def _rope_scaling(reader: ConfigReader, container: Container, positions: int) -> Config | None:
    kind = reader.take("rope.scaling.type", str, "none")
    factor = reader.take("rope.scaling.factor", float, 1.0)
    factor = reader.take("rope.scale_linear", float, factor)
    original = reader.take("rope.scaling.original_context_length", int, positions)
    given = {
        name: reader.take_optional(f"rope.scaling.{key}", float)
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow"))
    }
    reader.expect("rope.scaling.yarn_ext_factor", 1.0)
    freqs = container.tensors.get(_ROPE_FREQS)
    if kind == "yarn":
        reader.expect("rope.scaling.yarn_attn_factor", 1.0)
        stretch = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
        return {**stretch, **{key: value for key, value in given.items() if value is not None}}
    if freqs is not None:
        if kind != "none" or factor not in (0.0, 1.0):
            raise reader.error("rope.scaling.type", f"is {kind!r} together with {_ROPE_FREQS}")
        return _from_factors(freqs, reader, positions)
    if kind in ("none", "linear"):
        return None if factor in (0.0, 1.0) else {"rope_type": "linear", "factor": factor}
    raise reader.error("rope.scaling.type", f"is {kind!r}, but only none, linear and yarn are read")


def _from_factors(freqs: GgufTensor, reader: ConfigReader, positions: int) -> Config:
    """RoPE parameters from `rope_freqs`, the divisors of frequencies: Llama 3's rule if they follow
    it, else longrope with these factors."""
    if freqs.kind != F32 or len(freqs.shape) != 1:
        raise CheckpointError(f"{reader.file}: {_ROPE_FREQS} must be a list of F32 numbers")
    factors = torch.empty(freqs.shape)
    read_into(freqs.entry(_ROPE_FREQS), factors)
    theta = reader.take("rope.freq_base", float, 10_000.0)
    largest = _short(float(factors.max()))
    inverse = theta ** -(torch.arange(len(factors), dtype=torch.float64) / len(factors))
    turns = _LLAMA3["original_max_position_embeddings"] * inverse / (2 * torch.pi)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    expected = 1 / (kept + (1 - kept) / largest)
    if torch.allclose(expected, factors.double(), rtol=1e-4):
        return {"rope_type": "llama3", "factor": largest, **_LLAMA3}
    numbers = factors.tolist()
    return {
        "rope_type": "longrope",
        "short_factor": numbers,
        "long_factor": numbers,
        "original_max_position_embeddings": positions,
        "attention_factor": 1.0,
    }


def _dtype(tensors: Sequence[GgufTensor] | Any) -> str:
    """The dtype with the most bytes in the model's matrices; quantised types count as
    bfloat16."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if len(tensor.shape) > 1:
            dtype = tensor.kind.floats or torch.bfloat16
            sizes[dtype] = sizes.get(dtype, 0) + tensor.nbytes
    largest = max(sizes, key=lambda dtype: sizes[dtype], default=torch.bfloat16)
    return dtype_name(largest)


def sampling_defaults(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling defaults from the metadata, by the keys of generation_config.json."""
    names = {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
    found = {name: metadata.get(f"general.sampling.{key}") for key, name in names.items()}
    return {name: value for name, value in found.items() if value is not None}
