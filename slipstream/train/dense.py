"""Ops for training: a backend in plain torch that can be differentiated.

Training uses the networks that serve. Where the engine gives them ragged rows and paged caches,
training gives them whole sequences of one length (`DenseRows`) and a `LayerContext` for each layer.
The networks pass both on to the ops of this backend.
"""

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.core.errors import UsageError
from slipstream.kernels.adapters import Adapted
from slipstream.kernels.attention import split_heads
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.pass_inputs import CAUSAL, PassInputs, RowPlaces, Visibility
from slipstream.kernels.reference import ReferenceOps
from slipstream.kernels.reference.attention import rotate
from slipstream.kernels.reference.dense import add_norm
from slipstream.kernels.reference.experts import experts
from slipstream.kernels.table import ExpertsParts, Heads, Norm

KeysValues = tuple[Tensor, Tensor]

THE_ADAPTER = 0
"""The slot of a target's adapter, which has one at most."""


@dataclass(frozen=True, eq=False)
class DenseRows:
    """`PassInputs` of training: the rows of B sequences of Q rows each, without pages.

    Attributes:
        rows: the rows, one sequence after the other.
        mask: [Q, C + Q] bool, true where a row attends to one of the C stored rows (`LayerContext`)
            or of the Q rows of the pass; None: causal attention.
        sees: set by networks, and not used in training, where `mask` decides.
        adapters: [B Q], `THE_ADAPTER` for all rows; None: no adapter.
        embedded: unused, since drafters are trained on texts without images.
    """

    rows: RowPlaces
    mask: Tensor | None = None
    sees: Visibility = CAUSAL
    adapters: Tensor | None = None
    embedded: None = None

    def within_window(self, window: int | None) -> "DenseRows":
        """These rows: there are no pages, and the attention op applies the window."""
        return self


@dataclass(eq=False)
class LayerContext:
    """The keys and values that one attention layer keeps between the passes over a batch.

    Attributes:
        is_chain: later passes continue earlier ones. Row i of a later pass attends to the rows that
            row i of the first pass attended to, to row i of each pass in between, and to itself
            (training-time test of EAGLE-3, Li et al. 2025, arXiv 2503.01840, section 3.2).
        passes: keys and values [B, heads, Q, D] of the passes of a chain so far.
        stored: keys and values [B, heads, C, D] of rows without queries.
    """

    is_chain: bool
    passes: list[KeysValues] = field(default_factory=list)
    stored: KeysValues | None = None


class DenseContext:
    """The inputs of a network's passes over one batch, except the activations.

    Args:
        batch: sequences B.
        num_layers: attention layers of the network.
        is_chain: see `LayerContext`.
        adapted: the network is a target whose adapter is applied to all rows.

    Attributes:
        caches: what the attention layers take as their caches.
    """

    def __init__(
        self, batch: int, num_layers: int, is_chain: bool = False, adapted: bool = False
    ) -> None:
        self._batch, self._adapted = batch, adapted
        self.caches = [LayerContext(is_chain) for _ in range(num_layers)]

    def rows(self, positions: Tensor, mask: Tensor | None = None) -> PassInputs:
        """`DenseRows`, typed as the inputs that networks take and hand to the ops.

        Args:
            positions: [Q], equal in all sequences.
            mask: see `DenseRows`.
        """
        starts = torch.arange(self._batch + 1, device=positions.device) * len(positions)
        rows = RowPlaces(starts, positions.repeat(self._batch), len(positions))
        adapters = torch.full_like(rows.positions, THE_ADAPTER) if self._adapted else None
        return cast(PassInputs, DenseRows(rows, mask, adapters=adapters))


