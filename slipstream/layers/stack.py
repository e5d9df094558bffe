"""A sequence of decoder layers, with an optional entry projection and final norm."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from torch import Tensor

from slipstream.cache.spec import LayerCache
from slipstream.kernels.ops import Ops
from slipstream.kernels.pass_inputs import PassInputs, at_rows
from slipstream.kernels.table import FusedOp, InputProjection, Norm, StackOp, StackParts
from slipstream.layers.layer import Layer, SublayerInput


@dataclass(frozen=True, eq=False)
class StreamAddends:
    """Image features that are added to the residual stream after the first layers (DeepStack).

    Attributes:
        rows: [n] int64, the rows that they are added to.
        values: [L, n, H], the features for each of the first L layers.
    """

    rows: Tensor
    values: Tensor


@dataclass(frozen=True)
class _Segment:
    """The layers from `start` to before `stop`, which one `StackOp` runs."""

    op: StackOp
    start: int
    stop: int


class Stack:
    """Runs decoder layers, fused where the backend has a fused op for them, else op by op.

    Args:
        layers: at least one.
        last, entry: see `StackParts`.
        num_apart: number of first layers that are never fused with the next one, so that
            `StreamAddends` can be added to their output; less than the number of layers.
        windows: the sliding windows of all layers, if rows attend to later tokens (`last_seen`)
            only in layers with a window; empty if they do so in all layers.
    """

    def __init__(
        self,
        ops: Ops,
        layers: Sequence[Layer],
        last: Norm | None,
        entry: InputProjection | None = None,
        num_apart: int = 0,
        windows: Sequence[int | None] = (),
    ) -> None:
        assert layers, "a stack has at least one layer"
        self._ops, self._layers, self._last, self._entry = ops, layers, last, entry
        self._apart, self._windows = range(1, num_apart + 1), tuple(windows)
        self._segments = self._cut(self._apart)
        mixers = [layer.mixer is not None for layer in layers]
        # The number of caches of the layers before each layer.
        self._first_cache = [sum(mixers[:index]) for index in range(len(layers) + 1)]

    def __call__(
        self,
        sources: Sequence[Tensor],
        inputs: PassInputs,
        caches: Sequence[LayerCache],
        wanted: Sequence[int] = (),
        added: StreamAddends | None = None,
        read: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """One pass; see `StackOp`. `added` is for layers that run apart (`num_apart`). With `read`
        the last layer's feed-forward part computes these rows only, if it can."""
        last = self._layers[-1]
        if last.mixer is None or last.feed_forward is None or len(self._layers) in wanted:
            read = None
        segments, causal = self._segments, inputs
        if self._windows and inputs.sees.last_seen is not None:
            segments = self._segments_by_sight
            causal = replace(inputs, sees=replace(inputs.sees, last_seen=None))
        if len(segments) == 1 and causal is inputs:
            return segments[0].op(sources, inputs, caches, wanted, read)
        found: dict[int, Tensor] = {}
        for segment in segments:
            first, end = self._first_cache[segment.start], self._first_cache[segment.stop]
            # The output of a segment is the stream that enters the next one.
            end_counts = segment.stop == len(self._layers)
            own = [
                layer
                for layer in wanted
                if segment.start <= layer < segment.stop + (1 if end_counts else 0)
            ]
            local = [layer - segment.start for layer in own]
            sees_ahead = causal is inputs or self._windows[segment.start] is not None
            own_inputs = inputs if sees_ahead else causal
            rows = read if end_counts else None
            hidden, streams = segment.op(sources, own_inputs, caches[first:end], local, rows)
            found.update(zip(own, streams, strict=True))
            if added is not None and segment.stop <= len(added.values):
                hidden.index_add_(0, added.rows, added.values[segment.stop - 1])
            sources = [hidden]
        return hidden, [found[layer] for layer in wanted]

    @cached_property
    def _segments_by_sight(self) -> list[_Segment]:
        """Segments whose layers either all have a window or all have none."""
        pairs = enumerate(pairwise(self._windows), 1)
        meet = [layer for layer, (one, two) in pairs if (one is None) != (two is None)]
        return self._cut({*self._apart, *meet})

    def _cut(self, ends: Collection[int]) -> list[_Segment]:
        """Cut the layers into segments that the backend fuses, and segments that run op by op.

        Args:
            ends: indices of layers at which a new segment must start.
        """
        segments: list[_Segment] = []
        start, count = 0, len(self._layers)
        while start < count:
            most = min((end for end in ends if end > start), default=count)
            stop, fused = start, self._fused_from(start, most)
            while fused is None and stop < most:
                stop += 1
                fused = self._fused_from(stop, most) if stop < most else None
            if stop > start:
                segments.append(_Segment(self._by_single_ops(start, stop), start, stop))
            if fused is not None:
                segments.append(_Segment(fused, stop, stop + fused.num_layers))
                stop += fused.num_layers
            start = stop
        return segments

    def _fused_from(self, start: int, most: int) -> FusedOp | None:
        entry = self._entry if start == 0 else None
        last = self._last if most == len(self._layers) else None
        parts = [layer.parts for layer in self._layers[start:most]]
        return self._ops.fuse(StackParts(parts, last, entry))

    def _by_single_ops(self, start: int, stop: int) -> "_SingleOps":
        is_end = stop == len(self._layers)
        return _SingleOps(
            self._ops,
            self._layers[start:stop],
            self._last if is_end else None,
            self._entry if start == 0 else None,
        )


@dataclass(frozen=True, eq=False)
class _SingleOps:
    """A `StackOp` that runs op by op."""

    ops: Ops
    layers: Sequence[Layer]
    last: Norm | None
    entry: InputProjection | None

    def __call__(
        self,
        sources: Sequence[Tensor],
        inputs: PassInputs,
        caches: Sequence[LayerCache],
        wanted: Sequence[int],
        read: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        ops, num_rows = self.ops, len(sources[0])
        if self.entry is not None:
            sides = list(zip(sources, self.entry.norms, strict=True))
            sources = [ops.joined_linear(sides, *self.entry.product)]
        *others, first = sources
        leaving = SublayerInput(first, second=others[0] if others else None)
        streams: list[Tensor] = []
        remaining = iter(caches)
        for index, layer in enumerate(self.layers, 1):
            cache = None if layer.mixer is None else next(remaining)
            rows = read if index == len(self.layers) else None
            leaving, stream = layer.apply(ops, leaving, inputs, cache, rows)
            streams.append(stream)
        addend, residual, _ = leaving
        assert residual is not None, "a stack has at least one layer"
        if self.last is not None and len(self.layers) not in wanted:
            hidden = ops.add_norm(addend, residual, self.last)
        else:
            hidden, stream = ops.norm(addend, residual, self.last)
            streams.append(stream)
        if read is not None:
            hidden = at_rows(hidden, read, num_rows)
        return hidden, [streams[layer] for layer in wanted]
