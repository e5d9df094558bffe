"""The keys of config.json that the Llama family shares, in all their spellings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from slipstream.layers.attention import AttentionSpec
from slipstream.layers.layer import FeedForwardSpec, LayerSpec, MixerSpec
from slipstream.layers.mlp import MLPSpec
from slipstream.layers.norm import LayerNorms
from slipstream.layers.parameters import require_positive
from slipstream.layers.rope import RopeConfig
from slipstream.models.config_reader import REQUIRED, ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.rope_keys import read_rope

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SLIDING = {
    "full_attention": False,
    "attention": False,  # an old name
    "sliding_attention": True,
}


@dataclass(frozen=True)
class Defaults:
    """An architecture's defaults for missing keys, from its Hugging Face config class.

    Attributes:
        num_kv_heads, head_dim: None stands for num_heads and hidden_size / num_heads.
        rotated: fraction of a head that RoPE rotates; None: always the whole head.
        queries_grow: whether queries are scaled by their position.
        sections, in_order: see `read_rope`.
        intermediate_size, num_heads, vocab_size: None: the key is required.
        hidden_act: the only activation that the architecture has.
    """

    max_position_embeddings: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rotated: float | None = None
    tie_word_embeddings: bool = False
    queries_grow: bool = False
    sections: tuple[int, ...] = ()
    in_order: bool = False
    intermediate_size: int | None = None
    num_heads: int | None = None
    vocab_size: int | None = None
    hidden_act: str = "silu"


_MOST_LAYERS = 4096  # a sanity limit: specs of all layers are made before tensors are read
_MOST_POSITIONS = 1 << 24  # RoPE tables of more positions would take gigabytes


@dataclass(frozen=True, kw_only=True)
class CommonKeys:
    """The values of the keys that all architectures of the family share.

    Attributes:
        attention: the attention of all layers, without biases, head norms and window.
        feed_forward: the MLP of all layers, without biases.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    attention: AttentionSpec
    feed_forward: MLPSpec
    norms: LayerNorms
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: torch.dtype

    def decoder(
        self,
        attention: AttentionSpec,
        windows: Sequence[int | None] | None = None,
        feed_forwards: FeedForwardSpec | Sequence[FeedForwardSpec] | None = None,
        ropes: Sequence[RopeConfig] | None = None,
    ) -> DecoderConfig:
        """A decoder whose layers differ only in windows, feed-forward parts and RoPE.

        Args:
            windows: window of each layer; None: no layer has one.
            feed_forwards: feed-forward part of all layers, or of each; None: `feed_forward`.
            ropes: RoPE of each layer; None: all use the RoPE of `attention`.
        """
        windows = windows or [None] * self.num_layers
        ropes = ropes or [attention.rope] * self.num_layers
        pairs = zip(windows, ropes, strict=True)
        mixers = [replace(attention, window=window, rope=rope) for window, rope in pairs]
        return self.with_mixers(mixers, feed_forwards)

    def with_mixers(
        self,
        mixers: Sequence[MixerSpec],
        feed_forwards: FeedForwardSpec | Sequence[FeedForwardSpec] | None = None,
    ) -> DecoderConfig:
        """A decoder with these mixers; `feed_forwards` as in `decoder`."""
        feed_forwards = feed_forwards or self.feed_forward
        if not isinstance(feed_forwards, Sequence):
            feed_forwards = [feed_forwards] * self.num_layers
        layers = [
            LayerSpec(mixer, feed_forward, self.norms)
            for mixer, feed_forward in zip(mixers, feed_forwards, strict=True)
        ]
        return DecoderConfig(
            architecture=self.architecture,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            layers=tuple(layers),
            rms_norm_eps=self.norms.eps,
            max_position_embeddings=self.max_position_embeddings,
            tie_word_embeddings=self.tie_word_embeddings,
            dtype=self.dtype,
        )


def read_common(
    reader: ConfigReader, architecture: str, defaults: Defaults, rope: RopeConfig | None = None
) -> CommonKeys:
    """Read the keys that all architectures share, except those of a given `rope`; each architecture
    reads its own keys."""
    reader.expect("hidden_act", defaults.hidden_act)
    reader.expect("is_encoder_decoder", False)
    hidden_size = reader.take("hidden_size", int)
    num_heads = reader.take("num_attention_heads", int, defaults.num_heads or REQUIRED)
    num_layers = reader.take("num_hidden_layers", int)
    require_positive(num_hidden_layers=num_layers)
    if num_layers > _MOST_LAYERS:
        raise reader.error("num_hidden_layers", f"is {num_layers}, but at most {_MOST_LAYERS} work")
    kv_heads = reader.take_optional("num_key_value_heads", int, defaults.num_kv_heads)
    head_dim = reader.take_optional("head_dim", int, defaults.head_dim)
    positions = reader.take("max_position_embeddings", int, defaults.max_position_embeddings)
    if positions > _MOST_POSITIONS:
        problem = f"is {positions}, but at most {_MOST_POSITIONS} work; correct it (--hf-overrides)"
        raise reader.error("max_position_embeddings", problem)
    if rope is None:
        rope = read_rope(
            reader,
            positions,
            defaults.rope_theta,
            defaults.rotated,
            defaults.queries_grow,
            defaults.sections,
            defaults.in_order,
        )
    return CommonKeys(
        architecture=architecture,
        vocab_size=reader.take("vocab_size", int, defaults.vocab_size or REQUIRED),
        hidden_size=hidden_size,
        num_layers=num_layers,
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads if kv_heads is None else kv_heads,
            head_dim=_even_share(reader, hidden_size, num_heads) if head_dim is None else head_dim,
            rope=rope,
        ),
        feed_forward=MLPSpec(
            reader.take("intermediate_size", int, defaults.intermediate_size or REQUIRED)
        ),
        norms=LayerNorms(reader.take("rms_norm_eps", float, defaults.rms_norm_eps)),
        max_position_embeddings=positions,
        tie_word_embeddings=reader.take("tie_word_embeddings", bool, defaults.tie_word_embeddings),
        dtype=_read_dtype(reader),
    )


