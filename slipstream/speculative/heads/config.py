"""Reads the config.json of a drafting head, in the formats of several trainers.

A head's config has the keys of a small language model and keys of the head. The speculators library
nests the former in `transformer_layer_config`, and old vLLM conversions in `model`.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from slipstream.core.errors import CheckpointError
from slipstream.layers.attention import AttentionSpec
from slipstream.layers.layer import LayerSpec
from slipstream.models.catalogue import decoder_config
from slipstream.models.config_keys import read_switched_windows
from slipstream.models.config_reader import HARMLESS_KEYS, ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.own_drafter import OWN_DRAFTER_KEYS
from slipstream.models.quantized.catalogue import refuse_quantized
from slipstream.speculative.heads.checkpoint import HeadCheckpoint

WRAPPER_KEY = "speculators_model_type"
_WRAPPED = "transformer_layer_config"

# The architecture of a head's layers, whatever the head's own architecture is called.
DENSE = {
    "llama": "LlamaForCausalLM",
    "mimo": "MiMoForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Architectures of MTP modules, whose layers are like their target's; other heads are dense.
WITH_EXPERTS = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
WITH_STATES = {"qwen3_5_text": "Qwen3_5ForCausalLM"}
# The speculators library omits keys whose values equal transformers' defaults.
_SIZES = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
_DEFAULT_SIZES = {
    "llama": {**_SIZES, "intermediate_size": 11008, "vocab_size": 32000},
    "qwen3": {**_SIZES, "intermediate_size": 22016, "vocab_size": 151936},
}
# Keys of training or serving, or of parts of the target that a head does not have.
_HARMLESS = HARMLESS_KEYS | {
    "embed_requires_grad",
    "max_window_layers",
    "num_experts_per_tok",
    "num_local_experts",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "speculators_config",
    "speculators_version",
    "target_model_type",
    "transformer_layer_architecture",
    WRAPPER_KEY,
}
_WINDOW_KEYS = ("use_sliding_window", "sliding_window", "layer_types", "max_window_layers")


def is_wrapped(config: Mapping[str, Any]) -> bool:
    """Whether the speculators library wrote this config."""
    return WRAPPER_KEY in config


def wrapped_target(config: Mapping[str, Any]) -> str | None:
    """The name of the target that a speculators drafter was trained for; None if the config is no
    wrapper or does not name it."""
    settings = config.get("speculators_config") if is_wrapped(config) else None
    verifier = settings.get("verifier") if isinstance(settings, Mapping) else None
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    return name if isinstance(name, str) and name else None


def wrapped_num_tokens(config: Mapping[str, Any]) -> int | None:
    """The number of draft tokens per step that the wrapper proposes; None if it has none."""
    settings = config.get("speculators_config")
    proposals = settings.get("proposal_methods") if isinstance(settings, Mapping) else None
    first = proposals[0] if isinstance(proposals, list) and proposals else None
    count = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return count if type(count) is int and count > 0 else None


class HeadReader(ConfigReader):
    """The config keys of a head. In heads, unlike in models, llama layers may have windows.

    Attributes:
        windows: keys of sliding windows that the architecture does not read.
    """

    windows: ConfigReader | None = None


def head_reader(
    checkpoint: HeadCheckpoint,
    read_elsewhere: Collection[str] = (),
    architectures: Mapping[str, str] = DENSE,
) -> HeadReader:
    """Make a reader of a head's unwrapped keys, for the architecture of its layers.

    Args:
        read_elsewhere: keys that do not change the network and are read elsewhere.
        architectures: architecture of the layers by `model_type`; llama for all others.
    """
    config = dict(checkpoint.config)
    inner_key = _WRAPPED if is_wrapped(config) else "model"
    inner = config.pop(inner_key, {})
    if not isinstance(inner, Mapping):
        raise CheckpointError(f'{checkpoint.config_file}: "{inner_key}" must be an object')
    kind = str(inner.get("model_type") or config.get("model_type"))
    kind = kind if kind in architectures else "llama"
    effective = {**inner, **config}
    effective |= {"architectures": [architectures[kind]], "model_type": kind}
    if inner_key == _WRAPPED and kind in _DEFAULT_SIZES:
        effective = {**_DEFAULT_SIZES[kind], **effective}
    effective.setdefault("num_hidden_layers", 1)
    # Whether a head has its own lm_head is read from its tensors.
    effective["tie_word_embeddings"] = False
    refuse_quantized(effective, checkpoint.config_file)
    windows: ConfigReader | None = None
    if kind == "llama":
        found = {key: effective.pop(key) for key in _WINDOW_KEYS if key in effective}
        windows = ConfigReader(found, checkpoint.config_file)
    harmless = (_HARMLESS | OWN_DRAFTER_KEYS).union(read_elsewhere)
    reader = HeadReader(effective, checkpoint.config_file, harmless=harmless)
    reader.windows = windows
    return reader


def read_layers(reader: HeadReader, names: Collection[str]) -> DecoderConfig:
    """Read the head's layers; whether they have q/k norms and biases depends on `names` too."""
    config = decoder_config(reader)
    reader.finish()
    if reader.windows is not None:
        windows = read_switched_windows(reader.windows, config.num_layers)
        config = replace(config, layers=tuple(map(_with_window, config.layers, windows)))
    return with_stored_parts(config, names)


def _with_window(layer: LayerSpec, window: int | None) -> LayerSpec:
    assert isinstance(layer.mixer, AttentionSpec), "layers of the llama kind attend"
    return replace(layer, mixer=replace(layer.mixer, window=window))


def with_stored_parts(
    config: DecoderConfig, names: Collection[str], layer: str = "model.layers.0"
) -> DecoderConfig:
    """Return the config with the q/k norms and biases for which a layer has tensors."""
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    stored = {
        "qk_norm": f"{attention}.q_norm.weight",
        "qkv_bias": f"{attention}.q_proj.bias",
        "output_bias": f"{attention}.o_proj.bias",
    }
    has_mlp_bias = f"{mlp}.gate_proj.bias" in names
    return config.with_fields(
        {field: True for field, name in stored.items() if name in names},
        {"bias": True} if has_mlp_bias else {},
    )
