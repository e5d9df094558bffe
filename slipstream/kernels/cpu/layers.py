"""Runs consecutive decoder layers in one call of C++."""

from collections.abc import Sequence

import _slipstream_cpu as cpp
import torch
from torch import Tensor

from slipstream.kernels.cpu.adapters import low_rank_of
from slipstream.kernels.cpu.attention import (
    as_pages,
    delta_layer_of,
    latent_layer_of,
    layer_of,
    pass_of,
    serves,
    serves_latent,
    tensors_of,
)
from slipstream.kernels.cpu.experts import mixture_of
from slipstream.kernels.cpu.experts import serves as serves_experts
from slipstream.kernels.cpu.matmul import handle_of
from slipstream.kernels.delta_net import DeltaCache
from slipstream.kernels.devices import part_labels
from slipstream.kernels.pass_inputs import PassInputs, at_rows
from slipstream.kernels.table import (
    Adapters,
    AttentionParts,
    DeltaNetParts,
    ExpertsParts,
    FusedOp,
    GatedMLPParts,
    LatentParts,
    Norm,
    Product,
    StackParts,
)

Cache = tuple[Tensor, Tensor] | Tensor | DeltaCache  # a tensor holds latent rows


class FusedStack:
    """The first layers of a stack, as many as C++ can run: their kinds exist there, and their
    weights are packed.

    Args:
        num_layers: at least one.
    """

    def __init__(self, parts: StackParts, num_layers: int) -> None:
        self.num_layers = num_layers
        layers, norm = parts.layers[:num_layers], _any_norm(parts, num_layers)
        assert norm is not None, "a stack has a norm"
        self._width, self._dtype = len(norm.weight), norm.weight.dtype
        self._stack = cpp.Stack(norm.weight.dtype == torch.bfloat16)
        if parts.entry is not None:
            norms = [_norm(norm) for norm in parts.entry.norms]
            self._stack.set_entry(norms, *_product(parts.entry.product))
        for layer in layers:
            self._stack.add_layer()
            for half, post_norm in layer.halves:
                _add(self._stack, half)
                if post_norm is not None:
                    factor = None if post_norm.factor is None else float(post_norm.factor)
                    self._stack.set_behind(_norm(post_norm.norm), factor)
        if parts.last is not None and num_layers == len(parts.layers):
            self._stack.set_last(_norm(parts.last))
        self._caches: Sequence[Cache] | None = None

    def __call__(
        self,
        sources: Sequence[Tensor],
        inputs: PassInputs,
        caches: Sequence[Cache],
        wanted: Sequence[int],
        read: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        if caches is not self._caches:
            self._take_caches(caches)
        shape = (sources[0].shape[0], self._width)
        hidden = torch.empty(shape if read is None else (len(read), shape[1]), dtype=self._dtype)
        taken = [torch.empty(shape, dtype=self._dtype) for _ in wanted]
        rows = [source if source.stride(1) == 1 else source.contiguous() for source in sources]
        self._stack.run(pass_of(inputs), rows, hidden, wanted, taken, read, part_labels())
        return hidden if read is None else at_rows(hidden, read, shape[0]), taken

    def _take_caches(self, caches: Sequence[Cache]) -> None:
        known = self._caches
        same = (
            known is not None
            and len(caches) == len(known)
            and all(one is two for one, two in zip(caches, known, strict=True))
        )
        if not same:
            self._stack.set_caches([_tensors(cache) for cache in caches])
        self._caches = caches


def _tensors(cache: Cache) -> tuple[Tensor, ...]:
    if isinstance(cache, Tensor):
        return (as_pages(cache),) * 2  # keys and values
    return tensors_of(cache) if isinstance(cache, DeltaCache) else cache


def _add(stack: cpp.Stack, half: object) -> None:
    """Add one half of a layer; see "A layer kind" in docs/architecture.md for a new one."""
    match half:
        case AttentionParts():
            stack.add_attention(
                _norm(half.norm),
                _norm(half.second_norm),
                half.keeps_normed,
                layer_of(half.heads),
                _product(half.qkv),
                _product(half.output),
                half.value_norm is not None,
                half.reads_only,
            )
            _adapt(stack, half.adapters)
        case DeltaNetParts():
            stack.add_delta_net(
                _norm(half.norm),
                delta_layer_of(half.heads),
                _product(half.inputs),
                None if half.gates is None else _product(half.gates),
                _product(half.output),
            )
        case LatentParts():
            stack.add_latent(
                _norm(half.norm),
                latent_layer_of(half.heads),
                _product(half.first),
                _norm(half.query_norm),
                None if half.queries is None else _product(half.queries),
                _product(half.output),
            )
        case GatedMLPParts():
            products = _product(half.gate_up), _product(half.down)
            stack.add_gated_mlp(_norm(half.norm), *products, half.activation.value)
            _adapt(stack, half.adapters)
        case ExpertsParts():
            stack.add_experts(_norm(half.norm), mixture_of(half))
        case _:
            raise AssertionError(f"{type(half).__name__} is not fused")


def _adapt(stack: cpp.Stack, adapters: Adapters) -> None:
    stack.set_adapters(*(None if it is None else low_rank_of(it) for it in adapters))


def _runs(half: object, begins: bool) -> bool:
    """Whether C++ can run this half.

    Args:
        begins: whether it is the first half of the stack.
    """
    match half:
        case AttentionParts():
            fits = serves(half.heads) and (begins or not half.needs_sources)
            fits = fits and half.joint_norms is None and half.query_scales is None
            fits = fits and (half.heads.norms is not None or half.feeds_attention)
            fits = fits and (half.norm is None or half.norm.bias is None)
        case DeltaNetParts():
            fits = True
        case LatentParts():
            fits = serves_latent(half.heads)
        case GatedMLPParts():
            fits = True
        case ExpertsParts():
            return serves_experts(half)
        case _:
            return False
    return fits and all(handle_of(weight) is not None for weight, _ in half.products)


def _any_norm(parts: StackParts, num_layers: int) -> Norm | None:
    """A norm of the stream, from these layers or after the last one."""
    halves = [pair for layer in parts.layers[:num_layers] for pair in layer.halves]
    kinds = AttentionParts | DeltaNetParts | LatentParts | GatedMLPParts | ExpertsParts
    norms = [half.norm for half, _ in halves if isinstance(half, kinds)]
    norms += [post_norm.norm for _, post_norm in halves if post_norm is not None]
    norms += [parts.last] if num_layers == len(parts.layers) else []
    return next((norm for norm in norms if norm is not None), None)


def _norm(norm: Norm | None) -> tuple[Tensor, float] | None:
    assert norm is None or norm.bias is None, "there are no layer norms in C++"
    return None if norm is None else (norm.weight, norm.eps)


def _product(product: Product) -> tuple[object, Tensor | None]:
    weight, bias = product
    return handle_of(weight), bias


def fuse(parts: StackParts) -> FusedOp | None:
    """Fuse as many of the first layers as possible; None if there are none."""
    if parts.entry is not None and handle_of(parts.entry.product[0]) is None:
        return None
    count, begins = 0, True
    for layer in parts.layers:
        halves = [half for half, _ in layer.halves]
        if not all(_runs(half, begins and half is halves[0]) for half in halves):
            break
        count, begins = count + 1, False
    # A norm has the width of the stream and its dtype.
    return None if _any_norm(parts, count) is None else FusedStack(parts, count)
