"""Mixtral: Mistral with experts in every layer."""

from slipstream.kernels.experts import Routing, Scores
from slipstream.layers.experts import ExpertNames, ExpertsSpec
from slipstream.models.config_keys import Defaults, read_common, read_single_window
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig

_NAMES = ExpertNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    projections=("w1", "w3", "w2"),
)


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """`intermediate_size` is that of an expert; a row's weights always add up to 1."""
    reader.expect("model_type", "mixtral")
    reader.expect("attention_bias", False)
    reader.expect("mlp_bias", False)
    reader.take("router_jitter_noise", float, 0.0)  # of training
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
    return common.decoder(
        common.attention,
        read_single_window(reader, common.num_layers, None),
        [experts] * common.num_layers,
    )
