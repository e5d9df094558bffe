"""Qwen3 with mixtures of experts in most or all layers."""

from dataclasses import replace

from slipstream.layers.experts import ExpertsSpec
from slipstream.models.config_keys import Defaults, read_common, read_single_window
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.expert_keys import read_softmax_routing, read_sparse_layers


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """Attention is that of Qwen3 but for its defaults; a window counts for all layers."""
    reader.expect("model_type", "qwen3_moe")
    reader.expect("mlp_bias", False)
    defaults = Defaults(max_position_embeddings=32768, num_kv_heads=4)
    common = read_common(reader, architecture, defaults)
    bias = reader.take("attention_bias", bool, False)
    switched_on = reader.take("use_sliding_window", bool, False)
    reader.take("max_window_layers", int, 0)  # files have it, and nobody reads it
    experts = ExpertsSpec(
        routing=read_softmax_routing(reader, "num_experts", normalised=False),
        intermediate_size=reader.take("moe_intermediate_size", int),
    )
    sparse = read_sparse_layers(reader, common.num_layers)
    return common.decoder(
        replace(common.attention, qkv_bias=bias, output_bias=bias, qk_norm=True),
        read_single_window(reader, common.num_layers, 4096, switched_on),
        [experts if has_experts else common.feed_forward for has_experts in sparse],
    )
