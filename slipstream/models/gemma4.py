"""Gemma 4: two head sizes, values shared with keys, layers that read another layer's KV cache, and
in some models experts in parallel with a dense MLP (26B-A4B) or per-layer inputs (E2B, E4B).

The unified models (12B), which have no vision tower, have neither, and other defaults.
"""

from collections.abc import Sequence
from dataclasses import replace

from slipstream.kernels.experts import Routing, Scores
from slipstream.kernels.norm import Activation
from slipstream.layers.experts import ExpertNames, ExpertsSpec
from slipstream.layers.layer import FeedForwardSpec
from slipstream.layers.layer_inputs import LayerInputsSpec, LayerInputSublayerSpec
from slipstream.layers.mlp import MLPSpec
from slipstream.layers.parallel_experts import ParallelExpertsSpec
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.gemma_keys import (
    DEFAULTS,
    PATTERN,
    SLIDING,
    read_attention,
    read_gemma,
    read_ropes,
    read_slides,
    scaled,
)

_EXPERT_NAMES = ExpertNames(router="router.proj", experts="experts")


def decoder_config(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """The language model. The vision tower is in `models/vision`; audio is not supported."""
    unified = architecture.startswith("Gemma4Unified")
    reader.expect("model_type", "gemma4_unified_text" if unified else "gemma4_text")
    if reader.take("use_bidirectional_attention", str, "vision") != "vision":  # within images only
        raise reader.error(
            "use_bidirectional_attention", "is all; only causal models are supported"
        )
    defaults = replace(DEFAULTS, vocab_size=262144)
    if unified:
        defaults = replace(defaults, max_position_embeddings=262144)
    positions = reader.take("max_position_embeddings", int, defaults.max_position_embeddings)
    rope = read_ropes(reader, positions)[SLIDING]
    common = read_gemma(reader, architecture, defaults, rope)
    common = replace(common, norms=replace(common.norms, scalar="layer_scalar"))
    slides = read_slides(reader, common.num_layers, PATTERN)
    if reader.take_any("layer_types") is None:
        slides[-1] = False
    if slides[-1]:
        raise reader.error("layer_types", "must end with full_attention")
    window = 1024 if unified else 512
    mixers = read_attention(reader, common.attention, positions, slides, window)
    sources = _read_kv_sources(reader, slides)
    mixers = [replace(mixer, kv_source=it) for mixer, it in zip(mixers, sources, strict=True)]
    dense = common.feed_forward
    wide = dense
    if reader.take("use_double_wide_mlp", bool, False):
        wide = replace(dense, intermediate_size=2 * dense.intermediate_size)
    experts = _read_experts(reader)
    feed_forwards = [
        _feed_forward(experts, dense if source is None else wide) for source in sources
    ]
    decoder = scaled(reader, common.with_mixers(mixers, feed_forwards), None)
    decoder = replace(decoder, windowed_sight=not unified)
    return _with_inputs(reader, decoder, 0 if unified else 256)


def _read_experts(reader: ConfigReader) -> ExpertsSpec | None:
    keys = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not reader.take("enable_moe_block", bool, False):
        for key in keys:  # say nothing
            reader.take_any(key)
        return None
    count, chosen, inner = (reader.take(key, int) for key in keys)
    return ExpertsSpec(
        routing=Routing(count, chosen, Scores.CHOSEN_SOFTMAX),
        intermediate_size=inner,
        activation=Activation.GELU_TANH,
        scaled_router=True,
        gained=True,
        names=_EXPERT_NAMES,
    )


def _feed_forward(experts: ExpertsSpec | None, dense: MLPSpec) -> FeedForwardSpec:
    if experts is None:
        return dense
    return ParallelExpertsSpec(
        dense=dense,
        experts=experts,
        experts_norm="pre_feedforward_layernorm_2",
        post_dense="post_feedforward_layernorm_1",
        post_experts="post_feedforward_layernorm_2",
    )


def _with_inputs(reader: ConfigReader, decoder: DecoderConfig, size: int) -> DecoderConfig:
    """Add the per-layer inputs, by default of this size; the feed-forward's post-norm becomes a
    part of their spec, since the layer now ends with the per-layer input's own post-norm."""
    size = reader.take("hidden_size_per_layer_input", int, size)
    vocab_size = reader.take("vocab_size_per_layer_input", int, 262144)
    if not size:
        return decoder
    if size < 0 or vocab_size != decoder.vocab_size:
        raise reader.error(
            "vocab_size_per_layer_input",
            f"({vocab_size}) must be vocab_size ({decoder.vocab_size}), and "
            f"hidden_size_per_layer_input ({size}) at least 0",
        )
    layers = []
    for index, layer in enumerate(decoder.layers):
        assert layer.feed_forward is not None, "all layers have a feed-forward part"
        post_norm = layer.norms.post_feed_forward
        sublayer = LayerInputSublayerSpec(layer.feed_forward, index, size, post_norm)
        norms = replace(layer.norms, post_feed_forward="post_per_layer_input_norm")
        layers.append(replace(layer, feed_forward=sublayer, norms=norms))
    padding = reader.take("pad_token_id", int, 0)
    if not 0 <= padding < vocab_size:
        raise reader.error("pad_token_id", f"({padding}) must be below vocab_size ({vocab_size})")
    inputs = LayerInputsSpec(size, len(layers), of_images=padding)
    return replace(decoder, layers=tuple(layers), layer_inputs=inputs)


def _read_kv_sources(reader: ConfigReader, slides: Sequence[bool]) -> list[int | None]:
    """For each layer, the layer whose keys and values it reads: for the last
    `num_kv_shared_layers` the last layer of their type with its own; None: its own."""
    key, count = "num_kv_shared_layers", len(slides)
    shared = reader.take(key, int, 0)
    own = slides[: count - shared]
    if not 0 <= shared < count or set(own) != set(slides):
        raise reader.error(
            key, f"is {shared} of {count} layers, but each type needs a layer with keys of its own"
        )
    last = {sliding: index for index, sliding in enumerate(own)}
    return [None] * len(own) + [last[sliding] for sliding in slides[len(own) :]]
