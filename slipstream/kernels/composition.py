"""Composes the ops of `Ops` from smaller functions, for backends that do not fuse them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.adapters import Adapted
from slipstream.kernels.delta_net import DeltaNetOp
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.latent_attention import LatentAttentionOp
from slipstream.kernels.norm import Activation
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.table import (
    Addend,
    ExpertsParts,
    Heads,
    LogitsOp,
    Norm,
    Ops,
    PostNorm,
    PostNormAddend,
)

AddNorm = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
QueryKeyNorms = tuple[Tensor, Tensor, float]
RotateAndStore = Callable[
    [
        Tensor,
        Tensor,
        Tensor,
        QueryKeyNorms | None,
        Tensor,
        PassInputs,
        tuple[Tensor, Tensor],
    ],
    Tensor,
]


class PagedAttention(Protocol):
    def __call__(
        self,
        query: Tensor,
        cache: tuple[Tensor, Tensor],
        inputs: PassInputs,
        scale: float,
        window: int | None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor: ...


class GatedActivation(Protocol):
    def __call__(self, gate_up: Tensor, activation: Activation = Activation.SILU) -> Tensor: ...


@dataclass(frozen=True)
class Parts:
    """The functions from which a backend's ops are composed.

    Attributes:
        linear: x [T, K], weight [N, K], bias [N] or None -> [T, N] in the dtype of x.
        logits: x [T, K], weight [N, K] -> [T, N] float32.
        norm: RMS norm, computed in float32: x [..., H], weight [H] -> like x.
        add_norm: x, residual [T, H] -> (norm(x + residual), x + residual).
        activation: x [T, I] -> activation(x).
        gated_activation: gate_up [T, 2I], gate first -> activation(gate) * up, [T, I].
        experts: x [T, H], normed -> the weighted sum of each row's experts, [T, H].
        rotate_and_store: query [T, Hq, D], key and value [T, Hk, D] -> the rotated query; writes
            the rotated keys, and the values, to the cache.
        paged_attention: query [T, Hq, D], cache, inputs, scale, window, sinks, softcap
            -> [T, Hq, D].
        latent_attention, delta_net: see `Ops`.
        add_low_rank: y [T, N], x [T, K] -> y plus the adapters' products of x; may overwrite y.
    """

    linear: Callable[[Tensor, Weight, Tensor | None], Tensor]
    logits: LogitsOp
    norm: Callable[[Tensor, Tensor, float], Tensor]
    add_norm: AddNorm
    activation: Callable[[Tensor, Activation], Tensor]
    gated_activation: GatedActivation
    experts: Callable[[Tensor, ExpertsParts], Tensor]
    rotate_and_store: RotateAndStore
    paged_attention: PagedAttention
    latent_attention: LatentAttentionOp
    delta_net: DeltaNetOp
    add_low_rank: Callable[[Tensor, Tensor, Adapted], Tensor]


def compose(backend: str, parts: Parts) -> Ops:
    """Compose all ops of a backend from its parts."""
    own = parts
    added = partial(_added, parts)

    def linear(
        x: Tensor, weight: Weight, bias: Tensor | None, adapted: Adapted | None = None
    ) -> Tensor:
        y = parts.linear(x, weight, bias)
        return y if adapted is None else parts.add_low_rank(y, x, adapted)

    def norm_linear(
        addend: Addend,
        residual: Tensor | None,
        norm: Norm | None,
        weight: Weight,
        bias: Tensor | None,
        adapted: Adapted | None = None,
    ) -> tuple[Tensor, Tensor]:
        x, residual = added(addend, residual, norm)
        return linear(x, weight, bias, adapted), residual

    def norm_gated_linear(
        addend: Addend,
        residual: Tensor | None,
        norm: Norm | None,
        weight: Weight,
        bias: Tensor | None,
        activation: Activation = Activation.SILU,
        adapted: Adapted | None = None,
    ) -> tuple[Tensor, Tensor]:
        x, residual = added(addend, residual, norm)
        return parts.gated_activation(linear(x, weight, bias, adapted), activation), residual

    def experts(
        addend: Addend, residual: Tensor | None, parts: ExpertsParts
    ) -> tuple[Tensor, Tensor]:
        x, residual = added(addend, residual, parts.norm)
        return own.experts(x, parts), residual

    def add_norm(addend: Addend, residual: Tensor, norm: Norm) -> Tensor:
        return added(addend, residual, norm)[0]

    return Ops(
        backend=backend,
        linear=linear,
        norm_linear=norm_linear,
        norm_gated_linear=norm_gated_linear,
        experts=experts,
        add_norm=add_norm,
        norm=added,
        activate=parts.activation,
        joined_linear=partial(_joined_linear, parts),
        attend=partial(_attend, parts),
        store=partial(_store, parts),
        latent_attention=parts.latent_attention,
        delta_net=parts.delta_net,
        logits=parts.logits,
    )


def _joined_linear(
    smaller: Parts,
    parts: Sequence[tuple[Tensor, Norm | None]],
    weight: Weight,
    bias: Tensor | None,
    adapted: Adapted | None = None,
) -> Tensor:
    x = torch.cat([_normed(smaller, side, norm) for side, norm in parts], -1)
    y = smaller.linear(x, weight, bias)
    return y if adapted is None else smaller.add_low_rank(y, x, adapted)


def _added(
    parts: Parts, addend: Addend, residual: Tensor | None, norm: Norm | None
) -> tuple[Tensor, Tensor]:
    """See `NormOp`."""
    output, post_norm = addend, None
    if isinstance(addend, PostNormAddend):
        output, post_norm = addend.values, addend.post_norm
    assert isinstance(output, Tensor), "backends that sum addends have norms of their own"
    if post_norm is not None and post_norm.factor is None:
        output, post_norm = _normed(parts, output, post_norm.norm), None
    layer_norm = norm is not None and norm.bias is not None
    if post_norm is None and residual is not None and norm is not None and not layer_norm:
        return parts.add_norm(output, residual, norm.weight, norm.eps)
    total = _stream(parts, output, post_norm, residual)
    return _normed(parts, total, norm), total


def _stream(
    parts: Parts, output: Tensor, post_norm: PostNorm | None, residual: Tensor | None
) -> Tensor:
    if post_norm is None:
        return output if residual is None else output + residual
    assert residual is not None, "the first addend is the stream itself, without a post-norm"
    total = residual + _normed(parts, output, post_norm.norm)
    return total if post_norm.factor is None else total * post_norm.factor


def _normed(parts: Parts, x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    if norm.bias is not None:
        return F.layer_norm(x, norm.bias.shape, norm.weight, norm.bias, norm.eps)
    return parts.norm(x, norm.weight, norm.eps)


def _attend(
    parts: Parts, qkv: Tensor, heads: Heads, inputs: PassInputs, cache: tuple[Tensor, Tensor]
) -> Tensor:
    query, key, value = split_heads(qkv, heads)
    norms = query_key_norms(heads)
    query = parts.rotate_and_store(query, key, value, norms, heads.cos_sin, inputs, cache)
    out = parts.paged_attention(
        query, cache, inputs, heads.scale, heads.window, heads.sinks, heads.softcap
    )
    return gated(out.flatten(-2), qkv, heads)


def gated(out: Tensor, qkv: Tensor, heads: Heads) -> Tensor:
    """The output of attention [T, Hq D], multiplied by the sigmoid of its gates if it has some."""
    if not heads.gated:
        return out
    gates = qkv[:, -out.shape[1] :]
    return (out.float() * gates.float().sigmoid()).to(out.dtype)


def _store(
    parts: Parts, kv: Tensor, heads: Heads, inputs: PassInputs, cache: tuple[Tensor, Tensor]
) -> None:
    shape = (len(kv), heads.num_kv_heads, heads.head_dim)
    key, value = (part.view(shape) for part in kv.chunk(2, -1))
    no_query = key[:, :0]
    norms = query_key_norms(heads)
    parts.rotate_and_store(no_query, key, value, norms, heads.cos_sin, inputs, cache)


def split_heads(qkv: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Views: queries [T, Hq, D], keys and values [T, Hk, D]; omits gates, which follow them."""
    sizes = [count * heads.head_dim for count in (heads.num_heads, *[heads.num_kv_heads] * 2)]
    query, key, value = (
        part.view(len(qkv), -1, heads.head_dim)
        for part in torch.split(qkv[:, : sum(sizes)], sizes, -1)
    )
    return query, key, value


def query_key_norms(heads: Heads) -> QueryKeyNorms | None:
    """(query weight, key weight, eps), as `Parts.rotate_and_store` takes them."""
    if heads.norms is None:
        return None
    query, key = heads.norms
    return query.weight, key.weight, query.eps
