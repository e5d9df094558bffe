"""The weights and settings of layers, as backends get them, and the op of several layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from slipstream.kernels.adapters import LowRank
from slipstream.kernels.attention import Heads as Heads
from slipstream.kernels.delta_net import DeltaHeads
from slipstream.kernels.experts import ClampedGate, Router
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.latent_attention import LatentHeads
from slipstream.kernels.norm import Activation
from slipstream.kernels.norm import Addend as Addend
from slipstream.kernels.norm import Norm as Norm
from slipstream.kernels.norm import PostNorm as PostNorm
from slipstream.kernels.norm import PostNormAddend as PostNormAddend
from slipstream.kernels.pass_inputs import PassInputs

Product = tuple[Weight, Tensor | None]  # with its bias
Adapters = tuple[LowRank | None, LowRank | None]  # of a sublayer's first and last product


@dataclass(frozen=True, eq=False)
class AttentionParts:
    """Attention as a mixer; see `layers/attention.py`.

    Attributes:
        norm: of the input of `qkv`; None: the stream is not normed.
        second_norm: norm of a second input, which is concatenated before the stream as the
            input of `qkv`; None: there is none.
        keeps_normed: the normed stream replaces the stream.
        joint_norms: norms over all queries of a row as one vector, and over all its keys; or None.
        query_scales: [max_positions] float32, factors of the queries by position; or None.
        value_norm: norm of each value head, over D; None: there is none.
        reads_only: `qkv` computes only queries; keys and values are another layer's.
        adapters: of `qkv` and `output`.
    """

    norm: Norm | None
    heads: Heads
    qkv: Product
    output: Product
    second_norm: Norm | None = None
    keeps_normed: bool = False
    joint_norms: tuple[Norm, Norm] | None = None
    query_scales: Tensor | None = None
    value_norm: Norm | None = None
    reads_only: bool = False
    adapters: Adapters = (None, None)

    @property
    def feeds_attention(self) -> bool:
        """Whether the output of `qkv` is the input of `Ops.attend` as it is."""
        between = self.joint_norms, self.query_scales, self.value_norm
        return not self.reads_only and all(each is None for each in between)

    @property
    def products(self) -> tuple[Product, ...]:
        return self.qkv, self.output

    @property
    def needs_sources(self) -> bool:
        """Whether the layer can only be the first one of a stack, as in drafting heads."""
        return self.second_norm is not None or self.keeps_normed


@dataclass(frozen=True, eq=False)
class GatedMLPParts:
    """A gated feed-forward part; see `layers/mlp.py`.

    Attributes:
        norm: None: the stream is not normed.
        adapters: of `gate_up` and `down`.
    """

    norm: Norm | None
    gate_up: Product
    down: Product
    activation: Activation = Activation.SILU
    adapters: Adapters = (None, None)

    @property
    def products(self) -> tuple[Product, ...]:
        return self.gate_up, self.down


@dataclass(frozen=True, eq=False)
class SharedExpert:
    """A gated feed-forward part for all rows, besides the experts that they choose.

    Attributes:
        gate: [1, H] in the model's dtype: the output is multiplied by sigmoid(x gate^T); None: it
            is not scaled.
    """

    gate_up: Product
    down: Product
    gate: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ExpertsParts:
    """A mixture of E gated experts as a feed-forward part; see `layers/experts.py`.

    Router logits, scores and weights are float32, and so are all sums. The gated product of an
    expert is rounded once to the dtype of the rows. Its output, with its bias, is multiplied by the
    row's routing weight. Outputs are added in the order in which the row chose its experts, then
    the shared expert's, and rounded once; or the op that takes the addend adds them. Rows do not
    depend on each other.

    Attributes:
        gate_up: [E 2I, H], expert by expert: I rows of the gate, then the I rows of `up`, which the
            gate multiplies.
        gate_up_bias, down_bias: [E, 2I], in the same order, and [E, H]; None without one.
        down: [E H, I], expert by expert.
        clamp: None: an expert computes activation(gate) * up.
        activation: of the gate; a shared expert's is SiLU.
        shared: None without one.
    """

    norm: Norm
    router: Router
    gate_up: Weight
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None
    clamp: ClampedGate | None = None
    shared: SharedExpert | None = None
    activation: Activation = Activation.SILU


@dataclass(frozen=True, eq=False)
class LayerParts:
    """One decoder layer. A backend knows kinds of sublayers by the classes of their parts.

    Attributes:
        mixer, feed_forward: the parts of the sublayers; None: the layer lacks that sublayer.
        mixer_post_norm, feed_forward_post_norm: see `PostNorm`; None: plain addition.
    """

    mixer: object | None
    feed_forward: object | None
    mixer_post_norm: PostNorm | None = None
    feed_forward_post_norm: PostNorm | None = None

    @property
    def sublayers(self) -> tuple[tuple[object, PostNorm | None], ...]:
        """The sublayers that the layer has, in order, each with how it is added to the stream."""
        pairs = (self.mixer, self.mixer_post_norm), (self.feed_forward, self.feed_forward_post_norm)
        return tuple(pair for pair in pairs if pair[0] is not None)


@dataclass(frozen=True, eq=False)
class InputProjection:
    """A projection of several concatenated sources to the residual stream.

    Attributes:
        norms: the norm of each source; None: it is not normed.
    """

    product: Product
    norms: tuple[Norm | None, ...]


@dataclass(frozen=True, eq=False)
class StackParts:
    """A sequence of at least one layer, with its entry projection and final norm.

    Attributes:
        last: norm after the layers; None: the result is the stream.
        entry: computes the stream from the sources; None: the last source is the stream.
    """

    layers: Sequence[LayerParts]
    last: Norm | None
    entry: InputProjection | None = None


class StackOp(Protocol):
    """sources, each [T, its width] -> (output [T, H], wanted streams, each [T, H]).

    `caches`: one for each layer with a mixer. `wanted`: layers, from 0, whose incoming stream is
    returned, or their number: the stream that leaves the last one. A second input is the first
    source. `read`: rows [n] int64, ascending, in which the output is defined (None: all).
    """

    def __call__(
        self,
        sources: Sequence[Tensor],
        inputs: PassInputs,
        caches: Sequence[tuple[Tensor, Tensor]],
        wanted: Sequence[int],
        read: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]: ...


class FusedOp(StackOp, Protocol):
    """One op for the first layers of a stack with its entry; if these are all, also its norm."""

    @property
    def num_layers(self) -> int: ...


@dataclass(frozen=True, eq=False)
class DeltaNetParts:
    """A gated delta net as a mixer; see `layers/delta_net.py`.

    Attributes:
        inputs: projection to queries, keys, values, then z, then the gates (b, a) of the op.
        gates: projection to the gates; None: `inputs` includes it.
    """

    norm: Norm
    heads: DeltaHeads
    inputs: Product
    gates: Product | None
    output: Product

    @property
    def products(self) -> tuple[Product, ...]:
        gates = () if self.gates is None else (self.gates,)
        return self.inputs, *gates, self.output


@dataclass(frozen=True, eq=False)
class LatentParts:
    """Latent attention as a mixer; see `layers/latent_attention.py`.

    Attributes:
        first: projection of the normed stream to the latent of the queries (or to the queries
            themselves), then to the latent rows of keys and values.
        query_norm, queries: norm of the queries' latent, and its projection to queries; None:
            `first` computes queries.
    """

    norm: Norm
    heads: LatentHeads
    first: Product
    query_norm: Norm | None
    queries: Product | None
    output: Product

    @property
    def products(self) -> tuple[Product, ...]:
        queries = () if self.queries is None else (self.queries,)
        return self.first, *queries, self.output
