"""Qwen2 with mixtures of experts, beside which one expert with a gate takes every token."""

from dataclasses import replace

from slipstream.layers.experts import ExpertNames, ExpertsSpec
from slipstream.models.config_keys import Defaults, read_common, read_switched_windows
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.expert_keys import read_softmax_routing, read_sparse_layers


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """Biases of query, key and value are there unless switched off. Where no types of layers are
    given, every other one of the first `max_window_layers` slides, not those behind them."""
    reader.expect("model_type", "qwen2_moe")
    reader.expect("mlp_bias", False)
    reader.expect("use_mrope", False)
    defaults = Defaults(max_position_embeddings=32768, num_kv_heads=16)
    common = read_common(reader, architecture, defaults)
    windows = read_switched_windows(
        reader, common.num_layers, lambda layer, limit: layer % 2 == 0 and layer < limit
    )
    experts = ExpertsSpec(
        routing=read_softmax_routing(reader, "num_experts", normalised=False),
        intermediate_size=reader.take("moe_intermediate_size", int),
        shared_size=reader.take("shared_expert_intermediate_size", int),
        shared_gate=True,
        names=ExpertNames(shared="mlp.shared_expert"),
    )
    sparse = read_sparse_layers(reader, common.num_layers)
    return common.decoder(
        replace(common.attention, qkv_bias=reader.take("qkv_bias", bool, True)),
        windows,
        [experts if has_experts else common.feed_forward for has_experts in sparse],
    )
