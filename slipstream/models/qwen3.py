"""Qwen3 (dense): query and key heads are normalised before they are rotated."""

from dataclasses import replace

from slipstream.models.config_keys import Defaults, read_common, read_switched_windows
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """`head_dim` is 128 unless given, whatever the hidden size; biases only on request."""
    reader.expect("model_type", "qwen3")
    reader.expect("mlp_bias", False)
    reader.expect("use_mrope", False)
    defaults = Defaults(max_position_embeddings=32768, num_kv_heads=32, head_dim=128)
    common = read_common(reader, architecture, defaults)
    bias = reader.take("attention_bias", bool, False)
    attention = replace(common.attention, qkv_bias=bias, output_bias=bias, qk_norm=True)
    return common.decoder(attention, read_switched_windows(reader, common.num_layers))
