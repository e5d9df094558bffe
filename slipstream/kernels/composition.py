"""Network ops from their smallest parts, for backends that do not fuse them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.kernels.table import ExpertsParts, Heads, LinearOp, LogitsOp, Norm, Ops

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
    """See `Parts`."""

    def __call__(
        self,
        query: Tensor,
        cache: tuple[Tensor, Tensor],
        inputs: PassInputs,
        scale: float,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Parts:
    """What the ops of a backend are made of.

    Attributes:
        linear: x [T, K], weight [N, K], bias [N] or None -> [T, N] in the dtype of x.
        logits: the same in float32, without bias.
        norm: RMS norm, computed in float32: x [..., H], weight [H] -> like x.
        add_norm: x, residual [T, H] -> (norm(x + residual), x + residual).
        gated_activation: gate_up [T, 2I], gate first -> silu(gate) * up, [T, I].
        experts: x [T, H], normed -> the sum over each row's experts, [T, H].
        rotate_and_store: query [T, Hq, D], key and value [T, Hk, D] -> the rotated query; keys and
            values are stored.
        paged_attention: query [T, Hq, D] over the cache, scale, window, sinks -> [T, Hq, D].
    """

    linear: LinearOp
    logits: LogitsOp
    norm: Callable[[Tensor, Tensor, float], Tensor]
    add_norm: AddNorm
    gated_activation: Callable[[Tensor], Tensor]
    experts: Callable[[Tensor, ExpertsParts], Tensor]
    rotate_and_store: RotateAndStore
    paged_attention: PagedAttention


def compose(backend: str, parts: Parts) -> Ops:
    """Every op as a chain of parts."""
    smaller = parts

    def added(addend: Tensor, residual: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        if residual is None:
            return parts.norm(addend, norm.weight, norm.eps), addend
        return parts.add_norm(addend, residual, norm.weight, norm.eps)

    def norm_linear(
        addend: Tensor, residual: Tensor | None, norm: Norm, weight: Weight, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        normed, residual = added(addend, residual, norm)
        return parts.linear(normed, weight, bias), residual

    def norm_gated_linear(
        addend: Tensor, residual: Tensor | None, norm: Norm, weight: Weight, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        normed, residual = added(addend, residual, norm)
        return parts.gated_activation(parts.linear(normed, weight, bias)), residual

    def experts(
        addend: Tensor, residual: Tensor | None, parts: ExpertsParts
    ) -> tuple[Tensor, Tensor]:
        normed, residual = added(addend, residual, parts.norm)
        return smaller.experts(normed, parts), residual

    def add_norm(addend: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        return added(addend, residual, norm)[0]

    def joined_linear(
        parts: Sequence[tuple[Tensor, Norm | None]], weight: Weight, bias: Tensor | None
    ) -> Tensor:
        normed = [
            x if norm is None else smaller.norm(x, norm.weight, norm.eps) for x, norm in parts
        ]
        return smaller.linear(torch.cat(normed, -1), weight, bias)

    def attend(
        qkv: Tensor, heads: Heads, inputs: PassInputs, cache: tuple[Tensor, Tensor]
    ) -> Tensor:
        query, key, value = split_heads(qkv, heads)
        norms = query_key_norms(heads)
        query = parts.rotate_and_store(query, key, value, norms, heads.cos_sin, inputs, cache)
        out = parts.paged_attention(query, cache, inputs, heads.scale, heads.window, heads.sinks)
        return out.flatten(-2)

    return Ops(
        backend=backend,
        linear=parts.linear,
        norm_linear=norm_linear,
        norm_gated_linear=norm_gated_linear,
        experts=experts,
        add_norm=add_norm,
        norm=added,
        joined_linear=joined_linear,
        attend=attend,
        store=partial(_store, parts),
        logits=parts.logits,
    )


def _store(
    parts: Parts, kv: Tensor, heads: Heads, inputs: PassInputs, cache: tuple[Tensor, Tensor]
) -> None:
    shape = (len(kv), heads.num_kv_heads, heads.head_dim)
    key, value = (part.view(shape) for part in kv.chunk(2, -1))
    nobody = key[:, :0]
    norms = query_key_norms(heads)
    parts.rotate_and_store(nobody, key, value, norms, heads.cos_sin, inputs, cache)


def split_heads(qkv: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Views: queries [T, Hq, D], keys and values [T, Hk, D]."""
    sizes = [count * heads.head_dim for count in (heads.num_heads, *[heads.num_kv_heads] * 2)]
    query, key, value = (
        part.view(len(qkv), -1, heads.head_dim) for part in torch.split(qkv, sizes, -1)
    )
    return query, key, value


def query_key_norms(heads: Heads) -> QueryKeyNorms | None:
    """(query weight, key weight, eps), as the smaller parts take them."""
    if heads.norms is None:
        return None
    of_query, of_key = heads.norms
    return of_query.weight, of_key.weight, of_query.eps
