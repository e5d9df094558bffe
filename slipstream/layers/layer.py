"""Decoder layers: specs (data), and the layers that are built from them.

A layer has two sublayers, whose outputs are added to the residual stream: a mixer (such as
attention), in which rows depend on each other, and a feed-forward part. One may be absent. A kind
of sublayer is a spec and the class that it builds; each kind is in a separate file of this package.

The stream passes from sublayer to sublayer as two tensors: the `residual`, and the `addend`, which
is the output of the last sublayer and is not added yet. So the addition can be fused with the norm
that follows. A norm after a sublayer is also part of that op; sublayers do not know of it. Before
the first sublayer, the addend is the stream, and there is no residual.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.cache.spec import CacheSpec, LayerCache, SharedCache
from slipstream.kernels.norm import SublayerOutput, UnreducedSum
from slipstream.kernels.ops import Ops
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.table import Addend, LayerParts, Norm, PostNorm, PostNormAddend
from slipstream.layers.adapters import AdapterSlots
from slipstream.layers.expert_pool import ExpertPool
from slipstream.layers.norm import LayerNorms
from slipstream.layers.parameters import WHOLE, ParameterSource, Share
from slipstream.layers.rope import RopeTables

MatrixShape = tuple[int, int]  # rows (outputs), columns (inputs)


@dataclass(frozen=True)
class BuildContext:
    """What is needed to build sublayers.

    Attributes:
        width: width of the residual stream.
        share: this rank's share of the network; `source` has it as well.
        adapters: receives slots for LoRA adapters of the matrices; None: there are no adapters.
        pool: set if ranks share only the experts, and hold all else whole.
    """

    source: ParameterSource
    width: int
    ropes: RopeTables
    share: Share = WHOLE
    adapters: AdapterSlots | None = None
    pool: ExpertPool | None = None


class SublayerInput(NamedTuple):
    """The input of a sublayer.

    Attributes:
        addend: the output of the sublayer before this one.
        residual: the stream that it is to be added to; None: the addend is the stream.
        second: [T, H], the second input of a mixer that has one.
    """

    addend: Addend
    residual: Tensor | None = None
    second: Tensor | None = None

    def of_rows(self, rows: Tensor) -> "SublayerInput":
        """The input of these rows alone, [n] int64, for a sublayer without a second input."""
        residual = None if self.residual is None else self.residual[rows]
        return SublayerInput(_rows_of(self.addend, rows), residual)


class Sublayer(Protocol):
    """The common interface of mixers and feed-forward parts.

    Attributes:
        norm: the norm before the sublayer; None: it reads the stream without a norm.
        parts: weights, in a class of `kernels/table.py` that tells backends what they can fuse; any
            other object for kinds that no backend fuses.
    """

    @property
    def norm(self) -> Norm | None: ...

    @property
    def parts(self) -> object: ...


class Mixer(Sublayer, Protocol):
    """A sublayer in which rows depend on other rows, through a cache."""

    def apply(
        self, ops: Ops, entering: SublayerInput, inputs: PassInputs, cache: LayerCache
    ) -> tuple[SublayerOutput, Tensor]:
        """Run op by op -> (its output, the stream that it is to be added to), each [T, H]."""


class FeedForward(Sublayer, Protocol):
    """A sublayer whose rows do not depend on each other."""

    def apply(
        self, ops: Ops, entering: SublayerInput, inputs: PassInputs
    ) -> tuple[SublayerOutput, Tensor]:
        """Run op by op -> (its output, the stream that it is to be added to), each [T, H]."""


class SublayerSpec(Protocol):
    """The common interface of both kinds of specs, for memory planning."""

    def matrices(self, norms: LayerNorms, width: int) -> Sequence[MatrixShape]:
        """The shapes of its matrices, for a stream of this width."""

    def numbers_per_row(self, width: int) -> int:
        """The size of a row's activations while the sublayer runs, for a stream of this width, in
        numbers of the activations' dtype; a float32 number counts as two."""


class MixerSpec(SublayerSpec, Protocol):
    """A kind of mixer with its sizes."""

    def cache(self, dtype: torch.dtype, share: Share = WHOLE) -> CacheSpec | SharedCache:
        """The spec of the cache that a rank with this share needs."""

    def build(self, context: BuildContext, layer: str, norms: LayerNorms) -> Mixer:
        """The sublayer with its weights, which a checkpoint has under the name `layer`."""


