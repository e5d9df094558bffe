"""GLM-4, dense and with experts, and GLM-4.7-Flash."""

from dataclasses import replace

from slipstream.models.config_keys import Defaults, read_common
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.expert_keys import latent_decoder, read_corrected_experts

_MODEL_TYPES = {"Glm4ForCausalLM": "glm4", "GlmForCausalLM": "glm"}


def glm(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """GLM-4 (dense), with partial, interleaved RoPE and a fused gate_up_proj.

    Newer models (Glm4ForCausalLM) have norms both before and after attention and MLP.
    `attention_bias` is for query, key and value; the output projection has no bias.
    """
    reader.expect("model_type", _MODEL_TYPES[architecture])
    reader.expect("mlp_bias", False)
    defaults = Defaults(
        max_position_embeddings=131072,
        num_kv_heads=2,
        head_dim=128,
        rms_norm_eps=1.5625e-7,
        rotated=0.5,
    )
    common = read_common(reader, architecture, defaults)
    norms = common.norms
    if architecture == "Glm4ForCausalLM":
        norms = replace(
            norms, post_mixer="post_self_attn_layernorm", post_feed_forward="post_mlp_layernorm"
        )
    bias = reader.take("attention_bias", bool, True)
    return replace(common, norms=norms).decoder(
        replace(common.attention, qkv_bias=bias, paired=True)
    )


def glm4_moe(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """GLM-4.5 and relatives: experts with a score correction bias, and a shared expert.

    The first layers are dense; RoPE rotates half of a head; the output projection has no bias.
    """
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


def glm4_moe_lite(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """GLM-4.7-Flash: latent attention (MLA), and experts with a score correction bias.

    The first layer is dense.
    """
    reader.expect("model_type", "glm4_moe_lite")
    defaults = Defaults(max_position_embeddings=202752, head_dim=64, rms_norm_eps=1e-5, rotated=1.0)
    common = read_common(reader, architecture, defaults)
    experts = read_corrected_experts(reader, scale=1.8)
    return latent_decoder(reader, common, experts, num_dense=1)
