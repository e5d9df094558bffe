"""Mistral, Mixtral, Ministral 3 and Mistral Small."""

from dataclasses import replace

from slipstream.kernels.experts import Routing, Scores
from slipstream.layers.experts import ExpertNames, ExpertsSpec
from slipstream.models.config_keys import Defaults, read_common, read_single_window
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.expert_keys import latent_decoder, read_softmax_routing

_NAMES = ExpertNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    projections=("w1", "w3", "w2"),
)


def mistral(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """Mistral: no biases, and either all layers have the same sliding window or none has.

    A missing `sliding_window` means 4096 tokens; null means no window.
    """
    reader.expect("model_type", "mistral")
    reader.expect("attention_bias", False)
    reader.expect("mlp_bias", False)
    defaults = Defaults(max_position_embeddings=131072, num_kv_heads=8)
    common = read_common(reader, architecture, defaults)
    return common.decoder(common.attention, read_single_window(reader, common.num_layers, 4096))


def mixtral(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """Mixtral: Mistral with experts in every layer.

    `intermediate_size` is the size of one expert; a token's routing weights always sum to 1.
    """
    reader.expect("model_type", "mixtral")
    reader.expect("attention_bias", False)
    reader.expect("mlp_bias", False)
    reader.take("router_jitter_noise", float, 0.0)  # only used in training
    defaults = Defaults(
        max_position_embeddings=131072, num_kv_heads=8, rms_norm_eps=1e-5, rope_theta=1e6
    )
    common = read_common(reader, architecture, defaults)
    routing = Routing(
        num_experts=reader.take_named(("num_local_experts", "num_experts"), int),
        num_chosen=reader.take("num_experts_per_tok", int),
        scores=Scores.SOFTMAX,
        normalised=True,
    )
    experts = ExpertsSpec(
        routing=routing, intermediate_size=common.feed_forward.intermediate_size, names=_NAMES
    )
    windows = read_single_window(reader, common.num_layers, None)
    return common.decoder(common.attention, windows, experts)


def ministral3(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """Ministral 3: Mistral with YaRN and position-dependent query scaling (from Llama 4).

    The scaling is configured in the RoPE parameters.
    """
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


def mistral3(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """The language model of multimodal Mistral Small 3.1 and Ministral 3, without vision tower."""
    if reader.take("model_type", str) == "ministral3":
        return ministral3(reader, architecture)
    return mistral(reader, architecture)


def mistral4(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """Mistral Small 4: latent attention (MLA) with position-dependent query scaling, and experts.

    The scaling is configured in the RoPE parameters.
    """
    reader.expect("model_type", "mistral4")
    reader.expect("n_group", 1)
    reader.expect("topk_group", 1)
    defaults = Defaults(
        max_position_embeddings=1048576, head_dim=128, rotated=0.5, queries_grow=True
    )
    common = read_common(reader, architecture, defaults)
    routing = read_softmax_routing(reader, "n_routed_experts", normalised=True)
    inner = reader.take("moe_intermediate_size", int)
    shared = reader.take("n_shared_experts", int, 1)
    experts = ExpertsSpec(
        routing=replace(routing, scale=reader.take("routed_scaling_factor", float, 1.0)),
        intermediate_size=inner,
        shared_size=shared * inner or None,
    )
    return latent_decoder(reader, common, experts, num_dense=0)
