"""Mistral Small 4: latent attention whose queries grow with their position, and experts."""

from dataclasses import replace

from slipstream.layers.experts import ExpertsSpec
from slipstream.models.config_keys import Defaults, read_common
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.expert_keys import read_softmax_routing
from slipstream.models.latent_keys import latent_decoder


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """The growth of queries stands among the rope parameters."""
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
