"""What a stack of decoder layers is made of, for columns that have an op of all of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.table import Heads, Norm

Product = tuple[Weight, Tensor | None]  # with its bias


@dataclass(frozen=True, eq=False)
class LayerParts:
    """A decoder layer: pre-norm attention and gated feed-forward, each added to the stream.

    Attributes:
        before_attention: None where queries, keys and values are made of the stream as it is.
        beside: norm of a second input of a first layer, whose rows stand before those of the stream
            in what queries, keys and values are made of; None without such an input.
        keeps_normed: what `before_attention` gives of the stream takes its place.
    """

    before_attention: Norm | None
    heads: Heads
    qkv: Product
    output: Product
    before_mlp: Norm
    gate_up: Product
    down: Product
    beside: Norm | None = None
    keeps_normed: bool = False

    @property
    def products(self) -> tuple[Product, ...]:
        """In the order in which a pass comes by them."""
        return self.qkv, self.output, self.gate_up, self.down


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

    `wanted` names layers, from 0, whose incoming stream is kept; their number stands for the stream
    that leaves the last one. A second input of the first layer (`beside`) is the first source.
    """

    def __call__(
        self,
        sources: Sequence[Tensor],
        inputs: PassInputs,
        caches: Sequence[tuple[Tensor, Tensor]],
        wanted: Sequence[int],
    ) -> tuple[Tensor, list[Tensor]]: ...
