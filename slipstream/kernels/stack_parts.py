"""What decoder layers are made of, for backends that run several of them in one op."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.table import Heads, Norm

Product = tuple[Weight, Tensor | None]  # with its bias


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
class LayerParts:
    """One decoder layer. A column knows kinds of halves by the classes of their parts.

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
class StackParts:
    """Layers in a row, at least one, and what stands before and behind them.

    Attributes:
        last: norm behind the layers; None: what leaves is the stream.
        entry: makes the stream of the sources side by side; None: the last source is the stream.
        entry_norms: of each source; None for those that are taken as they are.
    """

    layers: Sequence[LayerParts]
    last: Norm | None
    entry: Product | None = None
    entry_norms: tuple[Norm | None, ...] = ()


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
