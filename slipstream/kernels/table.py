"""Ops of networks: what they mean.

Layers get the ops of their backend once, when the network is built, and never ask which device they
are on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from slipstream.kernels.adapters import Adapted, LowRank
from slipstream.kernels.attention import AttendOp as AttendOp
from slipstream.kernels.attention import Heads as Heads
from slipstream.kernels.attention import StoreOp as StoreOp
from slipstream.kernels.delta_net import DeltaHeads, DeltaNetOp
from slipstream.kernels.experts import ClampedGate, Router
from slipstream.kernels.formats.weight import Rounding, Weight, as_it_is, in_plain_torch
from slipstream.kernels.latent_attention import LatentAttentionOp, LatentHeads
from slipstream.kernels.norm import Activation
from slipstream.kernels.norm import Addend as Addend
from slipstream.kernels.norm import Behind as Behind
from slipstream.kernels.norm import JoiningAddend as JoiningAddend
from slipstream.kernels.norm import Norm as Norm
from slipstream.kernels.pass_inputs import PassInputs

Product = tuple[Weight, Tensor | None]  # with its bias
Adapters = tuple[LowRank | None, LowRank | None]  # of a half's first and last product


@dataclass(frozen=True, eq=False)
class AttentionParts:
    """Attention as a mixer; see `layers/attention.py`.

    Attributes:
        norm: None where queries, keys and values are made of the stream as it is.
        beside: norm of a second input, whose columns stand before those of the stream in what
            queries, keys and values are made of; None without such an input.
        keeps_normed: the normed stream takes the place of the stream.
        joint_norms: None, or of all queries of a row as one vector, and of all its keys.
        query_scales: None, or [max_positions] float32 that queries are multiplied by.
        value_norm: of the value heads, over D; None where there is none.
        reads_only: `qkv` makes queries alone, and keys and values are those that another layer has
            stored.
        adapters: of `qkv` and `output`.
    """

    norm: Norm | None
    heads: Heads
    qkv: Product
    output: Product
    beside: Norm | None = None
    keeps_normed: bool = False
    joint_norms: tuple[Norm, Norm] | None = None
    query_scales: Tensor | None = None
    value_norm: Norm | None = None
    reads_only: bool = False
    adapters: Adapters = (None, None)

    @property
    def feeds_attention(self) -> bool:
        """Whether what `qkv` makes is what `AttendOp` takes."""
        between = self.joint_norms, self.query_scales, self.value_norm
        return not self.reads_only and all(each is None for each in between)

    @property
    def products(self) -> tuple[Product, ...]:
        return self.qkv, self.output

    @property
    def needs_sources(self) -> bool:
        """Whether it only runs where the stream begins, as in drafting heads."""
        return self.beside is not None or self.keeps_normed


@dataclass(frozen=True, eq=False)
class GatedMLPParts:
    """A gated feed-forward part; see `layers/mlp.py`.

    Attributes:
        norm: None where the stream is taken as it is.
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
    """A gated feed-forward part that all rows pass beside the experts that they choose.

    Attributes:
        gate: [1, H] in the model's dtype: what comes out is multiplied by sigmoid(x gate^T); None:
            it is taken as it is.
    """

    gate_up: Product
    down: Product
    gate: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ExpertsParts:
    """A mixture of E gated experts as a feed-forward part; see `layers/experts.py`.

    Router logits, scores and weights are float32, and so are all sums. What an expert's gate and up
    make is rounded once to the dtype of the rows; its output, with its bias, is multiplied by the
    row's weight; outputs are added up in the order of choice, then the shared expert's, and rounded
    once, or left to be added up by whoever takes the addend. A row depends on no other row.

    Attributes:
        gate_up: [E 2I, H], expert by expert: its I rows of the gate, then its I rows that the gate
            multiplies.
        gate_up_bias, down_bias: [E, 2I], in the same order, and [E, H]; None without one.
        down: [E H, I], expert by expert.
        clamp: None: an expert makes activation(gate) * up.
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
    """One decoder layer. A backend knows kinds of halves by the classes of their parts.

    Attributes:
        mixer, feed_forward: each is added to the stream; None where the layer has none.
        behind_mixer, behind_feed_forward: how; None: as it is.
    """

    mixer: object | None
    feed_forward: object | None
    behind_mixer: Behind | None = None
    behind_feed_forward: Behind | None = None

    @property
    def halves(self) -> tuple[tuple[object, Behind | None], ...]:
        """Those that there are, in the order in which they run, and how each joins the stream."""
        pairs = (self.mixer, self.behind_mixer), (self.feed_forward, self.behind_feed_forward)
        return tuple(pair for pair in pairs if pair[0] is not None)


@dataclass(frozen=True, eq=False)
class Entry:
    """Makes the stream of several sources side by side.

    Attributes:
        norms: of each source; None for those that are taken as they are.
    """

    product: Product
    norms: tuple[Norm | None, ...]


@dataclass(frozen=True, eq=False)
class StackParts:
    """Layers in a row, at least one, and what stands before and behind them.

    Attributes:
        last: norm behind the layers; None: what leaves is the stream.
        entry: None: the last source is the stream.
    """

    layers: Sequence[LayerParts]
    last: Norm | None
    entry: Entry | None = None


class LinearOp(Protocol):
    """x [T, K], weight [N, K], bias [N] or None -> [T, N].

    What comes out is only for the ops of the same backend that take an `addend`: a backend may
    leave the sum over parts of K to them, and return [parts, T, N] float32. `adapted`, here and
    below: what adapters add to the product of their rows; None: no row has one.
    """

    def __call__(
        self, x: Tensor, weight: Weight, bias: Tensor | None, adapted: Adapted | None = None
    ) -> Tensor: ...


class NormLinearOp(Protocol):
    """addend, residual [T, H] -> (linear(norm(residual + addend)), residual + addend).

    Without a residual the addend [T, H] is the sum. The first result is [T, N] in its dtype. Here
    and below, an addend may say how it joins the residual, and None stands for no norm.
    """

    def __call__(
        self,
        addend: Addend,
        residual: Tensor | None,
        norm: Norm | None,
        weight: Weight,
        bias: Tensor | None,
        adapted: Adapted | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class NormGatedLinearOp(Protocol):
    """As `NormLinearOp`; of what comes out, [T, 2I] with the gate first, the first result is
    activation(gate) * up, [T, I]."""

    def __call__(
        self,
        addend: Addend,
        residual: Tensor | None,
        norm: Norm | None,
        weight: Weight,
        bias: Tensor | None,
        activation: Activation = Activation.SILU,
        adapted: Adapted | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class ExpertsOp(Protocol):
    """addend, residual [T, H] -> (experts(norm(residual + addend)), residual + addend).

    Without a residual the addend [T, H] is the sum. The first result is an addend as of `LinearOp`.
    """

    def __call__(
        self, addend: Addend, residual: Tensor | None, parts: ExpertsParts
    ) -> tuple[Tensor, Tensor]: ...


class AddNormOp(Protocol):
    """addend, residual [T, H] -> norm(residual + addend), [T, H] in the residual's dtype."""

    def __call__(self, addend: Addend, residual: Tensor, norm: Norm) -> Tensor: ...


