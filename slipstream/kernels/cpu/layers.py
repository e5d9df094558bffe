"""Whole decoder layers in one call of C++."""

from collections.abc import Sequence

import _slipstream_cpu as cpp
import torch
from torch import Tensor

from slipstream.kernels.cpu.attention import layer_of, pass_of, serves
from slipstream.kernels.cpu.matmul import CpuMatrix
from slipstream.kernels.table import AttentionInputs, LayerParts, LayersOp

Cache = tuple[Tensor, Tensor]


class FusedLayers:
    """Layers whose weights are all packed."""

    def __init__(self, layers: Sequence[LayerParts]) -> None:
        self._layers = cpp.Layers(layers[0].before_attention.weight.dtype == torch.bfloat16)
        for layer in layers:
            products = layer.products
            self._layers.add(
                layer.before_attention.weight,
                layer.before_attention.eps,
                layer_of(layer.heads),
                layer.before_mlp.weight,
                layer.before_mlp.eps,
                [weight.handle for weight, _ in products if isinstance(weight, CpuMatrix)],
                [bias for _, bias in products],
            )
        self._caches: Sequence[Cache] | None = None

    def __call__(
        self,
        x: Tensor,
        inputs: AttentionInputs,
        caches: Sequence[Cache],
        wanted: Sequence[int],
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        if caches is not self._caches:
            self._layers.set_caches(list(caches))
            self._caches = caches
        # What enters may be a view of who called: the layers write over it.
        addend = x.clone(memory_format=torch.contiguous_format)
        stream = torch.empty_like(addend)
        taken = [torch.empty_like(addend) for _ in wanted]
        self._layers.run(pass_of(inputs), addend, stream, list(wanted), taken)
        return addend, stream, taken


def fuse(layers: Sequence[LayerParts]) -> LayersOp | None:
    """One op of these layers; None where a weight is not packed, or a head odd."""
    weights = [weight for layer in layers for weight, _ in layer.products]
    if not layers or not all(isinstance(weight, CpuMatrix) for weight in weights):
        return None
    if not all(serves(layer.heads) for layer in layers):
        return None
    return FusedLayers(layers)
