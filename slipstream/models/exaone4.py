"""EXAONE 4: norms only behind attention and MLP. In models with sliding windows, full attention
layers have no RoPE.
"""

from dataclasses import replace

from slipstream.layers.rope import NO_ROPE
from slipstream.models.config_keys import Defaults, norms_behind, read_common, read_layer_types
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """`sliding_window_pattern` is a number, or letters, which then need `layer_types`."""
    reader.expect("model_type", "exaone4")
    reader.expect("attention_bias", False)
    reader.expect("mlp_bias", False)
    defaults = Defaults(max_position_embeddings=2048, num_kv_heads=32, rms_norm_eps=1e-5)
    common = norms_behind(read_common(reader, architecture, defaults))
    count, rope = common.num_layers, common.attention.rope
    window = reader.take_optional("sliding_window", int, 4096)
    slides, pattern = read_layer_types(reader, count), reader.take_any("sliding_window_pattern")
    if slides is None and window is not None:
        every = 4 if pattern is None else pattern
        if type(every) is not int or every < 1:
            raise reader.error("layer_types", "is missing; add it, or a number as the pattern")
        slides = [(layer + 1) % every != 0 for layer in range(count)]
    if window is None and any(slides or ()):
        raise reader.error("sliding_window", 'is null, but "layer_types" has sliding_attention')
    if slides is None:
        slides = [False] * count
    return common.decoder(
        replace(common.attention, qk_norm=True),
        [window if sliding else None for sliding in slides],
        ropes=[rope if sliding or window is None else NO_ROPE for sliding in slides],
    )
