"""Qwen2 and Qwen2.5: biases on query, key and value, always."""

from dataclasses import replace

from slipstream.models.config_keys import Defaults, read_common, read_switched_windows
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig

ARCHITECTURE = "Qwen2ForCausalLM"


def decoder_config(reader: ConfigReader) -> DecoderConfig:
    """The biases are part of the architecture: no key switches them."""
    reader.expect("model_type", "qwen2")
    reader.expect("mlp_bias", False)
    reader.expect("use_mrope", False)
    reader.take("attention_bias", bool, True)  # some exporters write it; nobody reads it
    defaults = Defaults(max_position_embeddings=32768, num_kv_heads=32)
    config = read_common(reader, ARCHITECTURE, defaults)
    windows = read_switched_windows(reader, config.num_layers)
    return replace(config, qkv_bias=True, sliding_windows=windows)
