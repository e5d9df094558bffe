"""Llama and its dense relatives, each of which differs from it in a few points."""

from dataclasses import replace

from slipstream.kernels.norm import Activation
from slipstream.layers.mlp import MLPSpec
from slipstream.layers.norm import LayerNorms
from slipstream.layers.parameters import require_positive
from slipstream.layers.rope import NO_ROPE
from slipstream.models.config_keys import (
    Defaults,
    read_biases,
    read_common,
    read_layer_types,
    read_single_window,
    read_switched_windows,
    with_post_norms,
)
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.rope_keys import read_ropes_by_type

_OLMO_POSITIONS = 2048


def llama(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """Llama: one key turns on the biases of all attention projections, another those of the MLP."""
    reader.expect("model_type", "llama")
    reader.expect("sliding_window", None)
    reader.expect("is_llama_config", True)  # SmolLM2
    reader.expect("rope_interleaved", False)
    reader.expect("activation", "swiglu")  # Falcon 3, besides hidden_act
    common = read_common(reader, architecture, Defaults(max_position_embeddings=2048))
    if any(read_layer_types(reader, common.num_layers) or ()):
        raise reader.error("layer_types", f"has sliding_attention, which {architecture} has not")
    common = read_biases(reader, common, of_mlp=True)
    paired = reader.take("rope_interleave", bool, False)
    return common.decoder(replace(common.attention, paired=paired))


def phi3(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """Phi-3 and Phi-4, whose checkpoints have fused qkv_proj and gate_up_proj tensors.

    RoPE may be partial; longrope's original context length is a key outside its parameters.
    """
    reader.expect("model_type", "phi3")
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        reader.expect(key, False)
    for key in ("full_attn_mod", "interpolate_factor"):
        reader.expect(key, 1)
    defaults = Defaults(max_position_embeddings=4096, rms_norm_eps=1e-5, rotated=1.0)
    common = read_common(reader, architecture, defaults)
    return common.decoder(common.attention, read_single_window(reader, common.num_layers, None))


def seed_oss(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """Seed-OSS: separate keys turn biases on for qkv, the output projection and the MLP."""
    reader.expect("model_type", "seed_oss")
    defaults = Defaults(max_position_embeddings=524288, num_kv_heads=8, head_dim=128)
    common = read_common(reader, architecture, defaults)
    attention = replace(
        common.attention,
        qkv_bias=reader.take("attention_bias", bool, True),
        output_bias=reader.take("attention_out_bias", bool, False),
    )
    feed_forward = replace(common.feed_forward, bias=reader.take("mlp_bias", bool, False))
    return common.decoder(attention, feed_forwards=feed_forward)


def smollm3(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """SmolLM3: every fourth layer has no RoPE (NoPE).

    `no_rope_layers` has a 1 for each layer that does use RoPE, despite its name.
    """
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
    common = read_biases(reader, common, of_mlp=True)
    return common.decoder(
        common.attention,
        read_switched_windows(reader, count),
        ropes=[common.attention.rope if turn else NO_ROPE for turn in turns[:count]],
    )


def granite(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """Granite (dense), which scales embeddings, residual additions, attention scores and logits.

    The network's residual stream is the original one divided by the residual multiplier m, so
    that layers need no multiplication; norms are unchanged if their eps is divided by m^2.
    """
    reader.expect("model_type", "granite")
    common = read_common(reader, architecture, Defaults(max_position_embeddings=2048))
    names = ("embedding", "residual", "attention")
    of_embeddings, of_addends, of_scores = (
        reader.take(f"{name}_multiplier", float, 1.0) for name in names
    )
    divisor = reader.take("logits_scaling", float, 1.0)
    require_positive(residual_multiplier=of_addends, logits_scaling=divisor)
    common = replace(common, norms=replace(common.norms, eps=common.norms.eps / of_addends**2))
    common = read_biases(reader, common, of_mlp=True)
    return replace(
        common.decoder(replace(common.attention, scale=of_scores)),
        embedding_scale=of_embeddings / of_addends,
        embedding_scale_rounded=False,
        stream_scale=of_addends,
        logit_scale=1.0 / divisor,
    )


def starcoder2(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """Starcoder 2: layer norms with biases, and a feed-forward part without a gate.

    One config key turns on the biases of all projections.
    """
    reader.expect("model_type", "starcoder2")
    reader.expect("mlp_type", "default")
    reader.expect("norm_type", "layer_norm")
    reader.take("activation_function", str, "")  # an older key, which has no effect
    for key in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        reader.take(key, bool, True)  # from the first StarCoder; the softmax is always in float32
    reader.expect("scale_attn_weights", True)
    defaults = Defaults(
        max_position_embeddings=4096,
        num_kv_heads=2,
        tie_word_embeddings=True,
        hidden_act="gelu_pytorch_tanh",
    )
    common = read_common(reader, architecture, defaults)
    norms = LayerNorms(reader.take("norm_epsilon", float, 1e-5), layer_norms=True)
    reader.expect("layer_norm_epsilon", norms.eps)
    bias = reader.take("use_bias", bool, True)
    inner = common.feed_forward.intermediate_size
    gelu = Activation.GELU_TANH
    feed_forward = MLPSpec(inner, bias, activation=gelu, gated=False, up="c_fc", down="c_proj")
    return replace(common, norms=norms).decoder(
        replace(common.attention, qkv_bias=bias, output_bias=bias),
        read_single_window(reader, common.num_layers, None),
        feed_forward,
    )


def olmo2(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """OLMo 2 and 3: norms only after attention and MLP; query and key norms span all heads.

    OLMo 3 has a sliding window in three of four layers, with separate RoPE parameters.
    """
    is_third = architecture == "Olmo3ForCausalLM"
    reader.expect("model_type", "olmo3" if is_third else "olmo2")
    ropes = read_ropes_by_type(reader, _OLMO_POSITIONS, 5e5) if is_third else None
    defaults = Defaults(max_position_embeddings=_OLMO_POSITIONS, rms_norm_eps=1e-5)
    common = with_post_norms(
        read_common(reader, architecture, defaults, ropes.full if ropes else None)
    )
    attention = replace(read_biases(reader, common).attention, joint_norms=True)
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


def exaone4(reader: ConfigReader, architecture: str) -> DecoderConfig:
    """EXAONE 4: norms only after attention and MLP. In models with sliding windows, full attention
    layers have no RoPE.

    `sliding_window_pattern` is a number, or letters, which then need `layer_types`.
    """
    reader.expect("model_type", "exaone4")
    reader.expect("attention_bias", False)
    reader.expect("mlp_bias", False)
    defaults = Defaults(max_position_embeddings=2048, num_kv_heads=32, rms_norm_eps=1e-5)
    common = with_post_norms(read_common(reader, architecture, defaults))
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
