"""What a decoder is made of."""

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
from slipstream.layers.layer_inputs import LayerInputHalfSpec, LayerInputsSpec
from slipstream.layers.mlp import GatedMLPSpec, PlainMLPSpec
from slipstream.layers.parallel_experts import ParallelExpertsSpec
from slipstream.layers.parameters import WHOLE, Share, require_positive
from slipstream.layers.rope import NO_ROPE, RopeConfig


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything that a decoder's network is built from, checked when it is made.

    Sizes of heads and feed-forward parts are those of the first layer that has such a part: where
    layers differ, `layers` tells.

    Attributes:
        architecture: its Hugging Face name.
        layers: in order, at least one.
        rms_norm_eps: of the norm behind the layers.
        embedding_scale: embeddings are multiplied by it; None: by nothing.
        embedding_scale_rounded: whether it is rounded to the dtype of the embeddings.
        layer_inputs: what layers are given beside the stream; None: nothing.
        stream_scale: what the residual stream stands for is the stream times this; None: itself.
        logit_scale: logits are multiplied by it, before they are capped.
        logit_softcap: logits become softcap * tanh(logit / softcap); None leaves them.
        num_added_layers: behind so many layers something of an image may be added to the stream.
        image_token: what the tokens of images have as their ids; None: there are no images.
        windowed_sight: tokens of an image that see each other do so in layers with a window alone.
        dtype: that the checkpoint is meant to run in.
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
        """The first layer's that has attention; UsageError where none has."""
        for layer in self.layers:
            if isinstance(layer.mixer, AttentionSpec):
                return layer.mixer
        raise UsageError(
            f"{self.architecture} has no layer with attention, whose sizes are needed here; use "
            "another model"
        )

    @property
    def latent_attention(self) -> LatentAttentionSpec | None:
        """The first layer's that has it; None where none has."""
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
        """The most tokens of a request where nobody asks for another number."""
        most = self.max_position_embeddings
        return min((rope.usual(most) for rope in self._ropes), default=most)

    @property
    def longest_context(self) -> int:
        """The most tokens of a request that the rotations are made for."""
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
        """Those of all layers, each before those within it."""
        waiting = [each.feed_forward for each in reversed(self.layers) if each.feed_forward]
        found = []
        while waiting:
            part = waiting.pop()
            found.append(part)
            if isinstance(part, ParallelExpertsSpec | LayerInputHalfSpec):
                waiting += reversed(part.inner)
        return found

    @property
    def intermediate_size(self) -> int:
        """That of the first dense part; without one, of a dense part that costs a row as much as
        its experts. UsageError where there is neither."""
        for part in self._feed_forwards:
            if isinstance(part, GatedMLPSpec | PlainMLPSpec):
                return part.intermediate_size
        if self.experts is not None:
            return self.experts.active_size
        raise UsageError(
            f"{self.architecture} has no feed-forward part, whose size is needed here; use "
            "another model"
        )

    @property
    def experts(self) -> ExpertsSpec | None:
        """The first layer's that has experts; None where none has."""
        parts = self._feed_forwards
        return next((part for part in parts if isinstance(part, ExpertsSpec)), None)

    @property
    def routing(self) -> Routing | None:
        """How the rows of these layers choose; None as `experts`."""
        return None if self.experts is None else self.experts.routing

    @property
    def num_active_parameters(self) -> int:
        """Those of `num_matrix_parameters` that one token passes, the head but not the table of
        embeddings included."""
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
        """How many tokens a row sees in each layer, itself included; None: all."""
        mixers = (layer.mixer for layer in self.layers)
        return tuple(mixer.window if isinstance(mixer, AttentionSpec) else None for mixer in mixers)

    def cache_layout(self, dtype: torch.dtype, share: Share = WHOLE) -> CacheLayout:
        """What the layers of a process with this share keep of the past, in this dtype."""
        mixers = [layer.mixer for layer in self.layers if layer.mixer is not None]
        return CacheLayout(tuple(mixer.cache(dtype, share) for mixer in mixers), dtype)

    @property
    def unread_tensors(self) -> tuple[str, ...]:
        """Tensors that a checkpoint may hold though the network has no use for them."""
        names = ["lm_head.weight"] if self.tie_word_embeddings else []
        for index, layer in enumerate(self.layers):
            if isinstance(layer.mixer, AttentionSpec) and layer.mixer.lender is not None:
                name = f"model.layers.{index}.{layer.mixer.name}"
                names += [f"{name}.{it}.weight" for it in ("k_proj", "v_proj", "k_norm")]
        return tuple(names)

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of the layers' matrices."""
        shapes = [shape for layer in self.layers for shape in layer.matrices(self.hidden_size)]
        return sum(rows * columns for rows, columns in shapes)

    @property
    def num_matrix_parameters(self) -> int:
        """Parameters of all matrices and tables, which are all but a few."""
        vocabulary = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        inputs = self.layer_inputs
        tables = inputs.num_parameters(self.vocab_size, self.hidden_size) if inputs else 0
        return vocabulary + tables + self.num_layer_parameters

    def with_fields(
        self, attention: Mapping[str, Any], mlp: Mapping[str, Any] | None = None
    ) -> "DecoderConfig":
        """With other values of these fields in all attention and dense feed-forward parts."""
        layers = []
        for layer in self.layers:
            mixer, feed_forward = layer.mixer, layer.feed_forward
            if isinstance(mixer, AttentionSpec):
                mixer = replace(mixer, **attention)
            if isinstance(feed_forward, GatedMLPSpec):
                feed_forward = replace(feed_forward, **(mlp or {}))
            layers.append(replace(layer, mixer=mixer, feed_forward=feed_forward))
        return replace(self, layers=tuple(layers))
