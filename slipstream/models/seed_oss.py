"""Seed-OSS: query, key and value have biases; the output projection has one only if configured."""

from dataclasses import replace

from slipstream.models.config_keys import Defaults, read_common
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """Three config keys turn biases on: for qkv, the output projection, and the MLP."""
    reader.expect("model_type", "seed_oss")
    defaults = Defaults(max_position_embeddings=524288, num_kv_heads=8, head_dim=128)
    common = read_common(reader, architecture, defaults)
    attention = replace(
        common.attention,
        qkv_bias=reader.take("attention_bias", bool, True),
        output_bias=reader.take("attention_out_bias", bool, False),
    )
    feed_forward = replace(common.feed_forward, bias=reader.take("mlp_bias", bool, False))
    return common.decoder(attention, feed_forwards=[feed_forward] * common.num_layers)
