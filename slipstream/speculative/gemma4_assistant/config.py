"""The config of Gemma 4's assistants, and whether an assistant fits a target."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from slipstream.core.errors import CheckpointError
from slipstream.kernels.norm import Activation
from slipstream.layers.attention import AttentionSpec
from slipstream.layers.layer import LayerSpec
from slipstream.layers.mlp import MLPSpec
from slipstream.layers.parameters import InvalidSizesError
from slipstream.layers.rope import RopeConfig
from slipstream.models.config_keys import read_layer_types
from slipstream.models.config_reader import HARMLESS_KEYS, ConfigReader
from slipstream.models.decoder_config import DecoderConfig
from slipstream.models.gemma_keys import (
    PATTERN,
    SLIDING,
    read_attention,
    read_ropes,
    sandwich_norms,
)
from slipstream.models.quantized.catalogue import refuse_quantized
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.kinds import HeadConfig, vocabulary_problem, width_problem

# Keys of images and audio, which the assistant does not read, and of their placeholder tokens.
_HARMLESS = HARMLESS_KEYS | set(
    """
    audio_token_id boa_token_id boi_token_id eoa_token_id eoi_token_id image_token_id
    video_token_id vocab_size_per_layer_input
    """.split()
)
# Features of other models of the family that no assistant has.
_ABSENT: tuple[tuple[str, Any], ...] = (
    ("attention_bias", False),
    ("enable_moe_block", False),
    ("hidden_activation", "gelu_pytorch_tanh"),
    ("hidden_size_per_layer_input", 0),
    ("use_double_wide_mlp", False),
)


@dataclass(frozen=True)
class Centroids:
    """Parameters of an lm_head that computes logits for the likeliest clusters of tokens only.

    Attributes:
        count: number of clusters of the vocabulary, all of one size.
        chosen: number of clusters whose tokens get logits.
    """

    count: int
    chosen: int


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(HeadConfig):
    """The config of an assistant.

    Attributes:
        layers: the assistant's layers. Each reads the keys and values of the target's last layer
            of its kind (sliding window or full attention).
        target_width: hidden size of the target.
        softcap: logits become softcap * tanh(logits / softcap).
        suppressed: token ids that are never drafted.
    """

    layers: DecoderConfig
    target_width: int
    softcap: float | None
    centroids: Centroids | None
    suppressed: tuple[int, ...]

    features = "the last hidden state, after the final norm, and the cache of its last layers"
    shared = "an assistant reads the target's cache"

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        mixers = (layer.mixer for layer in self.layers.layers)
        return tuple(mixer for mixer in mixers if isinstance(mixer, AttentionSpec))

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
    """Read an assistant's config, whose layers are described in `text_config`."""
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
    """Why a layer cannot read the target's cache; None if it can."""
    index = target_layer(layer, target)
    if index is None:
        return "read the keys of such a layer of the target, which has none"
    read = target.layers[index].mixer
    assert isinstance(read, AttentionSpec)
    heads, kept = ((it.num_kv_heads, it.head_dim) for it in (layer, read))
    if heads != kept:
        return (
            f"read {heads[0]} heads of {heads[1]} numbers, and the target's cache has "
            f"{kept[0]} of {kept[1]}"
        )
    if layer.rope != read.rope:
        return (
            f"rotate their queries by {_shown(layer.rope)}, and the keys in the target's cache are "
            f"rotated by {_shown(read.rope)}"
        )
    if (layer.window or 0) > (read.window or 0):
        return f"see {layer.window} tokens, and the target's cache has {read.window}"
    return None


def target_layer(layer: AttentionSpec, target: DecoderConfig) -> int | None:
    """The index of the target's last attention layer of the same kind (sliding window or full),
    whose cache is read; None if there is none."""
    alike = [
        index
        for index, other in enumerate(target.layers)
        if isinstance(other.mixer, AttentionSpec)
        and (other.mixer.window is None) == (layer.window is None)
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
    positions = text.take("max_position_embeddings", int, 131072)
    try:
        sliding = AttentionSpec(
            num_heads=text.take("num_attention_heads", int),
            num_kv_heads=text.take("num_key_value_heads", int),
            head_dim=text.take("head_dim", int, 256),
            rope=read_ropes(text, positions)[SLIDING],
        )
        usual = [(layer + 1) % PATTERN > 0 and layer + 1 < count for layer in range(count)]
        slides = read_layer_types(text, count) or usual
        attention = read_attention(text, sliding, positions, slides)
        inner = text.take("intermediate_size", int)
        dense = MLPSpec(inner, activation=Activation.GELU_TANH)
        norms = sandwich_norms(text.take("rms_norm_eps", float, 1e-6))
        norms = replace(norms, scalar="layer_scalar")
        return DecoderConfig(
            architecture="Gemma4AssistantForCausalLM",
            vocab_size=text.take("vocab_size", int, 262144),
            hidden_size=text.take("hidden_size", int),
            layers=tuple(LayerSpec(mixer, dense, norms) for mixer in attention),
            rms_norm_eps=norms.eps,
            max_position_embeddings=positions,
            tie_word_embeddings=True,
            dtype=checkpoint.weights_dtype or torch.bfloat16,
        )
    except InvalidSizesError as error:
        raise CheckpointError(f"{text.file}: {error}") from error


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