def _linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Weights of the target may be quantised; trained weights are floating-point."""
    if weight.floats is None:
        return weight.linear(x, bias)
    return F.linear(x, weight.floats, bias)


def _add_low_rank(y: Tensor, x: Tensor, adapted: Adapted) -> Tensor:
    """See `Ops.add_low_rank`; all rows have one adapter."""
    factors, wide = adapted.factors, torch.promote_types(x.dtype, torch.float32)
    inner = x.to(wide) @ factors.down[THE_ADAPTER].to(wide).T
    widths = torch.tensor((0, *factors.ends)).diff().tolist()
    ups = torch.split(factors.up[THE_ADAPTER].to(wide), widths, 1)
    inners = torch.split(inner, factors.rank, 1)
    made = [own @ up for own, up in zip(inners, ups, strict=True)]
    return (y.to(wide) + torch.cat(made, 1)).to(y.dtype)


def _logits(x: Tensor, weight: Weight) -> Tensor:
    return _linear(x, weight, None).float()


def _experts(x: Tensor, parts: ExpertsParts) -> Tensor:
    """Runs without autocast, which would round the scores by which experts are chosen."""
    with torch.autocast(x.device.type, enabled=False):
        return experts(x.to(parts.norm.weight.dtype), parts)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps)


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    # A drafter's residual stream may begin with the target's embeddings, in their lower precision.
    return add_norm(x.to(weight.dtype), residual.to(weight.dtype), weight, eps)


def _rotated(x: Tensor, norm: Norm | None, heads: Heads, rows: DenseRows) -> Tensor:
    """Normed and rotated: [T, heads, D] -> [B, heads, Q, D]."""
    if norm is not None:
        x = _norm(x, norm.weight, norm.eps).to(x.dtype)
    cos, sin = heads.cos_sin[rows.rows.positions].unsqueeze(1).chunk(2, -1)
    return _by_sequence(rotate(x, cos, sin), rows)


def _by_sequence(x: Tensor, rows: DenseRows) -> Tensor:
    """[T, heads, D] -> [B, heads, Q, D]."""
    return x.view(len(rows.rows.query_start) - 1, -1, *x.shape[1:]).transpose(1, 2)


def _attend(qkv: Tensor, heads: Heads, inputs: object, cache: object) -> Tensor:
    """See `Ops.attend`; keys and values are kept only for the later passes of a chain."""
    assert isinstance(inputs, DenseRows)
    assert isinstance(cache, LayerContext)
    query, key, value = split_heads(qkv, heads)
    query_norm, key_norm = heads.norms or (None, None)
    query = _rotated(query, query_norm, heads, inputs)
    key, value = _rotated(key, key_norm, heads, inputs), _by_sequence(value, inputs)
    if cache.stored is not None:
        key = torch.cat((cache.stored[0], key), 2)
        value = torch.cat((cache.stored[1], value), 2)
    if cache.is_chain:
        cache.passes.append((key, value))
    mask = _with_window(inputs.mask, heads.window, query)
    if len(cache.passes) > 1:
        assert heads.sinks is None, "no layer that drafts in a chain has sinks"
        out = _continued(query, cache.passes, heads.scale, mask)
    else:
        out = _attention(query, key, value, heads, mask)
    return out.transpose(1, 2).reshape(len(qkv), -1)


def _store(kv: Tensor, heads: Heads, inputs: object, cache: object) -> None:
    """See `Ops.store`; later passes over the same context see these rows."""
    assert isinstance(inputs, DenseRows)
    assert isinstance(cache, LayerContext)
    shape = (len(kv), heads.num_kv_heads, heads.head_dim)
    key, value = (part.view(shape) for part in kv.chunk(2, -1))
    _, key_norm = heads.norms or (None, None)
    cache.stored = _rotated(key, key_norm, heads, inputs), _by_sequence(value, inputs)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, heads: Heads, mask: Tensor | None
) -> Tensor:
    """[B, Hq, Q, D] of one pass."""
    groups = heads.num_heads // heads.num_kv_heads
    if heads.softcap is not None:
        raise UsageError("targets whose scores are capped cannot be trained on; use another target")
    if heads.sinks is not None:
        mask = _with_sinks(mask, heads.sinks, query.shape[2], key)
        # The sink is one more key and value of zeros, whose score the mask adds.
        key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
    if mask is not None and groups > 1:
        # The kernels that accept a mask need one key head for each query head.
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
    row = torch.arange(query.shape[2], device=query.device)
    near = row.unsqueeze(1) - row < window
    return near & (row.unsqueeze(1) >= row) if mask is None else near & mask


def _with_sinks(mask: Tensor | None, sinks: Tensor, rows: int, key: Tensor) -> Tensor:
    """[Hq, rows, C + rows + 1], added to the scores; the last of each row is its head's sink."""
    if mask is None:
        mask = torch.ones(rows, key.shape[2], dtype=torch.bool, device=key.device).tril()
    addends = torch.zeros_like(mask, dtype=key.dtype).masked_fill(~mask, -torch.inf)
    last = sinks.to(key.dtype).view(-1, 1, 1).expand(-1, rows, 1)
    return torch.cat((addends.expand(len(sinks), -1, -1), last), -1)


def _continued(
    query: Tensor, passes: list[KeysValues], scale: float, mask: Tensor | None
) -> Tensor:
    """[B, Hq, Q, D] of a later pass of a chain; see `LayerContext.is_chain`."""
    batch, num_heads, rows, width = query.shape
    first_key, first_value = passes[0]
    kv_heads = first_key.shape[1]
    # Scale and convert where this needs no further copy of the scores [rows, rows].
    folded = query.reshape(batch, kv_heads, num_heads // kv_heads, rows, width) * scale
    if mask is None:
        mask = torch.ones(rows, rows, dtype=torch.bool, device=query.device).tril()
    scores = torch.matmul(folded, first_key.unsqueeze(2).transpose(-1, -2))
    scores = scores.masked_fill(~mask, float("-inf"))
    own = [(folded * key.unsqueeze(2)).sum(-1, keepdim=True) for key, _ in passes[1:]]
    weights = torch.softmax(torch.cat((scores, *own), -1), -1, dtype=torch.float32).to(query.dtype)
    # Split at once: the gradient of each slice would be a tensor as large as all weights.
    first, *rest = torch.split(weights, [rows, *[1] * len(own)], -1)
    out = torch.matmul(first, first_value.unsqueeze(2))
    for share, (_, value) in zip(rest, passes[1:], strict=True):
        out = out + share * value.unsqueeze(2)
    return out.reshape(batch, num_heads, rows, width)


def _unsupported(*_: object, **__: object) -> Tensor:
    raise AssertionError("targets with such layers are refused")


class DenseOps(ReferenceOps):
    """The backend."""

    backend = "dense"

    product = staticmethod(_linear)
    logits = staticmethod(_logits)
    rms_norm = staticmethod(_norm)
    add_rms_norm = staticmethod(_add_norm)
    mixture = staticmethod(_experts)
    latent_attention = staticmethod(_unsupported)
    delta_net = staticmethod(_unsupported)
    add_low_rank = staticmethod(_add_low_rank)
    attend = staticmethod(_attend)
    store = staticmethod(_store)


DENSE = DenseOps()
