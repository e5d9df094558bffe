"""OLMo 2 and 3: norms only behind attention and MLP; query and key norms span all heads."""

from dataclasses import replace

from slipstream.models.config_keys import Defaults, norms_behind, read_common, read_layer_types
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.rope_keys import read_ropes_by_type


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """OLMo 3 has a sliding window in three of four layers, with separate RoPE parameters."""
    is_third = architecture == "Olmo3ForCausalLM"
    reader.expect("model_type", "olmo3" if is_third else "olmo2")
    reader.expect("mlp_bias", False)
    ropes = read_ropes_by_type(reader, _POSITIONS, 5e5) if is_third else None
    defaults = Defaults(max_position_embeddings=_POSITIONS, rms_norm_eps=1e-5)
    common = norms_behind(
        read_common(reader, architecture, defaults, ropes.full if ropes else None)
    )
    bias = reader.take("attention_bias", bool, False)
    attention = replace(common.attention, qkv_bias=bias, output_bias=bias, joint_norms=True)
    if ropes is None:
        return common.decoder(attention)
    count = common.num_layers
    slides = read_layer_types(reader, count) or [(layer + 1) % 4 != 0 for layer in range(count)]
    window = reader.take("sliding_window", int, 4096)
    return common.decoder(
        attention,
        [window if sliding else None for sliding in slides],
        ropes=[ropes.sliding if sliding else ropes.full for sliding in slides],
    )


_POSITIONS = 2048
