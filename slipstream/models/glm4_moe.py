"""GLM-4.5 and its kin: experts chosen by corrected scores, and a part that takes every token."""

from dataclasses import replace

from slipstream.models.config_keys import Defaults, read_common
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.expert_keys import read_corrected_experts


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """The output projection never has a bias; the first layers are dense; half of a head turns."""
    reader.expect("model_type", "glm4_moe")
    reader.expect("mlp_bias", False)
    reader.expect("sliding_window", None)
    defaults = Defaults(
        max_position_embeddings=131072, num_kv_heads=8, rms_norm_eps=1e-5, rotated=0.5
    )
    common = read_common(reader, architecture, defaults)
    experts = read_corrected_experts(reader)
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