class NormOp(Protocol):
    """addend, residual [T, H] -> (norm(residual + addend), residual + addend).

    Without a residual the addend [T, H] is the sum.
    """

    def __call__(
        self, addend: Addend, residual: Tensor | None, norm: Norm | None
    ) -> tuple[Tensor, Tensor]: ...


class JoinedLinearOp(Protocol):
    """parts [T, K1], [T, K2] ..., each normed where it has a norm; weight [N, K1 + K2 ...].

    Returns linear of the parts side by side, [T, N] in their dtype. `adapted` as in `LinearOp`.
    """

    def __call__(
        self,
        parts: Sequence[tuple[Tensor, Norm | None]],
        weight: Weight,
        bias: Tensor | None,
        adapted: Adapted | None = None,
    ) -> Tensor: ...


class LogitsOp(Protocol):
    """x [T, K], weight [V, K] -> [T, V] float32, never rounded below the accumulator."""

    def __call__(self, x: Tensor, weight: Weight) -> Tensor: ...


class StackOp(Protocol):
    """sources, each [T, its width] -> (what leaves [T, H], wanted streams, each [T, H]).

    `caches` has one entry for each layer with a mixer, in order. `wanted` names layers, from 0,
    whose incoming stream is kept; their number stands for the stream that leaves the last one. A
    second input of the first layer (`beside`) is the first source.
    """

    def __call__(
        self,
        sources: Sequence[Tensor],
        inputs: PassInputs,
        caches: Sequence[tuple[Tensor, Tensor]],
        wanted: Sequence[int],
    ) -> tuple[Tensor, list[Tensor]]: ...


class FusedOp(StackOp, Protocol):
    """One op of the first `num_layers` layers of a stack, entry included, and of the last norm
    where these are all."""

    @property
    def num_layers(self) -> int: ...


def one_by_one(parts: StackParts) -> FusedOp | None:
    """For backends that have no op of several layers."""
    del parts
    return None


@dataclass(frozen=True)
class Ops:
    """What one backend has of them.

    Attributes:
        backend: its name.
        linear: a matmul.
        norm_linear: a matmul behind a norm.
        norm_gated_linear: the same, and what a gate makes of the result.
        experts: a mixture of experts behind a norm.
        add_norm: a norm that no matmul of a layer follows.
        norm: the same, together with the sum that was normed.
        activate: x [T, I], an activation -> [T, I].
        joined_linear: a matmul of several inputs side by side, each normed or not.
        attend, store: attention, and its first half alone.
        latent_attention: attention over one latent row a token.
        delta_net: the recurrence of a gated delta net.
        logits: the head's matmul.
        pack: a weight as the backend reads it, made once, when it is loaded.
        round: a matrix [N, K] in fewer bits, packed or to be packed.
        fuse: an op of a stack's first layers, as many as there is one for; None: of no layer.
        sums_addends: addends may be [parts, T, N] of any dtype, which ops add up in their order.
    """

    backend: str
    linear: LinearOp
    norm_linear: NormLinearOp
    norm_gated_linear: NormGatedLinearOp
    experts: ExpertsOp
    add_norm: AddNormOp
    norm: NormOp
    activate: Callable[[Tensor, Activation], Tensor]
    joined_linear: JoinedLinearOp
    attend: AttendOp
    store: StoreOp
    latent_attention: LatentAttentionOp
    delta_net: DeltaNetOp
    logits: LogitsOp
    pack: Callable[[Weight], Weight] = as_it_is
    round: Callable[[Tensor, Rounding], Weight] = in_plain_torch
    fuse: Callable[[StackParts], FusedOp | None] = one_by_one
    sums_addends: bool = False


@dataclass(frozen=True, eq=False)
class DeltaNetParts:
    """See `layers/delta_net.py`.

    Attributes:
        inputs: its rows make queries, keys, values, then z, then the gates (b, a) of the op.
        gates: makes the gates where `inputs` does not; None: `inputs` does.
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
        first: of the normed stream it makes what queries are made of, or queries, then latent rows.
        query_norm, queries: what makes queries of the first numbers of those; None where they are
            queries.
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
