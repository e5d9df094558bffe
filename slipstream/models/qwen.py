"""Qwen2, Qwen2.5, Qwen2-VL, Qwen2.5-VL and MiMo; Qwen3, Qwen3-Next, Qwen3-VL and Qwen3.5 to 3.8."""

from dataclasses import replace

from slipstream.layers.experts import ExpertNames, ExpertsSpec
from slipstream.models.config_keys import (
    Defaults,
    read_biases,
    read_common,
    read_single_window,
    read_switched_windows,
)
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.delta_keys import DELTA_DEFAULTS, read_experts, read_hybrid
from slipstream.models.expert_keys import read_softmax_routing, read_sparse_layers

_MODEL_TYPES = {"MiMoForCausalLM": "mimo", "Qwen2ForCausalLM": "qwen2"}


def qwen2(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """Qwen2 and Qwen2.5, and MiMo, which is Qwen2 with MTP modules.

    Query, key and value always have biases; no config key turns them off.
    """
    reader.expect("model_type", _MODEL_TYPES[architecture])
    reader.expect("mlp_bias", False)
    reader.expect("use_mrope", False)
    reader.take("attention_bias", bool, True)  # some exporters write it; it has no effect
    defaults = Defaults(max_position_embeddings=32768, num_kv_heads=32)
    common = read_common(reader, architecture, defaults)
    windows = read_switched_windows(reader, common.num_layers)
    return common.decoder(replace(common.attention, qkv_bias=True), windows)


def qwen2_moe(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """Qwen2 MoE, with a gated shared expert.

    Query, key and value have biases unless `qkv_bias` is false. Without `layer_types`, every other
    one of the first `max_window_layers` layers has a sliding window, and later layers have none.
    """
    reader.expect("model_type", "qwen2_moe")
    reader.expect("mlp_bias", False)
    reader.expect("use_mrope", False)
    defaults = Defaults(max_position_embeddings=32768, num_kv_heads=16)
    common = read_common(reader, architecture, defaults)
    windows = read_switched_windows(
        reader, common.num_layers, lambda layer, limit: layer % 2 == 0 and layer < limit
    )
    experts = read_experts(reader, read_softmax_routing(reader, "num_experts", normalised=False))
    return common.decoder(
        replace(common.attention, qkv_bias=reader.take("qkv_bias", bool, True)),
        windows,
        read_sparse_layers(reader, common, experts),
    )


def qwen3(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """Qwen3 (dense), with norms of query and key heads before RoPE.

    `head_dim` defaults to 128, whatever the hidden size; `attention_bias` defaults to false.
    """
    reader.expect("model_type", "qwen3")
    reader.expect("use_mrope", False)
    defaults = Defaults(max_position_embeddings=32768, num_kv_heads=32, head_dim=128)
    common = read_biases(reader, read_common(reader, architecture, defaults))
    attention = replace(common.attention, qk_norm=True)
    return common.decoder(attention, read_switched_windows(reader, common.num_layers))


def qwen3_moe(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """Qwen3 MoE, with experts in most or all layers.

    Attention is as in Qwen3 with other defaults; a sliding window applies to all layers.
    """
    reader.expect("model_type", "qwen3_moe")
    # Qwen3-Coder's files state what all models of this architecture have.
    reader.expect("qkv_bias", False)
    reader.expect("shared_expert_intermediate_size", 0)
    reader.expect("use_qk_norm", True)
    defaults = Defaults(max_position_embeddings=32768, num_kv_heads=4)
    common = read_biases(reader, read_common(reader, architecture, defaults))
    switched_on = reader.take("use_sliding_window", bool, False)
    reader.take("max_window_layers", int, 0)  # configs have it, but it has no effect
    experts = ExpertsSpec(
        routing=read_softmax_routing(reader, "num_experts", normalised=False),
        intermediate_size=reader.take("moe_intermediate_size", int),
    )
    return common.decoder(
        replace(common.attention, qk_norm=True),
        read_single_window(reader, common.num_layers, 4096, switched_on),
        read_sparse_layers(reader, common, experts),
    )


def qwen2_vl(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """The language model of Qwen2-VL and Qwen2.5-VL: Qwen2 with M-RoPE. Published files have its
    keys beside `vision_config`, and newer ones in `text_config`."""
    kind = reader.take("model_type", str)
    if kind.removesuffix("_text") not in ("qwen2_vl", "qwen2_5_vl"):
        raise reader.error("model_type", f"is {kind!r}, but qwen2_vl or qwen2_5_vl is meant here")
    defaults = Defaults(
        max_position_embeddings=32768,
        num_kv_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        sections=(16, 24, 24),
        in_order=True,
    )
    common = read_common(reader, architecture, defaults)
    windows = read_switched_windows(reader, common.num_layers)
    return common.decoder(replace(common.attention, qkv_bias=True), windows)


def qwen3_vl(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """The language model of Qwen3-VL: Qwen3 with M-RoPE. Its vision tower is in `models/vision`."""
    reader.expect("model_type", "qwen3_vl_text")
    defaults = Defaults(
        max_position_embeddings=128000,
        num_kv_heads=32,
        head_dim=128,
        rope_theta=500_000.0,
        sections=(24, 20, 20),
    )
    common = read_biases(reader, read_common(reader, architecture, defaults))
    return common.decoder(replace(common.attention, qk_norm=True))


def qwen3_vl_moe(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """The language model of Qwen3-VL's mixtures: Qwen3 MoE with M-RoPE.

    The weights of a token's chosen experts always sum to 1. Published checkpoints have transposed
    matrices of all experts in one tensor, and those that transformers 5 trained have them upright.
    """
    reader.expect("model_type", "qwen3_vl_moe_text")
    reader.expect("norm_topk_prob", True)
    defaults = Defaults(
        max_position_embeddings=128000,
        num_kv_heads=16,
        rope_theta=500_000.0,
        sections=(24, 20, 20),
    )
    common = read_biases(reader, read_common(reader, architecture, defaults))
    experts = ExpertsSpec(
        routing=read_softmax_routing(reader, "num_experts", normalised=True),
        intermediate_size=reader.take("moe_intermediate_size", int),
        names=ExpertNames(transposed=None),
    )
    return common.decoder(
        replace(common.attention, qk_norm=True),
        feed_forwards=read_sparse_layers(reader, common, experts),
    )


def qwen3_next(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """Qwen3-Next: one attention layer after every three gated delta nets, and experts.

    Checkpoints interleave the input projections of the delta nets by key head.
    """
    reader.expect("model_type", "qwen3_next")
    common = read_common(reader, architecture, DELTA_DEFAULTS)
    experts = read_experts(reader, read_softmax_routing(reader, "num_experts", normalised=True))
    feed_forwards = read_sparse_layers(reader, common, experts)
    return read_hybrid(reader, common, feed_forwards, packed=True)


def qwen3_5(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """The language model of dense Qwen3.5, 3.6 and 3.8, without the vision tower.

    There is one attention layer after every three gated delta nets.
    """
    reader.expect("model_type", "qwen3_5_text")
    common = read_common(reader, architecture, replace(DELTA_DEFAULTS, num_kv_heads=4))
    return read_hybrid(reader, common)


def qwen3_5_moe(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """The language model of Qwen3.5, 3.6 and 3.8 MoE, without the vision tower.

    All layers have experts; the weights of a token's chosen experts sum to 1.
    """
    reader.expect("model_type", "qwen3_5_moe_text")
    reader.expect("norm_topk_prob", True)
    defaults = replace(DELTA_DEFAULTS, intermediate_size=1)  # unused: there are no dense parts
    common = read_common(reader, architecture, defaults)
    experts = read_experts(reader, read_softmax_routing(reader, "num_experts", normalised=True))
    return read_hybrid(reader, common, experts)
