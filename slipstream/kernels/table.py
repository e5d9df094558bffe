"""Ops of networks: what they mean.

Layers get the ops of their backend once, when the network is built, and never ask which device they
are on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from slipstream.kernels.experts import ClampedGate, Router
from slipstream.kernels.formats.weight import Rounding, Weight
from slipstream.kernels.pass_inputs import PassInputs

Product = tuple[Weight, Tensor | None]  # with its bias
SCALE_BYTES = 4  # of an int8 cache: a head of a token is D numbers and a float32, their scale


@dataclass(frozen=True, eq=False)
class Norm:
    """An RMS norm over the last axis: weight [H], and what is added to the mean square."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, eq=False)
class Heads:
    """One attention layer.

    Attributes:
        num_heads, num_kv_heads, head_dim: Hq, Hk and D.
        norms: of queries and keys, over D; None where there are none.
        cos_sin: [max_positions, R] float32: R/2 cosines, then R/2 sines, for the half-split layout
            of the first R numbers of a head; those behind them are not rotated. R is even and at
            most D.
        scale: of the scores.
        window: tokens a row sees, itself included; None sees all.
        sinks: [Hq], a score of each query head that takes part in the softmax, as it is, and has no
            value.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norms: tuple[Norm, Norm] | None
    cos_sin: Tensor
    scale: float
    window: int | None
    sinks: Tensor | None = None

    @property
    def rotary_dim(self) -> int:
        """R of `cos_sin`."""
        return self.cos_sin.shape[1]


@dataclass(frozen=True, eq=False)
class AttentionParts:
    """Attention as a mixer; see `layers/attention.py`.

    Attributes:
        norm: None where queries, keys and values are made of the stream as it is.
        beside: norm of a second input, whose columns stand before those of the stream in what
            queries, keys and values are made of; None without such an input.
        keeps_normed: the normed stream takes the place of the stream.
    """

    norm: Norm | None
    heads: Heads
    qkv: Product
    output: Product
    beside: Norm | None = None
    keeps_normed: bool = False

    @property
    def products(self) -> tuple[Product, ...]:
        return self.qkv, self.output

    @property
    def needs_sources(self) -> bool:
        """Whether it only runs where the stream begins, as in drafting heads."""
        return self.norm is None or self.beside is not None or self.keeps_normed


@dataclass(frozen=True, eq=False)
class GatedMLPParts:
    """A gated feed-forward part; see `layers/mlp.py`."""

    norm: Norm
    gate_up: Product
    down: Product

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
    once, or left to be added up by whoever takes the addend. Nothing of a row depends on the rows
    beside it.

    Attributes:
        gate_up: [E 2I, H], expert by expert: its I rows of the gate, then its I rows that the gate
            multiplies.
        gate_up_bias: [E, 2I], in the same order; None without one.
        down: [E H, I], expert by expert.
        down_bias: [E, H]; None without one.
        clamp: None: the activation is silu(gate) * up.
        shared: None where there is no shared expert.
    """

    norm: Norm
    router: Router
    gate_up: Weight
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None
    clamp: ClampedGate | None = None
    shared: SharedExpert | None = None


@dataclass(frozen=True, eq=False)
class LayerParts:
    """One decoder layer. A backend knows kinds of halves by the classes of their parts.

    Attributes:
        mixer, feed_forward: each is added to the stream; None where the layer has none.
    """

    mixer: object | None
    feed_forward: object | None

    @property
    def halves(self) -> tuple[object, ...]:
        """Those that there are, in the order in which they run."""
        return tuple(half for half in (self.mixer, self.feed_forward) if half is not None)


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
    leave the sum over parts of K to them, and return [parts, T, N] float32.
    """

    def __call__(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor: ...


class NormLinearOp(Protocol):
    """addend, residual [T, H] -> (linear(norm(residual + addend)), residual + addend).

    Without a residual the addend [T, H] is the sum. The first result is [T, N] in its dtype.
    """

    def __call__(
        self,
        addend: Tensor,
        residual: Tensor | None,
        norm: Norm,
        weight: Weight,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]: ...


class ExpertsOp(Protocol):
    """addend, residual [T, H] -> (experts(norm(residual + addend)), residual + addend).

    Without a residual the addend [T, H] is the sum. The first result is an addend as of `LinearOp`.
    """

    def __call__(
        self, addend: Tensor, residual: Tensor | None, parts: ExpertsParts
    ) -> tuple[Tensor, Tensor]: ...


class AddNormOp(Protocol):
    """addend, residual [T, H] -> norm(residual + addend), [T, H] in the residual's dtype."""

    def __call__(self, addend: Tensor, residual: Tensor, norm: Norm) -> Tensor: ...