class FeedForwardSpec(SublayerSpec, Protocol):
    """A kind of feed-forward part with its sizes."""

    def build(self, context: BuildContext, layer: str, norms: LayerNorms) -> FeedForward:
        """The sublayer with its weights, which a checkpoint has under the name `layer`."""


@dataclass(frozen=True)
class LayerSpec:
    """The spec of a decoder layer; None stands for a sublayer that it lacks."""

    mixer: MixerSpec | None
    feed_forward: FeedForwardSpec | None
    norms: LayerNorms

    def __post_init__(self) -> None:
        assert self._sublayers, "a layer has a mixer or a feed-forward part"

    @property
    def _sublayers(self) -> tuple[SublayerSpec, ...]:
        return tuple(it for it in (self.mixer, self.feed_forward) if it is not None)

    def matrices(self, width: int) -> list[MatrixShape]:
        return [shape for it in self._sublayers for shape in it.matrices(self.norms, width)]

    def numbers_per_row(self, width: int) -> int:
        """The size of a row's activations if all tensors of the layer are alive at once."""
        return sum(it.numbers_per_row(width) for it in self._sublayers)

    def build(self, context: BuildContext, name: str) -> "Layer":
        mixer, feed_forward, norms = self.mixer, self.feed_forward, self.norms
        source, width = context.source, context.width
        return Layer(
            None if mixer is None else mixer.build(context, name, norms),
            None if feed_forward is None else feed_forward.build(context, name, norms),
            norms.mixer_post_norm(source, name, width),
            norms.feed_forward_post_norm(source, name, width),
        )


@dataclass(frozen=True, eq=False)
class Layer:
    """A built decoder layer."""

    mixer: Mixer | None
    feed_forward: FeedForward | None
    mixer_post_norm: PostNorm | None = None
    feed_forward_post_norm: PostNorm | None = None

    @property
    def parts(self) -> LayerParts:
        mixer, feed_forward = self.mixer, self.feed_forward
        return LayerParts(
            None if mixer is None else mixer.parts,
            None if feed_forward is None else feed_forward.parts,
            self.mixer_post_norm,
            self.feed_forward_post_norm,
        )

    def apply(
        self,
        ops: Ops,
        entering: SublayerInput,
        inputs: PassInputs,
        cache: LayerCache | None,
        read: Tensor | None = None,
    ) -> tuple[SublayerInput, Tensor]:
        """Run op by op.

        Args:
            cache: None for a layer without a mixer.
            read: [n] int64, the rows that the feed-forward part computes; None: all.

        Returns:
            The input of the next layer, and the stream that entered this one.
        """
        streams: list[Tensor] = []
        if self.mixer is not None:
            assert cache is not None, "a mixer has a cache"
            output, stream = self.mixer.apply(ops, entering, inputs, cache)
            entering = SublayerInput(_addend(output, self.mixer_post_norm), stream)
            streams.append(stream)
        if self.feed_forward is not None:
            if read is not None:
                entering, inputs = entering.of_rows(read), inputs.of_rows(read)
            output, stream = self.feed_forward.apply(ops, entering, inputs)
            entering = SublayerInput(_addend(output, self.feed_forward_post_norm), stream)
            streams.append(stream)
        return entering, streams[0]


def _rows_of(addend: Addend, rows: Tensor) -> Addend:
    if isinstance(addend, PostNormAddend):
        values = _rows_of(addend.values, rows)
        assert not isinstance(values, PostNormAddend), "a sublayer has one post-norm"
        return replace(addend, values=values)
    if isinstance(addend, UnreducedSum):
        return replace(addend, values=addend.values.index_select(-2, rows))
    return addend.index_select(-2, rows)


def _addend(output: SublayerOutput, post_norm: PostNorm | None) -> Addend:
    return output if post_norm is None else PostNormAddend(output, post_norm)


def build_layers(specs: Sequence[LayerSpec], context: BuildContext) -> list[Layer]:
    return [spec.build(context, f"model.layers.{index}") for index, spec in enumerate(specs)]
