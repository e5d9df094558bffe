"""Llama: the plain member of the family."""

from dataclasses import replace

from slipstream.models.config_keys import Defaults, read_common, read_layer_types
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig

ARCHITECTURE = "LlamaForCausalLM"


def decoder_config(reader: ConfigReader) -> DecoderConfig:
    """One switch gives all four attention projections a bias, another all three of the MLP."""
    reader.expect("model_type", "llama")
    reader.expect("sliding_window", None)
    config = read_common(reader, ARCHITECTURE, Defaults(max_position_embeddings=2048))
    if any(read_layer_types(reader, config.num_layers) or ()):
        raise reader.error("layer_types", f"has sliding_attention, which {ARCHITECTURE} has not")
    attention_bias = reader.take("attention_bias", bool, False)
    return replace(
        config,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=reader.take("mlp_bias", bool, False),
    )
