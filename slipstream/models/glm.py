"""GLM-4 (dense): a part of a head is rotated, in pairs of neighbours; gate and up in one tensor; in
newer ones norms stand before the halves and behind them."""

from dataclasses import replace

from slipstream.models.config_keys import Defaults, read_common
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig

_MODEL_TYPES = {"Glm4ForCausalLM": "glm4", "GlmForCausalLM": "glm"}


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """The switch of biases is for query, key and value: the output projection has none."""
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
            norms, mixer_after="post_self_attn_layernorm", feed_forward_after="post_mlp_layernorm"
        )
    bias = reader.take("attention_bias", bool, True)
    return replace(common, norms=norms).decoder(
        replace(common.attention, qkv_bias=bias, paired=True)
    )
