"""The language model of Qwen3-VL: that of Qwen3, at positions with several axes."""

from dataclasses import replace

from slipstream.models.config_keys import Defaults, read_common
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """What reads images is in `models/vision`."""
    reader.expect("model_type", "qwen3_vl_text")
    defaults = Defaults(
        max_position_embeddings=128000,
        num_kv_heads=32,
        head_dim=128,
        rope_theta=500_000.0,
        sections=(24, 20, 20),
    )
    common = read_common(reader, architecture, defaults)
    bias = reader.take("attention_bias", bool, False)
    return common.decoder(replace(common.attention, qkv_bias=bias, output_bias=bias, qk_norm=True))
