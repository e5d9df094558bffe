"""Phi-3 and Phi-4, whose checkpoints have fused qkv_proj and gate_up_proj tensors."""

from slipstream.models.config_keys import Defaults, read_common, read_single_window
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """RoPE may be partial; longrope's original context length is a key outside its parameters."""
    reader.expect("model_type", "phi3")
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        reader.expect(key, False)
    for key in ("full_attn_mod", "interpolate_factor"):
        reader.expect(key, 1)
    defaults = Defaults(max_position_embeddings=4096, rms_norm_eps=1e-5, rotated=1.0)
    common = read_common(reader, architecture, defaults)
    return common.decoder(common.attention, read_single_window(reader, common.num_layers, None))
