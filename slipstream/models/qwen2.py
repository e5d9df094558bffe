"""Qwen2 and Qwen2.5, and MiMo, which is Qwen2 with MTP modules beside it: biases on query, key and
value."""

from dataclasses import replace

from slipstream.models.config_keys import Defaults, read_common, read_switched_windows
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig

_MODEL_TYPES = {"MiMoForCausalLM": "mimo", "Qwen2ForCausalLM": "qwen2"}


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """The biases are part of the architecture: no key switches them."""
    reader.expect("model_type", _MODEL_TYPES[architecture])
    reader.expect("mlp_bias", False)
    reader.expect("use_mrope", False)
    reader.take("attention_bias", bool, True)  # some exporters write it; nobody reads it
    defaults = Defaults(max_position_embeddings=32768, num_kv_heads=32)
    common = read_common(reader, architecture, defaults)
    windows = read_switched_windows(reader, common.num_layers)
    return common.decoder(replace(common.attention, qkv_bias=True), windows)
