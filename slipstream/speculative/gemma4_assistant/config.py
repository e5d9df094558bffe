"""What an assistant in the manner of Gemma 4's is made of, and whether it fits a target."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.core.errors import CheckpointError
from slipstream.layers.attention import AttentionSpec
from slipstream.layers.layer import LayerSpec
from slipstream.layers.mlp import GatedMLPSpec
from slipstream.layers.norm import LayerNorms
from slipstream.layers.parameters import InvalidSizesError
from slipstream.layers.rope import RopeConfig
from slipstream.models.config_reader import HARMLESS_KEYS, ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.quantized.catalogue import refuse_quantized
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.kinds import HeadConfig, vocabulary_problem, width_problem

_FULL, _SLIDING = "full_attention", "sliding_attention"
_PATTERN = 6  # every sixth layer has full attention, unless the layers are listed
# Of images and sounds, which the assistant does not see, and of the tokens that stand for them.
_HARMLESS = HARMLESS_KEYS | {
    "audio_token_id",
    "boa_token_id",
    "boi_token_id",
    "eoa_token_id",
    "eoi_token_id",
    "image_token_id",
    "video_token_id",
    "vocab_size_per_layer_input",
}
# What other members of the family have and no assistant has.
_ABSENT: tuple[tuple[str, Any], ...] = (
    ("attention_bias", False),
    ("enable_moe_block", False),
    ("hidden_activation", "gelu_pytorch_tanh"),
    ("hidden_size_per_layer_input", 0),
    ("use_double_wide_mlp", False),
)


@dataclass(frozen=True)
class Centroids:
    """An lm_head over the likeliest parts of the vocabulary.

    Attributes:
        count: parts of the vocabulary, as large as each other.
        chosen: parts whose tokens get logits.
    """

    count: int
    chosen: int


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(HeadConfig):
    """Everything that the network is built from.

    Attributes:
        layers: of the network. Each layer reads the keys and values of the target's last layer
            like it.
        target_width: of the target's hidden states.
        softcap: logits become softcap * tanh(logits / softcap).
        suppressed: token ids that are never drafted.
    """

    layers: DecoderConfig
    target_width: int
    softcap: float | None
    centroids: Centroids | None
    suppressed: tuple[int, ...]

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        mixers = (layer.mixer for layer in self.layers.layers)
        return tuple(mixer for mixer in mixers if isinstance(mixer, AttentionSpec))

    @property
    def features(self) -> str:
        return "the last hidden state, behind the final norm, and the cache of its last layers"

    @property
    def shared(self) -> str:
        return "an assistant reads the target's cache"

    def problems(self, target: DecoderConfig) -> list[str]:
        if problem := width_problem(self.target_width, target):
            return [problem]
        problem = vocabulary_problem(self.layers.vocab_size, target)
        problems = [problem] if problem else []
        for layer in dict.fromkeys(self.attention):
            problem = _layer_problem(layer, target)
            if problem is not None:
                kind = "sliding" if layer.window else "full"
                problems.append(f"its layers of {kind} attention {problem}")
        return problems


def read_assistant_config(checkpoint: HeadCheckpoint) -> AssistantConfig:
    """The layers' keys stand in `text_config`."""
    file = checkpoint.config_file
    reader = ConfigReader(checkpoint.config, file, harmless=_HARMLESS)
    values = reader.take("text_config", dict)
    text = ConfigReader(values, file, "text_config.", _HARMLESS)
    for config in (checkpoint.config, values):
        refuse_quantized(config, file)
    for each in (reader, text):
        each.expect("tie_word_embeddings", True)
    sizes = _read_layers(text, checkpoint)
    width = reader.take("backbone_hidden_size", int)
    centroids = _read_centroids(reader, sizes.vocab_size)
    softcap = text.take_optional("final_logit_softcapping", float)
    reader.finish()
    text.finish()
    return AssistantConfig(
        layers=sizes,
        target_width=width,
        softcap=softcap,
        centroids=centroids,
        suppressed=_read_suppressed(checkpoint, sizes.vocab_size),
    )


def _layer_problem(layer: AttentionSpec, target: DecoderConfig) -> str | None:
    """Why a layer cannot read the target's cache."""
    heads = layer.num_kv_heads, layer.head_dim
    if target_layer(layer, target) is None:
        return "read the keys of such a layer of the target, which has none"
    if heads != (target.num_kv_heads, target.head_dim):
        return (
            f"read {heads[0]} heads of {heads[1]} numbers, and the target's cache has "
            f"{target.num_kv_heads} of {target.head_dim}"
        )
    if layer.rope != target.rope:
        return (
            f"rotate their queries by {_shown(layer.rope)}, and the keys in the target's cache are "
            f"rotated by {_shown(target.rope)}"
        )
    return None


def target_layer(layer: AttentionSpec, target: DecoderConfig) -> int | None:
    """The layer of the target whose cache is read; None: there is none like it."""
    alike = [
        index
        for index, window in enumerate(target.sliding_windows)
        if (window is None) == (layer.window is None)
    ]
    return alike[-1] if alike else None


def _shown(rope: RopeConfig) -> str:
    return f"rope of theta {rope.theta:g} and kind {rope.kind}"


