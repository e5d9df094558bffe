"""Model families in GGUF files: the names of their keys and tensors in config.json and safetensors.

Sources: https://github.com/ggml-org/llama.cpp, `convert_hf_to_gguf.py` and `src/models`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from slipstream.models.config_reader import ConfigReader
from slipstream.models.gguf.container import Container, GgufTensor
from slipstream.models.safetensors_file import TensorEntry

Config = dict[str, Any]

OUTSIDE: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
"""Modules outside of layers."""

_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS: Final = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}


@dataclass(frozen=True)
class Family:
    """How one `general.architecture` is translated.

    Attributes:
        architecture, model_type: values of these keys in config.json.
        read: reads the family's own keys; returns keys of config.json, which are added to the
            common ones or replace them.
        layer: names of a layer's modules; braces stand for the expert's number.
        rename: names of a layer's tensors whose ending differs, too.
    """

    architecture: str
    model_type: str
    read: Callable[[ConfigReader, Config], Config]
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    rename: Mapping[str, str] = field(default_factory=dict)


def _llama(reader: ConfigReader, common: Config) -> Config:
    """The rows of queries and keys are in the order of interleaved RoPE."""
    reader.expect("expert_count", 0)
    reader.take("expert_used_count", int, 0)
    return {"rope_interleave": True}


def _qwen(reader: ConfigReader, common: Config) -> Config:
    return {}


def _qwen3_moe(reader: ConfigReader, common: Config) -> Config:
    reader.expect("expert_gating_func", 1, default=1)  # softmax
    reader.expect("expert_weights_scale", 1.0)
    inner = reader.take("expert_feed_forward_length", int)
    return {
        "num_experts": reader.take("expert_count", int),
        "num_experts_per_tok": reader.take("expert_used_count", int),
        "moe_intermediate_size": inner,
        "intermediate_size": common["intermediate_size"] or inner,
        "norm_topk_prob": True,
    }


def _gpt_oss(reader: ConfigReader, common: Config) -> Config:
    scaling = common["rope_scaling"]
    return {
        "num_local_experts": reader.take("expert_count", int),
        "num_experts_per_tok": reader.take("expert_used_count", int),
        "intermediate_size": reader.take("expert_feed_forward_length", int),
        "sliding_window": reader.take("attention.sliding_window", int),
        **_slides(reader, common, 2),
        "rope_scaling": {**scaling, "truncate": False} if scaling else None,
    }


_LAYERS_OF_27B = 62  # only the 27B model scales scores by something else than the head size


def _gemma3(reader: ConfigReader, common: Config) -> Config:
    heads, width = common["num_attention_heads"], common["hidden_size"]
    largest = common["num_hidden_layers"] == _LAYERS_OF_27B
    slides = {"sliding_window": reader.take("attention.sliding_window", int)}
    return {
        **slides,
        **_slides(reader, common, 6),
        "rope_local_base_freq": reader.take("rope.freq_base_swa", float, 10_000.0),
        "query_pre_attn_scalar": width // heads if largest and heads else common["head_dim"],
        "final_logit_softcapping": reader.take("final_logit_softcapping", float, 0.0) or None,
        "zero_centred_norms": False,  # the file's norms include the 1
    }


def _slides(reader: ConfigReader, common: Config, usual: int) -> Config:
    """The layer types: from a list, or all but every n-th layer have a sliding window."""
    key = "attention.sliding_window_pattern"
    given = reader.take_any(key)
    count = common["num_hidden_layers"]
    if isinstance(given, list):
        if len(given) < count or not all(value in (0, 1) for value in given):
            raise reader.error(key, "must have 0 or 1 for each layer")
        windows = [bool(value) for value in given[:count]]
    else:
        step = reader.take(key, int, usual)
        windows = [step > 0 and (layer + 1) % step > 0 for layer in range(min(count, 1 << 12))]
    names = ["sliding_attention" if window else "full_attention" for window in windows]
    return {"layer_types": names}


FAMILIES: Final = {
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _gemma3,
        {
            **_LAYER,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        "gpt_oss",
        _gpt_oss,
        {
            **_LAYER,
            **_EXPERTS,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        {"attn_sinks.weight": "self_attn.sinks"},
    ),
    "llama": Family("LlamaForCausalLM", "llama", _llama),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", _qwen),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", _qwen),
    "qwen3moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_moe, {**_LAYER, **_EXPERTS}),
}
"""The families, by `general.architecture`. A new one is a function and an entry here."""


_IN_LAYER = re.compile(r"blk\.(\d+)\.((\w+)\.(weight|bias))")
_OF_EXPERT = re.compile(r"\.experts\.\d+\.")
_MOST_EXPERTS = 4096  # a limit for broken files, since each expert gets a name
# Tensors that are read with the metadata, not by layers.
_OF_CONFIG = ("rope_freqs.weight",)


def renamed_entries(container: Container) -> dict[str, TensorEntry]:
    """All tensors by their names in safetensors; stacked experts are split into separate entries.

    A tensor without a translation keeps its name, so that loading rejects it as unknown.
    """
    return {
        entry.name: entry
        for tensor, names in _renamed(container)
        for entry in _split(tensor, names)
    }


def stored_types(container: Container) -> dict[str, str]:
    """The types of the quantised modules, by module name."""
    return {
        name.removesuffix(".weight"): tensor.kind.name
        for tensor, names in _renamed(container)
        for name in names
        if tensor.kind.floats is None
    }


def _renamed(container: Container) -> Iterator[tuple[GgufTensor, list[str]]]:
    """All tensors that layers may read, with their names: several for stacked experts."""
    family = FAMILIES[str(container.metadata["general.architecture"])]
    for tensor in container.tensors.values():
        if tensor.name not in _OF_CONFIG:
            yield tensor, _names(tensor, family)


def _names(tensor: GgufTensor, family: Family) -> list[str]:
    module, _, ending = tensor.name.rpartition(".")
    if module in OUTSIDE:
        return [f"{OUTSIDE[module]}.{ending}"]
    match = _IN_LAYER.fullmatch(tensor.name)
    if match is None:
        return [tensor.name]
    layer = f"model.layers.{int(match[1])}"
    if match[2] in family.rename:
        return [f"{layer}.{family.rename[match[2]]}"]
    name = family.layer.get(match[3])
    if name is not None and "{}" not in name:
        return [f"{layer}.{name}.{match[4]}"]
    if name is None or len(tensor.shape) < 2 or tensor.shape[0] > _MOST_EXPERTS:
        return [tensor.name]
    return [f"{layer}.{name.format(index)}.{match[4]}" for index in range(tensor.shape[0])]


def _split(tensor: GgufTensor, names: list[str]) -> Iterator[TensorEntry]:
    """The tensor's entry, or for several names one entry for each index of the first dimension."""
    if _OF_EXPERT.search(names[0]) is None:
        yield tensor.entry(names[0])
        return
    whole = tensor.entry(tensor.name)
    for index, name in enumerate(names):
        entry = whole.row_range(index, index + 1)
        yield replace(entry, name=name, shape=entry.shape[1:])
