"""GLM-4.5 and its kin: experts chosen by corrected scores, and a part that takes every token."""

from dataclasses import replace

from slipstream.kernels.experts import Routing, Scores
from slipstream.layers.experts import ExpertsSpec
from slipstream.models.config_keys import Defaults, read_common
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """The output projection never has a bias; the first layers are dense; half of a head turns."""
    reader.expect("model_type", "glm4_moe")
    reader.expect("mlp_bias", False)
    reader.expect("sliding_window", None)
    reader.expect("scoring_func", "sigmoid")
    reader.expect("topk_method", "noaux_tc")
    defaults = Defaults(
        max_position_embeddings=131072, num_kv_heads=8, rms_norm_eps=1e-5, rotated=0.5
    )
    common = read_common(reader, architecture, defaults)
    routing = Routing(
        num_experts=reader.take_named(("n_routed_experts", "num_local_experts"), int),
        num_chosen=reader.take("num_experts_per_tok", int),
        scores=Scores.SIGMOID,
        normalised=reader.take("norm_topk_prob", bool, True),
        scale=reader.take("routed_scaling_factor", float, 1.0),
        num_groups=reader.take("n_group", int, 1),
        kept_groups=reader.take("topk_group", int, 1),
    )
    inner = reader.take("moe_intermediate_size", int)
    shared = reader.take("n_shared_experts", int, 1)
    experts = ExpertsSpec(
        routing=routing,
        intermediate_size=inner,
        corrected=True,
        shared_size=shared * inner or None,
    )
    dense = reader.take("first_k_dense_replace", int, 1)
    attention = replace(
        common.attention,
        qkv_bias=reader.take("attention_bias", bool, False),
        qk_norm=reader.take("use_qk_norm", bool, False),
    )
    return common.decoder(
        attention,
        feed_forwards=[
            common.feed_forward if layer < dense else experts for layer in range(common.num_layers)
        ],
    )
