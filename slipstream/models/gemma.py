"""Gemma 2 and Gemma 3."""

from dataclasses import replace

from slipstream.layers.rope import RopeConfig
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.gemma_keys import (
    DEFAULTS,
    FULL,
    SLIDING,
    read_gemma,
    read_scale,
    read_slides,
    read_typed_ropes,
    scaled,
    zero_centred,
)
from slipstream.models.rope_keys import read_rope


def gemma2(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """Gemma 2: sliding windows in every other layer, and softcapped attention scores.

    Without `layer_types`, layers 0, 2, 4 and so on have the window.
    """
    reader.expect("model_type", "gemma2")
    reader.expect("use_bidirectional_attention", False)
    defaults = replace(DEFAULTS, max_position_embeddings=8192)
    common = zero_centred(read_gemma(reader, architecture, defaults))
    softcap = reader.take_optional("attn_logit_softcapping", float, 50.0)
    attention = replace(common.attention, scale=read_scale(reader), softcap=softcap)
    window = reader.take("sliding_window", int, 4096)
    reader.expect("sliding_window_size", window)  # the 9B and 27B models have both keys
    slides = read_slides(reader, common.num_layers, 2)
    windows = [window if sliding else None for sliding in slides]
    return scaled(reader, common.decoder(attention, windows), 30.0)


def gemma3(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """The language model of Gemma 3: one full attention layer after every five with a window.

    The two types of layers have different RoPE. The vision tower is in `models/vision`.
    """
    reader.expect("model_type", "gemma3_text")
    reader.expect("use_bidirectional_attention", False)
    reader.expect("attn_logit_softcapping", None)
    defaults = replace(DEFAULTS, vocab_size=262208)
    positions = reader.take("max_position_embeddings", int, defaults.max_position_embeddings)
    ropes = _read_ropes(reader, positions)
    common = read_gemma(reader, architecture, defaults, ropes[FULL])
    if reader.take(
        "zero_centred_norms", bool, True
    ):  # False for GGUF files, whose weights include 1
        common = zero_centred(common)
    attention = replace(common.attention, scale=read_scale(reader), qk_norm=True)
    window = reader.take("sliding_window", int, 4096)
    slides = read_slides(reader, common.num_layers, 6)
    decoder = common.decoder(
        attention,
        [window if sliding else None for sliding in slides],
        ropes=[ropes[SLIDING if sliding else FULL] for sliding in slides],
    )
    return scaled(reader, decoder, None)


def _read_ropes(reader: ConfigReader, positions: int) -> dict[str, RopeConfig]:
    """RoPE by layer type; in older configs `rope_scaling` is only for full attention layers."""
    local = RopeConfig(reader.take("rope_local_base_freq", float, 10_000.0))
    if reader.take("rope_parameters", dict, {}):
        full = RopeConfig(reader.take("rope_theta", float, 1e6))
        reader.take("rope_scaling", dict, {})  # transformers 5 writes it besides the others
        return read_typed_ropes(reader, positions, {FULL: full, SLIDING: local})
    return {FULL: read_rope(reader, positions, 1e6), SLIDING: local}
