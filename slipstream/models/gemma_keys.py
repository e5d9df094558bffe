"""The keys that all Gemma models share, and those of Gemma 4's layers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slipstream.kernels.norm import Activation
from slipstream.layers.attention import AttentionSpec
from slipstream.layers.norm import LayerNorms
from slipstream.layers.parameters import require_positive
from slipstream.layers.rope import RopeConfig
from slipstream.models.config_keys import CommonKeys, Defaults, read_common, read_layer_types
from slipstream.models.config_reader import ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.rope_keys import read_rope_parameters

FULL, SLIDING = "full_attention", "sliding_attention"
_TANH = "gelu_pytorch_tanh"


# Defaults of missing keys, unless a family has its own.
DEFAULTS = Defaults(
    max_position_embeddings=131072,
    num_heads=8,
    num_kv_heads=4,
    head_dim=256,
    tie_word_embeddings=True,
    hidden_act=_TANH,
)


def read_gemma(
    reader: ConfigReader, architecture: str, defaults: Defaults, rope: RopeConfig | None = None
) -> CommonKeys:
    """Read the common keys; there are norms before and after attention and MLP, and GELU gates."""
    reader.expect("hidden_activation", _TANH)
    reader.expect("attention_bias", False)
    common = read_common(reader, architecture, defaults, rope)
    feed_forward = replace(common.feed_forward, activation=Activation.GELU_TANH)
    return replace(common, norms=sandwich_norms(common.norms.eps), feed_forward=feed_forward)


def sandwich_norms(eps: float) -> LayerNorms:
    """Norms before and after attention and MLP."""
    return LayerNorms(
        eps,
        feed_forward="pre_feedforward_layernorm",
        post_mixer="post_attention_layernorm",
        post_feed_forward="post_feedforward_layernorm",
    )


def zero_centred(common: CommonKeys) -> CommonKeys:
    """Use norms with a weight of 1 + w, as in all models before Gemma 4."""
    return replace(common, norms=replace(common.norms, zero_centred=True))


def scaled(reader: ConfigReader, decoder: DecoderConfig, softcap: float | None) -> DecoderConfig:
    """Scale embeddings by the square root of their width, and cap logits, without the key at
    `softcap`."""
    softcap = reader.take_optional("final_logit_softcapping", float, softcap)
    return replace(decoder, embedding_scale=decoder.hidden_size**0.5, logit_softcap=softcap)


def read_slides(reader: ConfigReader, num_layers: int, pattern: int) -> list[bool]:
    """Whether each layer has a window; by default all except every `pattern`-th."""
    given = [reader.take(key, int, pattern) for key in _PATTERN_KEYS]
    pattern = next((each for each in given if each != pattern), pattern)
    require_positive(sliding_window_pattern=pattern)
    slides = read_layer_types(reader, num_layers)
    return slides or [(layer + 1) % pattern > 0 for layer in range(num_layers)]


_PATTERN_KEYS = ("sliding_window_pattern", "_sliding_window_pattern")


def read_scale(reader: ConfigReader) -> float:
    scalar = reader.take("query_pre_attn_scalar", float, 256.0)
    require_positive(query_pre_attn_scalar=scalar)
    return float(scalar**-0.5)


def read_typed_ropes(
    reader: ConfigReader, max_positions: int, usual: dict[str, RopeConfig]
) -> dict[str, RopeConfig]:
    """Read the RoPE of each type of layer, by the type's name.

    Args:
        usual: RoPE of types without an object of their own; its theta is the default of the others.
    """
    values = reader.take("rope_parameters", dict, {})
    unknown = sorted(set(values) - set(usual))
    if unknown:
        raise reader.error(
            "rope_parameters", f"must have one object for each type of layer, not {unknown[0]!r}"
        )
    whole = reader.nested("rope_parameters")
    return {
        name: read_rope_parameters(whole.nested(name), max_positions, rope.theta)
        if values.get(name)
        else rope
        for name, rope in usual.items()
    }


PATTERN = 6  # every sixth layer has full attention, unless the layers are listed
_ROPES = {FULL: RopeConfig(1e6, "proportional", rotated=0.25), SLIDING: RopeConfig(10_000.0)}
_LISTED = "per_layer_config"


def read_ropes(reader: ConfigReader, max_positions: int) -> dict[str, RopeConfig]:
    return read_typed_ropes(reader, max_positions, _ROPES)


def read_attention(
    reader: ConfigReader,
    attention: AttentionSpec,
    max_positions: int,
    slides: Sequence[bool],
    window: int = 512,
) -> list[AttentionSpec]:
    """Read the attention of each layer; layers without a window may have heads of another size.

    Args:
        attention: spec with the heads of layers with a window; the rest is read here.
        window: value of a missing `sliding_window`.
    """
    ropes = read_ropes(reader, max_positions)
    window = reader.take("sliding_window", int, window)
    if window < 1:
        raise reader.error("sliding_window", f"must be positive, not {window}")
    keys_as_values = reader.take("attention_k_eq_v", bool, False)
    full = {
        "head_dim": reader.take("global_head_dim", int, 512),
        "num_kv_heads": reader.take("num_global_key_value_heads", int, attention.num_kv_heads),
    }
    if not keys_as_values:
        full["num_kv_heads"] = attention.num_kv_heads
    listed = reader.take_optional(_LISTED, dict)
    layers = []
    for index, sliding in enumerate(slides):
        sizes = {} if sliding else full
        if listed is not None:
            sizes = _read_listed(reader, listed.get(str(index), {}))
        layers.append(
            AttentionSpec(
                num_heads=attention.num_heads,
                num_kv_heads=sizes.get("num_kv_heads", attention.num_kv_heads),
                head_dim=sizes.get("head_dim", attention.head_dim),
                rope=ropes[SLIDING if sliding else FULL],
                window=window if sliding else None,
                qk_norm=True,
                scale=1.0,
                keys_as_values=keys_as_values and not sliding,
                value_norm=True,
            )
        )
    return layers


def _read_listed(reader: ConfigReader, own: Any) -> dict[str, int]:
    """Read the differences of a single layer, as newer exports store them."""
    names = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
    if not isinstance(own, dict) or any(
        key not in names or type(value) is not int or value < 1 for key, value in own.items()
    ):
        raise reader.error(_LISTED, f"must give {' or '.join(names)} a layer, not {own}")
    return {names[key]: value for key, value in own.items()}
