"""SmolLM3: every fourth layer has no RoPE (NoPE)."""

from dataclasses import replace

from slipstream.layers.parameters import require_positive
from slipstream.layers.rope import NO_ROPE
from slipstream.models.config_keys import Defaults, read_common, read_switched_windows
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """`no_rope_layers` has a 1 for each layer that does use RoPE, despite its name."""
    reader.expect("model_type", "smollm3")
    reader.expect("use_sliding_window", False)
    defaults = Defaults(
        max_position_embeddings=32768, num_kv_heads=4, rope_theta=2e6, tie_word_embeddings=True
    )
    common = read_common(reader, architecture, defaults)
    interval, count = reader.take("no_rope_layer_interval", int, 4), common.num_layers
    require_positive(no_rope_layer_interval=interval)
    turns = reader.take_optional("no_rope_layers", list)
    if turns is None:
        turns = [int((layer + 1) % interval > 0) for layer in range(count)]
    if len(turns) < count or any(turn not in (0, 1) for turn in turns):
        raise reader.error("no_rope_layers", f"must have 0 or 1 for each of the {count} layers")
    bias = reader.take("attention_bias", bool, False)
    feed_forward = replace(common.feed_forward, bias=reader.take("mlp_bias", bool, False))
    return common.decoder(
        replace(common.attention, qkv_bias=bias, output_bias=bias),
        read_switched_windows(reader, count),
        [feed_forward] * count,
        [common.attention.rope if turn else NO_ROPE for turn in turns[:count]],
    )
