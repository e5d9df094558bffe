"""MiMo: Qwen2 under another name, with modules beside it that only its drafter reads."""

from dataclasses import replace

from slipstream.models.config_keys import Defaults, read_common, read_switched_windows
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig

ARCHITECTURE = "MiMoForCausalLM"


def decoder_config(reader: ConfigReader) -> DecoderConfig:
    """What Qwen2 takes; its config class has no key of its own for the network."""
    reader.expect("model_type", "mimo")
    reader.expect("mlp_bias", False)
    reader.expect("use_mrope", False)
    reader.take("attention_bias", bool, True)  # written and not read: the biases are always there
    defaults = Defaults(max_position_embeddings=32768, num_kv_heads=32)
    config = read_common(reader, ARCHITECTURE, defaults)
    windows = read_switched_windows(reader, config.num_layers)
    return replace(config, qkv_bias=True, sliding_windows=windows)
