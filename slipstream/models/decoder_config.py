"""The configuration of a decoder network."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from slipstream.cache.spec import CacheLayout
from slipstream.core.errors import UsageError
from slipstream.kernels.experts import Routing
from slipstream.layers.attention import AttentionSpec
from slipstream.layers.experts import ExpertsSpec
from slipstream.layers.latent_attention import LatentAttentionSpec
from slipstream.layers.layer import FeedForwardSpec, LayerSpec
from slipstream.layers.layer_inputs import LayerInputsSpec, LayerInputSublayerSpec
from slipstream.layers.mlp import MLPSpec
from slipstream.layers.parallel_experts import ParallelExpertsSpec
from slipstream.layers.parameters import WHOLE, Share, require_positive
from slipstream.layers.rope import NO_ROPE, RopeConfig


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The full description of a decoder network; sizes are checked on construction.

    Properties such as `head_dim` and `intermediate_size` are those of the first layer with such a
    part; if layers differ, read `layers`.

    Attributes:
        architecture: name of the Hugging Face architecture.
        layers: specs of the layers in order, at least one.
        rms_norm_eps: epsilon of the final norm.
        embedding_scale: factor of the embeddings, or None.
        embedding_scale_rounded: whether this factor is rounded to the dtype of the embeddings.
        layer_inputs: spec of the per-layer inputs (Gemma 4), or None.
        stream_scale: factor from the network's residual stream to the one that drafters are given;
            None: 1.
        logit_scale: factor of the logits, applied before the softcap.
        logit_softcap: logits become softcap * tanh(logit / softcap); None: no softcap.
        num_added_layers: number of first layers whose output image features may be added to
            (DeepStack).
        image_token: id of image placeholder tokens; None: the model takes no images.
        windowed_sight: tokens of an image attend to each other only in layers with a window.
        dtype: the dtype that the checkpoint's config names.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: torch.dtype
    embedding_scale: float | None = None
    embedding_scale_rounded: bool = True
    stream_scale: float | None = None
    layer_inputs: LayerInputsSpec | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    num_added_layers: int = 0
    windowed_sight: bool = False
    image_token: int | None = None

    def __post_init__(self) -> None:
        if self.logit_softcap is not None:
            require_positive(final_logit_softcapping=self.logit_softcap)
        require_positive(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_layers,
            max_position_embeddings=self.max_position_embeddings,
            rms_norm_eps=self.rms_norm_eps,
        )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> AttentionSpec:
        """The attention of the first layer that has one; UsageError if no layer has."""
        for layer in self.layers:
            if isinstance(layer.mixer, AttentionSpec):
                return layer.mixer
        raise UsageError(
            f"{self.architecture} has no layer with attention, whose sizes are needed here; use "
            "another model"
        )

    @property
    def latent_attention(self) -> LatentAttentionSpec | None:
        """The latent attention of the first layer that has one; None if no layer has."""
        mixers = (layer.mixer for layer in self.layers)
        return next((mixer for mixer in mixers if isinstance(mixer, LatentAttentionSpec)), None)

    @property
    def num_heads(self) -> int:
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def rope(self) -> RopeConfig:
        return self.attention.rope

    @property
    def usual_context(self) -> int:
        """The default `max_model_len`, in tokens."""
        most = self.max_position_embeddings
        return min((rope.usual(most) for rope in self._ropes), default=most)

    @property
    def longest_context(self) -> int:
        """The largest `max_model_len` that the rotary embeddings support, in tokens."""
        most = self.max_position_embeddings
        return min((rope.longest(most) for rope in self._ropes), default=most)

    @property
    def _ropes(self) -> set[RopeConfig]:
        mixers = (layer.mixer for layer in self.layers)
        kinds = AttentionSpec | LatentAttentionSpec
        ropes = {mixer.rope for mixer in mixers if isinstance(mixer, kinds)}
        return ropes - {NO_ROPE}

    @property
    def _feed_forwards(self) -> list[FeedForwardSpec]:
        """The feed-forward parts of all layers, in order; nested parts follow their parent."""
        waiting = [each.feed_forward for each in reversed(self.layers) if each.feed_forward]
        found = []
        while waiting:
            part = waiting.pop()
            found.append(part)
            if isinstance(part, ParallelExpertsSpec | LayerInputSublayerSpec):
                waiting += reversed(part.inner)
        return found

    @property
    def intermediate_size(self) -> int:
        """Size of the first dense feed-forward part; in models without one, the total size of the
        experts that a token uses. UsageError if there is neither."""
        for part in self._feed_forwards:
            if isinstance(part, MLPSpec):
                return part.intermediate_size
        if self.experts is not None:
            return self.experts.active_size
        raise UsageError(
            f"{self.architecture} has no feed-forward part, whose size is needed here; use "
            "another model"
        )

    @property
    def experts(self) -> ExpertsSpec | None:
        """The experts of the first layer that has some; None if no layer has."""
        parts = self._feed_forwards
        return next((part for part in parts if isinstance(part, ExpertsSpec)), None)

    @property
    def routing(self) -> Routing | None:
        """The routing of `experts`; None if no layer has experts."""
        return None if self.experts is None else self.experts.routing

    @property
    def num_active_parameters(self) -> int:
        """Number of matrix parameters that one token uses: the active experts and the head are
        counted, the embedding table is not."""
        total = self.vocab_size * self.hidden_size
        for layer in self.layers:
            total += sum(rows * columns for rows, columns in layer.matrices(self.hidden_size))
        for part in self._feed_forwards:
            if isinstance(part, ExpertsSpec):
                total -= part.idle_parameters(self.hidden_size)
        if self.layer_inputs is not None:
            total += self.layer_inputs.num_parameters(0, self.hidden_size)
        return total

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer in tokens, the token itself included; None: no window."""
        mixers = (layer.mixer for layer in self.layers)
        return tuple(mixer.window if isinstance(mixer, AttentionSpec) else None for mixer in mixers)

    def cache_layout(self, dtype: torch.dtype, share: Share = WHOLE) -> CacheLayout:
        """The layout of this rank's KV cache, with pages of `dtype`, and recurrent state."""
        mixers = [layer.mixer for layer in self.layers if layer.mixer is not None]
        return CacheLayout(tuple(mixer.cache(dtype, share) for mixer in mixers))

    @property
    def unread_tensors(self) -> tuple[str, ...]:
        """Names of tensors that a checkpoint may have but the network does not use."""
        names = ["lm_head.weight"] if self.tie_word_embeddings else []
        for index, layer in enumerate(self.layers):
            if isinstance(layer.mixer, AttentionSpec) and layer.mixer.kv_source is not None:
                name = f"model.layers.{index}.{layer.mixer.name}"
                names += [f"{name}.{it}.weight" for it in ("k_proj", "v_proj", "k_norm")]
        return tuple(names)

    @property
    def num_layer_parameters(self) -> int:
        shapes = [shape for layer in self.layers for shape in layer.matrices(self.hidden_size)]
        return sum(rows * columns for rows, columns in shapes)

    @property
    def num_matrix_parameters(self) -> int:
        """Number of parameters of all matrices and tables, without norms and biases."""
        vocabulary = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        inputs = self.layer_inputs
        tables = inputs.num_parameters(self.vocab_size, self.hidden_size) if inputs else 0
        return vocabulary + tables + self.num_layer_parameters

    def with_fields(
        self, attention: Mapping[str, Any], mlp: Mapping[str, Any] | None = None
    ) -> "DecoderConfig":
        """A copy with these fields replaced in all attention parts, and all dense MLPs."""
        layers = []
        for layer in self.layers:
            mixer, feed_forward = layer.mixer, layer.feed_forward
            if isinstance(mixer, AttentionSpec):
                mixer = replace(mixer, **attention)
            if isinstance(feed_forward, MLPSpec):
                feed_forward = replace(feed_forward, **(mlp or {}))
            layers.append(replace(layer, mixer=mixer, feed_forward=feed_forward))
        return replace(self, layers=tuple(layers))
