"""Per-layer embeddings: each layer gets a vector for each token besides the stream (Gemma 4).

An embedding table has a vector for each token and layer. It is added to a projection of the
token's embedding, and enters the layer after the feed-forward part:

    x = x + norm(projection(gelu(gate x) * input))
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.norm import Activation, SublayerOutput
from slipstream.kernels.ops import Ops
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.table import PostNorm, PostNormAddend, Product
from slipstream.layers.embedding import Embedding
from slipstream.layers.layer import BuildContext, FeedForwardSpec, MatrixShape, SublayerInput
from slipstream.layers.norm import LayerNorms, rms_norm
from slipstream.layers.parameters import Part


@dataclass(frozen=True)
class LayerInputsSpec:
    """`size` numbers of each token for each of `num_layers` layers.

    Attributes:
        of_images: token id whose vectors are used for rows of images.
    """

    size: int
    num_layers: int
    of_images: int = 0

    @property
    def total(self) -> int:
        return self.size * self.num_layers

    def num_parameters(self, vocab_size: int, width: int) -> int:
        return self.total * (vocab_size + width)


class LayerInputs:
    """The embedding table, and the projection of embeddings."""

    def __init__(
        self, spec: LayerInputsSpec, context: BuildContext, vocab_size: int, eps: float
    ) -> None:
        source, width = context.source, context.width
        name = "model.embed_tokens_per_layer"
        self.table = Embedding(source, name, vocab_size, spec.total, context.share)
        self._projection = _whole(context, "model.per_layer_model_projection", spec.total, width)
        self._norm = rms_norm(source, "model.per_layer_projection_norm", spec.size, eps)
        self._spec, self._width = spec, width

    def __call__(self, ops: Ops, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """token_ids [T], embedded [T, H] as it enters the first layer -> [T, layers, size]."""
        size = self._spec.size
        of_tokens = self.table(token_ids)
        scale = torch.tensor(size**0.5, dtype=of_tokens.dtype).item()
        projected = ops.joined_linear([(embedded, None)], *self._projection) * self._width**-0.5
        normed, _ = ops.norm(projected.reshape(-1, size), None, self._norm)
        total = normed.view(len(token_ids), -1) + of_tokens * scale
        return (total * 2**-0.5).view(len(token_ids), -1, size)


@dataclass(frozen=True)
class LayerInputSublayerSpec:
    """A feed-forward part, followed by the addition of the layer's input.

    The layer's norm after this sublayer is the norm of the input.

    Attributes:
        layer: index of the layer.
        size: size of the input.
        post_norm: name of the norm after the feed-forward part; None: there is none.
    """

    feed_forward: FeedForwardSpec
    layer: int
    size: int
    post_norm: str | None = None

    @property
    def inner(self) -> tuple[FeedForwardSpec, ...]:
        return (self.feed_forward,)

    def matrices(self, norms: LayerNorms, width: int) -> tuple[MatrixShape, ...]:
        own = (self.size, width), (width, self.size)
        return (*self.feed_forward.matrices(norms, width), *own)

    def numbers_per_row(self, width: int) -> int:
        return self.feed_forward.numbers_per_row(width) + 2 * self.size + width

    def build(self, context: BuildContext, layer: str, norms: LayerNorms) -> "LayerInputHalf":
        return LayerInputHalf(self, context, layer, norms)


class LayerInputHalf:
    """The feed-forward part, and the matrices before and after the input."""

    def __init__(
        self, spec: LayerInputSublayerSpec, context: BuildContext, layer: str, norms: LayerNorms
    ) -> None:
        source, width, size = context.source, context.width, spec.size
        self._feed_forward = spec.feed_forward.build(context, layer, norms)
        norm = norms.load_optional(source, layer, spec.post_norm, width)
        self._post_norm = None if norm is None else PostNorm(norm)
        self._gate = _whole(context, f"{layer}.per_layer_input_gate", size, width)
        self._projection = _whole(context, f"{layer}.per_layer_projection", width, size)
        self._layer, self.norm = spec.layer, self._feed_forward.norm

    @property
    def parts(self) -> object:
        return self

    def apply(
        self, ops: Ops, entering: SublayerInput, inputs: PassInputs
    ) -> tuple[SublayerOutput, Tensor]:
        assert inputs.layer_inputs is not None, "the decoder makes them"
        output, stream = self._feed_forward.apply(ops, entering, inputs)
        addend = output if self._post_norm is None else PostNormAddend(output, self._post_norm)
        gate, stream = ops.norm_linear(addend, stream, None, *self._gate)
        active = ops.activate(gate, Activation.GELU_TANH) * inputs.layer_inputs[:, self._layer]
        return ops.linear(active, *self._projection), stream


def _whole(context: BuildContext, name: str, rows: int, columns: int) -> Product:
    """A small matrix, replicated on every rank."""
    return context.source.matrix([Part(f"{name}.weight", rows)], columns), None
