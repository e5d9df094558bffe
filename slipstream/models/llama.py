"""Llama: the plain member of the family."""

from dataclasses import replace

from slipstream.models.config_keys import Defaults, read_common, read_layer_types
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """One key turns on the biases of all attention projections, another those of the MLP."""
    reader.expect("model_type", "llama")
    reader.expect("sliding_window", None)
    common = read_common(reader, architecture, Defaults(max_position_embeddings=2048))
    if any(read_layer_types(reader, common.num_layers) or ()):
        raise reader.error("layer_types", f"has sliding_attention, which {architecture} has not")
    bias = reader.take("attention_bias", bool, False)
    paired = reader.take("rope_interleave", bool, False)
    feed_forward = replace(common.feed_forward, bias=reader.take("mlp_bias", bool, False))
    return common.decoder(
        replace(common.attention, qkv_bias=bias, output_bias=bias, paired=paired),
        feed_forwards=[feed_forward] * common.num_layers,
    )
