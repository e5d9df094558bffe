"""Runs consecutive decoder layers in one call of C++."""

from collections.abc import Sequence

import _slipstream_cpu as cpp
import torch
from torch import Tensor

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
from slipstream.kernels.cpu.rows import low_rank_of
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
    LayerParts,
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
            for sublayer, post_norm in layer.sublayers:
                _add(self._stack, sublayer)
                if post_norm is not None:
                    factor = None if post_norm.factor is None else float(post_norm.factor)
                    self._stack.set_post_norm(_norm(post_norm.norm), factor)
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


def _add(stack: cpp.Stack, sublayer: object) -> None:
    """Add one sublayer; see "A layer kind" in docs/architecture.md for a new one."""
    match sublayer:
        case AttentionParts():
            stack.add_attention(
                _norm(sublayer.norm),
                _norm(sublayer.second_norm),
                sublayer.keeps_normed,
                layer_of(sublayer.heads),
                _product(sublayer.qkv),
                _product(sublayer.output),
                sublayer.value_norm is not None,
                sublayer.reads_only,
            )
            _adapt(stack, sublayer.adapters)
        case DeltaNetParts():
            stack.add_delta_net(
                _norm(sublayer.norm),
                delta_layer_of(sublayer.heads),
                _product(sublayer.inputs),
                None if sublayer.gates is None else _product(sublayer.gates),
                _product(sublayer.output),
            )
        case LatentParts():
            stack.add_latent(
                _norm(sublayer.norm),
                latent_layer_of(sublayer.heads),
                _product(sublayer.first),
                _norm(sublayer.query_norm),
                None if sublayer.queries is None else _product(sublayer.queries),
                _product(sublayer.output),
            )
        case GatedMLPParts():
            products = _product(sublayer.gate_up), _product(sublayer.down)
            stack.add_gated_mlp(_norm(sublayer.norm), *products, sublayer.activation.value)
            _adapt(stack, sublayer.adapters)
        case ExpertsParts():
            stack.add_experts(_norm(sublayer.norm), mixture_of(sublayer))
        case _:
            raise AssertionError(f"{type(sublayer).__name__} is not fused")


def _adapt(stack: cpp.Stack, adapters: Adapters) -> None:
    stack.set_adapters(*(None if it is None else low_rank_of(it) for it in adapters))


def _runs(sublayer: object, begins: bool) -> bool:
    """Whether C++ can run this sublayer.

    Args:
        begins: whether it is the first sublayer of the stack.
    """
    match sublayer:
        case AttentionParts():
            fits = serves(sublayer.heads) and (begins or not sublayer.needs_sources)
            fits = fits and sublayer.joint_norms is None and sublayer.query_scales is None
            fits = fits and (sublayer.heads.norms is not None or sublayer.feeds_attention)
        case DeltaNetParts():
            fits = True
        case LatentParts():
            fits = serves_latent(sublayer.heads)
        case GatedMLPParts():
            fits = True
        case ExpertsParts():
            return serves_experts(sublayer)
        case _:
            return False
    return fits and all(handle_of(weight) is not None for weight, _ in sublayer.products)


def _any_norm(parts: StackParts, num_layers: int) -> Norm | None:
    """A norm of the stream, from these layers or after the last one."""
    sublayers = [pair for layer in parts.layers[:num_layers] for pair in layer.sublayers]
    kinds = AttentionParts | DeltaNetParts | LatentParts | GatedMLPParts | ExpertsParts
    norms = [it.norm for it, _ in sublayers if isinstance(it, kinds)]
    norms += [post_norm.norm for _, post_norm in sublayers if post_norm is not None]
    norms += [parts.last] if num_layers == len(parts.layers) else []
    return next((norm for norm in norms if norm is not None), None)


def _are_rms(*norms: object) -> bool:
    """Whether none of these is a layer norm, which a stack in C++ does not have."""
    return all(not isinstance(norm, Norm) or norm.bias is None for norm in norms)


def _norm(norm: Norm | None) -> tuple[Tensor, float] | None:
    return None if norm is None else (norm.weight, norm.eps)


def _product(product: Product) -> tuple[object, Tensor | None]:
    weight, bias = product
    return handle_of(weight), bias


def fuse(parts: StackParts) -> FusedOp | None:
    """Fuse as many of the first layers as possible; None if there are none."""
    entry = parts.entry
    if entry is not None and (handle_of(entry.product[0]) is None or not _are_rms(*entry.norms)):
        return None
    count, begins = 0, True
    # The last layer takes the norm after it along.
    for layer in parts.layers if _are_rms(parts.last) else parts.layers[:-1]:
        if not _runs_layer(layer, begins):
            break
        count, begins = count + 1, False
    # A norm has the width of the stream and its dtype.
    return None if _any_norm(parts, count) is None else FusedStack(parts, count)


def _runs_layer(layer: LayerParts, begins: bool) -> bool:
    """Whether C++ can run this layer, which may be the first of the stack."""
    sublayers = [sublayer for sublayer, _ in layer.sublayers]
    post_norms = [post_norm.norm for _, post_norm in layer.sublayers if post_norm is not None]
    return (
        all(_runs(it, begins and it is sublayers[0]) for it in sublayers)
        and all(_are_rms(*vars(it).values()) for it in sublayers)
        and _are_rms(*post_norms)
    )