class NormOp(Protocol):
    """addend, residual [T, H] -> (norm(residual + addend), residual + addend).

    Without a residual the addend [T, H] is the sum.
    """

    def __call__(
        self, addend: Tensor, residual: Tensor | None, norm: Norm
    ) -> tuple[Tensor, Tensor]: ...


class JoinedLinearOp(Protocol):
    """parts [T, K1], [T, K2] ..., each normed where it has a norm; weight [N, K1 + K2 ...].

    Returns linear of the parts side by side, [T, N] in their dtype.
    """

    def __call__(
        self, parts: Sequence[tuple[Tensor, Norm | None]], weight: Weight, bias: Tensor | None
    ) -> Tensor: ...


class LogitsOp(Protocol):
    """x [T, K], weight [V, K] -> [T, V] float32, never rounded below the accumulator."""

    def __call__(self, x: Tensor, weight: Weight) -> Tensor: ...


class AttendOp(Protocol):
    """Causal self-attention of ragged rows over paged keys and values.

    qkv [T, (Hq + 2 Hk) D]: queries, keys, values. Queries and keys are normed and rotated, keys and
    values stored at the rows' slots of the caches [num_blocks, block_size, Hk, D]; then a row at
    position p sees the cached tokens 0..p of its request, or the last `window` of them; of those of
    a tree, its ancestors and itself; where `inputs` is not causal, those behind p as well.
    A cache of int8 is [num_blocks, block_size, Hk, D + SCALE_BYTES]: D numbers, then their scale.
    Returns [T, Hq D].
    """

    def __call__(
        self,
        qkv: Tensor,
        heads: Heads,
        inputs: PassInputs,
        cache: tuple[Tensor, Tensor],
    ) -> Tensor: ...


class StoreOp(Protocol):
    """Keys and values of ragged rows to their slots, for others to see.

    kv [T, 2 Hk D]: keys, which are normed and rotated as `AttendOp` does it, and values. Of
    `inputs` only positions and slots count.
    """

    def __call__(
        self,
        kv: Tensor,
        heads: Heads,
        inputs: PassInputs,
        cache: tuple[Tensor, Tensor],
    ) -> None: ...


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


def as_it_is(weight: Weight) -> Weight:
    """For backends that read weights as they are loaded."""
    return weight


def in_plain_torch(matrix: Tensor, form: Rounding) -> Weight:
    """For backends that round as the reference does."""
    return form.round(matrix)


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
        norm_gated_linear: the same; of what comes out, [T, 2I] with the gate first, it returns
            silu(gate) * up, [T, I].
        experts: a mixture of experts behind a norm.
        add_norm: a norm that no matmul of a layer follows.
        norm: the same, together with the sum that was normed.
        joined_linear: a matmul of several inputs side by side, each normed or not.
        attend: attention.
        store: its first half alone.
        logits: the head's matmul.
        pack: a weight as the backend reads it, made once, when it is loaded.
        round: a matrix [N, K] in fewer bits, packed or to be packed.
        fuse: an op of the first layers of a stack, as many as there is one for; None leaves the
            first to the other ops.
    """

    backend: str
    linear: LinearOp
    norm_linear: NormLinearOp
    norm_gated_linear: NormLinearOp
    experts: ExpertsOp
    add_norm: AddNormOp
    norm: NormOp
    joined_linear: JoinedLinearOp
    attend: AttendOp
    store: StoreOp
    logits: LogitsOp
    pack: Callable[[Weight], Weight] = as_it_is
    round: Callable[[Tensor, Rounding], Weight] = in_plain_torch
    fuse: Callable[[StackParts], FusedOp | None] = one_by_one
