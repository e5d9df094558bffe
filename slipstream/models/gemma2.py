"""Gemma 2: windows in every other layer, and capped scores."""

from dataclasses import replace

from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.gemma_keys import (
    DEFAULTS,
    read_gemma,
    read_scale,
    read_slides,
    scaled,
    zero_centred,
)


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """The first layer slides, the next one does not, and so on where the config does not say."""
    reader.expect("model_type", "gemma2")
    reader.expect("use_bidirectional_attention", False)
    defaults = replace(DEFAULTS, max_position_embeddings=8192)
    common = zero_centred(read_gemma(reader, architecture, defaults))
    softcap = reader.take_optional("attn_logit_softcapping", float, 50.0)
    attention = replace(common.attention, scale=read_scale(reader), softcap=softcap)
    window = reader.take("sliding_window", int, 4096)
    slides = read_slides(reader, common.num_layers, 2)
    windows = [window if sliding else None for sliding in slides]
    return scaled(reader, common.decoder(attention, windows), 30.0)