def _read_layers(text: ConfigReader, checkpoint: HeadCheckpoint) -> DecoderConfig:
    for key, value in _ABSENT:
        text.expect(key, value)
    for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        text.expect(key, None)
    if text.take("use_bidirectional_attention", str, "") == "all":
        raise text.error("use_bidirectional_attention", "is all; only causal targets are supported")
    count = text.take("num_hidden_layers", int)
    shared = text.take("num_kv_shared_layers", int, 0)
    if shared not in (0, count):
        raise text.error(
            "num_kv_shared_layers",
            f"is {shared} of {count} layers, but an assistant has no keys and values of its own",
        )
    try:
        attention = _read_attention(text, _read_kinds(text, count))
        dense = GatedMLPSpec(text.take("intermediate_size", int))
        norms = LayerNorms(text.take("rms_norm_eps", float, 1e-6))
        return DecoderConfig(
            architecture="Gemma4AssistantForCausalLM",
            vocab_size=text.take("vocab_size", int, 262144),
            hidden_size=text.take("hidden_size", int),
            layers=tuple(LayerSpec(mixer, dense, norms) for mixer in attention),
            rms_norm_eps=norms.eps,
            max_position_embeddings=text.take("max_position_embeddings", int, 131072),
            tie_word_embeddings=True,
            dtype=checkpoint.weights_dtype or torch.bfloat16,
        )
    except InvalidSizesError as error:
        raise CheckpointError(f"{text.file}: {error}") from error


def _read_kinds(text: ConfigReader, count: int) -> list[str]:
    usual = [_FULL if (index + 1) % _PATTERN == 0 else _SLIDING for index in range(count)]
    kinds = text.take("layer_types", list, [*usual[:-1], _FULL])
    if len(kinds) != count or not count or any(kind not in (_FULL, _SLIDING) for kind in kinds):
        raise text.error(
            "layer_types", f"must name {count} layers, each {_FULL} or {_SLIDING}, not {kinds}"
        )
    return kinds


def _read_attention(text: ConfigReader, kinds: Collection[str]) -> list[AttentionSpec]:
    """Layers of full attention may have heads of another size."""
    heads = text.take("num_attention_heads", int)
    head_dim = text.take("head_dim", int, 256)
    kv_heads = text.take("num_key_value_heads", int)
    wide_dim = text.take("global_head_dim", int, 512)
    equal = text.take("attention_k_eq_v", bool, False)
    wide_heads = text.take("num_global_key_value_heads", int, kv_heads)
    window = text.take("sliding_window", int, 512)
    listed = text.take_optional("per_layer_config", dict)
    ropes = _read_ropes(text)
    if window < 1:
        raise text.error("sliding_window", f"must be positive, not {window}")
    layers = []
    for index, kind in enumerate(kinds):
        own = {"head_dim": head_dim, "num_key_value_heads": kv_heads}
        if listed is not None:
            own |= _read_listed(text, listed, index)
        elif kind == _FULL:
            own = {"head_dim": wide_dim, "num_key_value_heads": wide_heads if equal else kv_heads}
        layers.append(
            AttentionSpec(
                num_heads=heads,
                num_kv_heads=own["num_key_value_heads"],
                head_dim=own["head_dim"],
                rope=ropes[kind],
                window=window if kind == _SLIDING else None,
            )
        )
    return layers


def _read_listed(text: ConfigReader, listed: dict[str, Any], index: int) -> dict[str, int]:
    own = listed.get(str(index), {})
    known = ("head_dim", "num_key_value_heads")
    if not isinstance(own, dict) or any(
        key not in known or type(value) is not int or value < 1 for key, value in own.items()
    ):
        raise text.error("per_layer_config", f"must give {' or '.join(known)} a layer, not {own}")
    return own


def _read_ropes(text: ConfigReader) -> dict[str, RopeConfig]:
    usual = {
        _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        _FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    }
    stated = text.take("rope_parameters", dict, usual)
    ropes = {}
    for kind, values in usual.items():
        own = stated.get(kind, values)
        reader = ConfigReader(own, text.file, f"text_config.rope_parameters.{kind}.", ())
        theta, name = reader.take("rope_theta", float), reader.take("rope_type", str, "default")
        if name not in ("default", "linear", "proportional"):
            raise reader.error(
                "rope_type", f"is {name!r}, but only default, linear and proportional are supported"
            )
        factor = reader.take("factor", float, 1.0)
        rotated = reader.take("partial_rotary_factor", float, 1.0)
        if name != "proportional" and rotated != 1.0:
            raise reader.error("partial_rotary_factor", f"goes with proportional rope, not {name}")
        reader.finish()
        ropes[kind] = RopeConfig(theta, name, factor, rotated=rotated)
    return ropes


def _read_centroids(reader: ConfigReader, vocab_size: int) -> Centroids | None:
    ordered = reader.take("use_ordered_embeddings", bool, False)
    count = reader.take("num_centroids", int, 2048)
    chosen = reader.take("centroid_intermediate_top_k", int, 32)
    if not ordered:
        return None
    if count < 1 or vocab_size % count or not 1 <= chosen <= count:
        raise reader.error(
            "num_centroids",
            f"is {count}, of which {chosen} are chosen; it must divide the vocabulary of "
            f"{vocab_size} tokens and be no less than centroid_intermediate_top_k",
        )
    return Centroids(count, chosen)


def _read_suppressed(checkpoint: HeadCheckpoint, vocab_size: int) -> tuple[int, ...]:
    tokens = checkpoint.generation_config.get("suppress_tokens") or []
    if not isinstance(tokens, list) or not all(
        type(token) is int and 0 <= token < vocab_size for token in tokens
    ):
        raise CheckpointError(
            f"{checkpoint.path / 'generation_config.json'}: suppress_tokens must be a list of "
            f"token ids below {vocab_size}, not {tokens!r}"
        )
    return tuple(dict.fromkeys(tokens))
