"""Ministral 3: Mistral with YaRN and queries that grow with their position."""

from slipstream.models.config_keys import Defaults, read_common, read_single_window
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """The growth of queries stands among the rope parameters."""
    reader.expect("model_type", "ministral3")
    reader.expect("attention_bias", False)
    reader.expect("mlp_bias", False)
    defaults = Defaults(
        max_position_embeddings=262144,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        queries_grow=True,
    )
    common = read_common(reader, architecture, defaults)
    return common.decoder(common.attention, read_single_window(reader, common.num_layers, None))
