"""Whole stacks of decoder layers in one call of C++."""

from collections.abc import Sequence

import _slipstream_cpu as cpp
import torch
from torch import Tensor

from slipstream.kernels.cpu.attention import layer_of, pass_of, serves
from slipstream.kernels.cpu.matmul import handle_of
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.stack_parts import LayerParts, Product, StackOp, StackParts
from slipstream.kernels.table import Norm

Cache = tuple[Tensor, Tensor]


class FusedStack:
    """A stack whose weights are all packed."""

    def __init__(self, parts: StackParts) -> None:
        norm = parts.layers[0].before_mlp.weight
        self._width, self._dtype = len(norm), norm.dtype
        self._stack = cpp.Stack(norm.dtype == torch.bfloat16)
        if parts.entry is not None:
            norms = [_norm(norm) for norm in parts.entry_norms]
            self._stack.set_entry(norms, *_product(parts.entry))
        for layer in parts.layers:
            self._add(layer)
        if parts.last is not None:
            self._stack.set_last(_norm(parts.last))
        self._caches: Sequence[Cache] = ()

    def __call__(
        self,
        sources: Sequence[Tensor],
        inputs: PassInputs,
        caches: Sequence[Cache],
        wanted: Sequence[int],
    ) -> tuple[Tensor, list[Tensor]]:
        if caches is not self._caches:
            self._take_caches(caches)
        shape = (sources[0].shape[0], self._width)
        hidden = torch.empty(shape, dtype=self._dtype)
        taken = [torch.empty(shape, dtype=self._dtype) for _ in wanted]
        rows = [source if source.stride(1) == 1 else source.contiguous() for source in sources]
        self._stack.run(pass_of(inputs), rows, hidden, wanted, taken)
        return hidden, taken

    def _add(self, layer: LayerParts) -> None:
        products = [_product(product) for product in layer.products]
        self._stack.add(
            _norm(layer.before_attention),
            _norm(layer.beside),
            layer.keeps_normed,
            layer_of(layer.heads),
            _norm(layer.before_mlp),
            [weight for weight, _ in products],
            [bias for _, bias in products],
        )

    def _take_caches(self, caches: Sequence[Cache]) -> None:
        same = len(caches) == len(self._caches) and all(
            one is two for one, two in zip(caches, self._caches, strict=True)
        )
        if not same:
            self._stack.set_caches(list(caches))
        self._caches = caches


def _norm(norm: Norm | None) -> tuple[Tensor, float] | None:
    return None if norm is None else (norm.weight, norm.eps)


def _product(product: Product) -> tuple[object, Tensor | None]:
    weight, bias = product
    return handle_of(weight), bias


def fuse(parts: StackParts) -> StackOp | None:
    """One op of a whole stack; None where a weight is not packed, or a head odd."""
    products = [product for layer in parts.layers for product in layer.products]
    if parts.entry is not None:
        products.append(parts.entry)
    if any(handle_of(weight) is None for weight, _ in products):
        return None
    if not all(serves(layer.heads) for layer in parts.layers):
        return None
    return FusedStack(parts)
