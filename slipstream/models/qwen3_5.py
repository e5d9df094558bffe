"""Qwen3.5, 3.6 and 3.8, dense: three gated delta nets to one layer of attention."""

from dataclasses import replace

from slipstream.models.config_keys import read_common
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.delta_keys import DELTA_DEFAULTS, read_hybrid


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """The language model alone; what reads pictures is left out."""
    reader.expect("model_type", "qwen3_5_text")
    common = read_common(reader, architecture, replace(DELTA_DEFAULTS, num_kv_heads=4))
    return read_hybrid(reader, common)
