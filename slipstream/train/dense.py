"""The column of ops that networks train with: plain torch that can be differentiated.

The networks of `models/` are the same in training and in serving; only their ops differ. Where the
engine gives them rows over a paged cache, training gives them whole sequences (`DenseRows`), all of
one length, one behind the other.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.composition import (
    Parts,
    QueryKeyNorms,
    compose,
    query_key_norms,
    split_heads,
)
from slipstream.kernels.pass_inputs import Paging, PassInputs, RowPlaces
from slipstream.kernels.reference.dense import add_norm, gated_activation
from slipstream.kernels.table import Heads, Ops, Weight
from slipstream.layers.stack import LayerCache


class ChainKeys:
    """Keys and values of the passes of a chain, per attention layer.

    Pass 0 reads the sequences. Row i of pass s continues row i of pass s - 1: it sees what that row
    saw, and itself. So of the later passes a row sees row i alone (EAGLE-3's training-time test,
    Li et al. 2025, arXiv 2503.01840, section 3.2).
    """

    def __init__(self) -> None:
        self.passes: dict[Heads, list[tuple[Tensor, Tensor]]] = {}

    def add(self, heads: Heads, key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The passes so far, this one included, of one layer."""
        passes = self.passes.setdefault(heads, [])
        passes.append((key, value))
        return passes


@dataclass(frozen=True, kw_only=True)
class DenseRows(PassInputs):
    """The rows of a training pass: `batch` sequences of as many rows each.

    Attributes:
        batch: B; rows are numbered sequence by sequence, T = B * Q.
        mask: [Q, Q] or [B, 1, Q, Q] bool, true where a row (first) sees a row; None: those before
            it and itself.
        chain: remembers the passes of a chain; None: this pass stands alone.
        context: keys and values [B, heads, C, D] of rows that have no queries, by the cache that
            their layer was given; a mask then has C columns more, which come first.
    """

    batch: int
    mask: Tensor | None = None
    chain: ChainKeys | None = field(default=None, compare=False)
    context: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False)


def dense_rows(
    batch: int,
    positions: Tensor,
    mask: Tensor | None = None,
    chain: ChainKeys | None = None,
) -> DenseRows:
    """Rows of `batch` sequences.

    Args:
        positions: [Q], of the rows of every sequence, or [B, Q].
    """
    if positions.dim() == 1:
        positions = positions.expand(batch, -1)
    none = positions.new_empty(0)
    return DenseRows(
        rows=RowPlaces(none, positions.reshape(-1)),
        paging=Paging(none, none, none),
        batch=batch,
        mask=mask,
        chain=chain,
    )


def no_caches(count: int) -> list[LayerCache]:
    """What layers get in place of a cache; each its own, so that they can be told apart."""
    return [(torch.empty(0), torch.empty(0)) for _ in range(count)]


def _linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    assert isinstance(weight, Tensor), "training keeps its weights unrounded"
    return F.linear(x, weight, bias)


def _logits(x: Tensor, weight: Weight) -> Tensor:
    return _linear(x, weight, None).float()


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps)


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return add_norm(x.to(residual.dtype), residual, weight, eps)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the half-split layout, in float32; x [T, heads, D]."""
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def _attend(qkv: Tensor, heads: Heads, inputs: PassInputs, cache: LayerCache) -> Tensor:
    """See `AttendOp`; keys and values go nowhere but into the chain."""
    assert isinstance(inputs, DenseRows)
    query, key, value = split_heads(qkv, heads)
    norms = query_key_norms(heads)
    if norms is not None:
        query, key = (
            _norm(x, weight, norms[2]).to(qkv.dtype)
            for x, weight in ((query, norms[0]), (key, norms[1]))
        )
    cos, sin = heads.cos_sin[inputs.rows.positions].unsqueeze(1).chunk(2, -1)
    query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
    # [B, heads, Q, D]
    query, key, value = (
        x.view(inputs.batch, -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value)
    )
    if id(cache[0]) in inputs.context:
        before_key, before_value = inputs.context[id(cache[0])]
        key, value = torch.cat((before_key, key), 2), torch.cat((before_value, value), 2)
    out = _mixed(query, key, value, heads, inputs)
    return out.transpose(1, 2).reshape(len(qkv), -1)


def _mixed(query: Tensor, key: Tensor, value: Tensor, heads: Heads, rows: DenseRows) -> Tensor:
    """Attention [B, Hq, Q, D]."""
    mask = _with_window(rows.mask, heads.window, query)
    passes = [(key, value)] if rows.chain is None else rows.chain.add(heads, key, value)
    if len(passes) > 1:
        return _continued(query, passes, heads.scale, mask)
    groups = heads.num_heads // heads.num_kv_heads
    if mask is not None and groups > 1:
        # The kernels that take a mask want a key head for each query head.
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        groups = 1
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=heads.scale,
        enable_gqa=groups > 1,
    )


def _with_window(mask: Tensor | None, window: int | None, query: Tensor) -> Tensor | None:
    if window is None:
        return mask
    place = torch.arange(query.shape[2], device=query.device)
    near = place.unsqueeze(1) - place < window
    return near & (place.unsqueeze(1) >= place) if mask is None else near & mask


def _continued(
    query: Tensor, passes: list[tuple[Tensor, Tensor]], scale: float, mask: Tensor | None
) -> Tensor:
    """Row i of a later pass: what row i of the first pass saw, then row i of every later one."""
    batch, num_heads, rows, width = query.shape
    first_key, first_value = passes[0]
    kv_heads = first_key.shape[1]
    folded = query.reshape(batch, kv_heads, num_heads // kv_heads, rows, width)
    if mask is None:
        mask = torch.ones(rows, rows, dtype=torch.bool, device=query.device).tril()
    scores = torch.matmul(folded, first_key.unsqueeze(2).transpose(-1, -2))
    scores = scores.masked_fill(~mask, float("-inf"))
    own = [(folded * key.unsqueeze(2)).sum(-1, keepdim=True) for key, _ in passes[1:]]
    weights = torch.softmax(torch.cat((scores, *own), -1).float() * scale, -1).to(query.dtype)
    out = torch.matmul(weights[..., :rows], first_value.unsqueeze(2))
    for index, (_, value) in enumerate(passes[1:]):
        out = out + weights[..., rows + index, None] * value.unsqueeze(2)
    return out.reshape(batch, num_heads, rows, width)


def _remember(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    norms: QueryKeyNorms | None,
    cos_sin: Tensor,
    inputs: PassInputs,
    cache: LayerCache,
) -> Tensor:
    """Keys and values of rows without queries become the context of whoever has this cache."""
    assert isinstance(inputs, DenseRows)
    if norms is not None:
        key = _norm(key, norms[1], norms[2]).to(value.dtype)
    cos, sin = cos_sin[inputs.rows.positions].unsqueeze(1).chunk(2, -1)
    key, value = (
        x.view(inputs.batch, -1, *x.shape[1:]).transpose(1, 2)
        for x in (_rotated(key, cos, sin), value)
    )
    inputs.context[id(cache[0])] = key, value
    return query


def _unused(*_: object) -> Tensor:
    raise AssertionError("training attends through `_attend`")


DENSE: Ops = replace(
    compose(
        "dense",
        Parts(
            linear=_linear,
            logits=_logits,
            norm=_norm,
            add_norm=_add_norm,
            gated_activation=gated_activation,
            rotate_and_store=_remember,
            paged_attention=_unused,
        ),
    ),
    attend=_attend,
)
"""The column."""
