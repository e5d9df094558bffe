"""Mistral: no biases, and one sliding window for every layer or none."""

from slipstream.models.config_keys import Defaults, read_common, read_single_window
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """A missing `sliding_window` is one of 4096 tokens; null is none."""
    reader.expect("model_type", "mistral")
    reader.expect("attention_bias", False)
    reader.expect("mlp_bias", False)
    defaults = Defaults(max_position_embeddings=131072, num_kv_heads=8)
    common = read_common(reader, architecture, defaults)
    return common.decoder(common.attention, read_single_window(reader, common.num_layers, 4096))
