"""Decoder layers in a row, from what enters them to what a head takes."""

from collections.abc import Sequence

from torch import Tensor

from slipstream.kernels.devices import profiling
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.stack_parts import LayerParts, StackParts
from slipstream.kernels.table import Norm, Ops
from slipstream.layers.attention import Attention
from slipstream.layers.mlp import GatedMLP

LayerCache = tuple[Tensor, Tensor]


def layer_parts(
    before_attention: Norm | None,
    attention: Attention,
    mlp: GatedMLP,
    beside: Norm | None = None,
    keeps_normed: bool = False,
) -> LayerParts:
    """A layer of these parts; `LayerParts` says what the norms do."""
    return LayerParts(
        before_attention=before_attention,
        heads=attention.heads,
        qkv=attention.qkv.product,
        output=attention.output.product,
        before_mlp=mlp.norm,
        gate_up=mlp.gate_up.product,
        down=mlp.down.product,
        beside=beside,
        keeps_normed=keeps_normed,
    )


class Stack:
    """Runs layers: in one op where the column has one for all of it."""

    def __init__(self, ops: Ops, parts: StackParts) -> None:
        assert parts.layers, "a stack has at least one layer"
        self._ops, self._parts, self._fused = ops, parts, ops.fuse(parts)

    def __call__(
        self,
        sources: Sequence[Tensor],
        inputs: PassInputs,
        caches: Sequence[LayerCache],
        wanted: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """One pass; see `StackOp`."""
        # A profile tells the ops of a layer apart; their results are the same.
        through = self._by_ops if self._fused is None or profiling() else self._fused
        return through(sources, inputs, caches, wanted)

    def _by_ops(
        self,
        sources: Sequence[Tensor],
        inputs: PassInputs,
        caches: Sequence[LayerCache],
        wanted: Sequence[int],
    ) -> tuple[Tensor, list[Tensor]]:
        ops, parts = self._ops, self._parts
        if parts.entry is not None:
            sides = list(zip(sources, parts.entry_norms, strict=True))
            sources = [ops.joined_linear(sides, *parts.entry)]
        *beside, addend = sources
        residual: Tensor | None = None
        streams: list[Tensor] = []
        for layer, cache in zip(parts.layers, caches, strict=True):
            addend, residual, stream = run_layer(
                ops, layer, addend, residual, inputs, cache, *beside
            )
            streams.append(stream)
            beside = []
        assert residual is not None, "a stack has at least one layer"
        if parts.last is None or len(parts.layers) in wanted:
            # Without a last norm only the sum is wanted.
            norm = parts.last or parts.layers[-1].before_mlp
            hidden, stream = ops.norm(addend, residual, norm)
            streams.append(stream)
            hidden = stream if parts.last is None else hidden
        else:
            hidden = ops.add_norm(addend, residual, parts.last)
        return hidden, [streams[layer] for layer in wanted]


def run_layer(
    ops: Ops,
    layer: LayerParts,
    addend: Tensor,
    residual: Tensor | None,
    inputs: PassInputs,
    cache: LayerCache,
    beside: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer, which writes its keys and values into `cache`.

    Args:
        addend, residual: what the layer before added, and the stream before that, None in a first
            layer; each [T, H].
        beside: the second input [T, width] of a layer that has one.

    Returns:
        This layer's addend and the stream before it, and the stream that entered the layer.
    """
    is_odd = beside is not None or layer.keeps_normed or layer.before_attention is None
    if residual is None and is_odd:
        qkv, stream = _first_qkv(ops, layer, addend, beside)
    else:
        assert layer.before_attention is not None, "only first layers go without a norm"
        qkv, stream = ops.norm_linear(addend, residual, layer.before_attention, *layer.qkv)
    mixed = ops.attend(qkv, layer.heads, inputs, cache)
    addend = ops.linear(mixed, *layer.output)
    active, residual = ops.norm_gated_linear(addend, stream, layer.before_mlp, *layer.gate_up)
    return ops.linear(active, *layer.down), residual, stream


def _first_qkv(
    ops: Ops, layer: LayerParts, stream: Tensor, beside: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Queries, keys and values of a first layer of its own kind, and the stream that it keeps."""
    norm = layer.before_attention
    if norm is not None and layer.keeps_normed:
        stream, norm = ops.norm(stream, None, norm)[0], None
    sides: list[tuple[Tensor, Norm | None]] = [(stream, norm)]
    if beside is not None:
        sides.insert(0, (beside, layer.beside))
    return ops.joined_linear(sides, *layer.qkv), stream
