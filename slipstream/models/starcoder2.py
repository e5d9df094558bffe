"""Starcoder 2: layer norms with biases, and a feed-forward part without a gate."""

from dataclasses import replace

from slipstream.kernels.norm import Activation
from slipstream.layers.mlp import PlainMLPSpec
from slipstream.layers.norm import LayerNorms
from slipstream.models.config_keys import Defaults, read_common, read_single_window
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """One config key turns on the biases of all projections."""
    reader.expect("model_type", "starcoder2")
    reader.expect("mlp_type", "default")
    reader.expect("norm_type", "layer_norm")
    reader.take("activation_function", str, "")  # an older key, which has no effect
    defaults = Defaults(
        max_position_embeddings=4096,
        num_kv_heads=2,
        tie_word_embeddings=True,
        hidden_act="gelu_pytorch_tanh",
    )
    common = read_common(reader, architecture, defaults)
    norms = LayerNorms(reader.take("norm_epsilon", float, 1e-5), layer_norms=True)
    bias = reader.take("use_bias", bool, True)
    inner = common.feed_forward.intermediate_size
    feed_forward = PlainMLPSpec(inner, Activation.GELU_TANH, bias, up="c_fc", down="c_proj")
    return replace(common, norms=norms).decoder(
        replace(common.attention, qkv_bias=bias, output_bias=bias),
        read_single_window(reader, common.num_layers, None),
        [feed_forward] * common.num_layers,
    )
