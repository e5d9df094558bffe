"""gpt-oss: experts with clamped SwiGLU, sliding windows in every other layer, attention sinks."""

import math
from collections.abc import Sequence
from dataclasses import replace

from slipstream.kernels.experts import ClampedGate, Routing, Scores
from slipstream.layers.experts import ExpertNames, ExpertsSpec
from slipstream.layers.rope import RopeConfig
from slipstream.models.config_keys import (
    CommonKeys,
    Defaults,
    read_biases,
    read_common,
    read_layer_types,
)
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig

# Unquantised checkpoints interleave gate and up of an expert as columns, MXFP4 ones as rows.
_NAMES = ExpertNames(router="mlp.router", alternating=True, transposed=True)

_PUBLISHED_ROPE = RopeConfig(
    theta=150_000.0,
    kind="yarn",
    factor=32.0,
    original_max_position_embeddings=4096,
    truncate=False,
    attention_factor=0.1 * math.log(32.0) + 1.0,
)


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """`intermediate_size` is the size of one expert; `hidden_act` must be silu."""
    reader.expect("model_type", "gpt_oss")
    # OpenAI's own names for values that other keys have as well.
    reader.take("initial_context_length", int, 0)
    defaults = Defaults(
        max_position_embeddings=131072,
        num_kv_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=150_000.0,
    )
    common = read_common(reader, architecture, defaults)
    experts = ExpertsSpec(
        routing=Routing(
            num_experts=reader.take_named(("num_local_experts", "num_experts"), int),
            num_chosen=reader.take_named(("num_experts_per_tok", "experts_per_token"), int),
            scores=Scores.CHOSEN_SOFTMAX,
        ),
        intermediate_size=common.feed_forward.intermediate_size,
        router_bias=True,
        expert_bias=True,
        clamp=ClampedGate(
            limit=reader.take("swiglu_limit", float, 7.0),
            alpha=reader.take("swiglu_alpha", float, 1.702),
        ),
        names=_NAMES,
    )
    common = read_biases(reader, common, default=True)
    rope = _rope(reader, common.attention.rope)
    attention = replace(common.attention, rope=rope, sinks=True)
    return common.decoder(attention, _windows(reader, common), experts)


def _rope(reader: ConfigReader, read: RopeConfig) -> RopeConfig:
    """RoPE as configured, or gpt-oss's published YaRN if the config only has theta."""
    if any(reader.take(key, dict, {}) for key in ("rope_scaling", "rope_parameters")):
        return read
    return replace(_PUBLISHED_ROPE, theta=read.theta)


def _windows(reader: ConfigReader, common: CommonKeys) -> Sequence[int | None]:
    """Sliding windows; without `layer_types`, layers 0, 2, 4 and so on have one."""
    window = reader.take_optional("sliding_window", int, 128)
    slides = read_layer_types(reader, common.num_layers)
    if slides is None:
        slides = [layer % 2 == 0 for layer in range(common.num_layers)]
    if window is None and any(slides):
        raise reader.error("sliding_window", "is null, but layers slide; give its size")
    return [window if sliding else None for sliding in slides]