def with_post_norms(common: CommonKeys) -> CommonKeys:
    """The values with norms after attention and MLP instead of before them."""
    norms = LayerNorms(
        common.norms.eps,
        mixer=None,
        feed_forward=None,
        post_mixer="post_attention_layernorm",
        post_feed_forward="post_feedforward_layernorm",
    )
    return replace(common, norms=norms)


def read_biases(
    reader: ConfigReader, common: CommonKeys, default: bool = False, of_mlp: bool = False
) -> CommonKeys:
    """Read the key that turns on the biases of all attention projections; with `of_mlp` also the
    MLP's, which otherwise must be off."""
    bias, mlp_bias = reader.take("attention_bias", bool, default), False
    if of_mlp:
        mlp_bias = reader.take("mlp_bias", bool, False)
    else:
        reader.expect("mlp_bias", False)
    attention = replace(common.attention, qkv_bias=bias, output_bias=bias)
    feed_forward = replace(common.feed_forward, bias=mlp_bias)
    return replace(common, attention=attention, feed_forward=feed_forward)


def read_layer_types(
    reader: ConfigReader, num_layers: int, types: Mapping[str, bool] = _SLIDING
) -> list[bool] | None:
    """Read `layer_types`; None if it is missing.

    Args:
        types: the result for each supported type; by default whether it has a sliding window.
    """
    names = reader.take_optional("layer_types", list)
    if names is None:
        return None
    for name in names:
        if not isinstance(name, str) or name not in types:
            raise reader.error(
                "layer_types", f"holds {name!r}, but only {', '.join(types)} are supported"
            )
    if len(names) != num_layers:
        raise reader.error(
            "layer_types", f"has {len(names)} layers, but num_hidden_layers is {num_layers}"
        )
    return [types[name] for name in names]


def read_single_window(
    reader: ConfigReader, num_layers: int, default: int | None, switched_on: bool = True
) -> list[int | None]:
    """Read one sliding window for all layers; entries are None if there is none.

    Args:
        default: value of a missing `sliding_window`; null means no window.
        switched_on: False: no layer has a window, whatever the size.
    """
    window = reader.take_optional("sliding_window", int, default)
    if not switched_on:
        window = None
    slides = read_layer_types(reader, num_layers)
    if slides is not None and any(sliding != (window is not None) for sliding in slides):
        raise reader.error(
            "layer_types", 'disagrees with "sliding_window", which counts for all layers'
        )
    return [window] * num_layers


def read_switched_windows(
    reader: ConfigReader,
    num_layers: int,
    slides_by_default: Callable[[int, int], bool] = lambda layer, first: layer >= first,
) -> tuple[int | None, ...]:
    """Read Qwen's windows: a switch, a size, and the types of layers.

    Args:
        slides_by_default: (layer, `max_window_layers`) -> whether the layer has a window, for
            configs without `layer_types`.
    """
    switched_on = reader.take("use_sliding_window", bool, False)
    window = reader.take_optional("sliding_window", int, 4096)
    limit = reader.take("max_window_layers", int, 28)
    slides = read_layer_types(reader, num_layers)
    if not switched_on:
        window = None
    if slides is None:
        slides = [
            window is not None and slides_by_default(layer, limit) for layer in range(num_layers)
        ]
    if window is None and any(slides):
        raise reader.error(
            "layer_types",
            'has sliding_attention, but "use_sliding_window" is false or "sliding_window" is null; '
            "make them agree",
        )
    return tuple(window if sliding else None for sliding in slides)


def _even_share(reader: ConfigReader, hidden_size: int, num_heads: int) -> int:
    if num_heads <= 0 or hidden_size % num_heads:
        raise reader.error(
            "hidden_size",
            f"({hidden_size}) must be a multiple of num_attention_heads ({num_heads}) when there "
            f"is no head_dim",
        )
    return hidden_size // num_heads


def _read_dtype(reader: ConfigReader) -> torch.dtype:
    """Read `dtype`, or `torch_dtype` as it was called before transformers 5; default float32."""
    old, new = (reader.take(key, str, "") for key in ("torch_dtype", "dtype"))
    name = (new or old or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise reader.error(
            "dtype" if new else "torch_dtype",
            f"is {name!r}, but must be one of {', '.join(DTYPES)}; convert the checkpoint",
        )
    return DTYPES[name]
