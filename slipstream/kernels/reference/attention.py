"""Paged attention over ragged rows and latent attention, in plain torch.

See `kernels/attention.py` and `kernels/latent_attention.py`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.attention import FLOAT8_PAGES, INTEGER_PAGES, SCALE_BYTES
from slipstream.kernels.latent_attention import LatentHeads
from slipstream.kernels.pass_inputs import MOST_TREE_TOKENS, PassInputs, TreeInputs
from slipstream.kernels.reference.dense import norm

_LARGEST = {INTEGER_PAGES: 127.0, FLOAT8_PAGES: 448.0}  # for each dtype of 8-bit pages


def rotate_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    cos_sin: Tensor,
    inputs: PassInputs,
    cache: tuple[Tensor, Tensor],
) -> Tensor:
    if norms is not None:
        query_weight, key_weight, eps = norms
        query, key = norm(query, query_weight, eps), norm(key, key_weight, eps)
    cos, sin = cos_sin[inputs.rows.positions].unsqueeze(1).chunk(2, dim=-1)
    store(rotate(key, cos, sin), value, inputs.paging.slots, cache)
    return rotate(query, cos, sin)


def store(key: Tensor, value: Tensor, slots: Tensor, cache: tuple[Tensor, Tensor]) -> None:
    """Write rows [T, Hk, D] to their slots; rows with slot -1 are dropped."""
    for pages, rows in zip(cache, (key, value), strict=True):
        store_rows(_rounded(rows, pages.dtype) if pages.dtype in _LARGEST else rows, slots, pages)


def store_rows(rows: Tensor, slots: Tensor, pages: Tensor) -> None:
    """Write rows [T, ...] to their slots in pages [blocks, block_size, ...], which may have any
    strides; skip slot -1."""
    if bool((slots < 0).any()):
        written = slots >= 0
        slots, rows = slots[written], rows[written]
    places = slots // pages.shape[1], slots % pages.shape[1]
    # A view that is made here, since gradients may go through it.
    pages.view_as(pages).index_put_(places, rows.to(pages.dtype))


def _rounded(rows: Tensor, pages: torch.dtype) -> Tensor:
    """Quantise heads [T, Hk, D] to [T, Hk, D + SCALE_BYTES] in an 8-bit dtype of pages; the largest
    magnitude of a head becomes the largest of the dtype."""
    scales = rows.float().abs().amax(-1, keepdim=True) / _LARGEST[pages]
    numbers = rows.float() / torch.where(scales > 0, scales, 1.0)
    if pages == INTEGER_PAGES:
        return torch.cat((numbers.round().to(pages), scales.view(pages)), -1)
    stored = numbers.to(torch.float8_e4m3fn).view(pages)
    whole = torch.cat((stored.flatten(1), scales.view(pages).flatten(1)), -1)
    return whole.view(*rows.shape[:2], -1)


def _as_floats(stored: Tensor) -> Tensor:
    """Dequantise [Hk, tokens, D + SCALE_BYTES] to float32 [Hk, tokens, D]."""
    if stored.dtype == FLOAT8_PAGES:
        heads, tokens, _ = stored.shape
        whole = stored.transpose(0, 1).flatten(1)
        cut = whole.shape[1] - SCALE_BYTES * heads
        floats = whole[:, :cut].contiguous().view(torch.float8_e4m3fn).float()
        by = whole[:, cut:].contiguous().view(torch.float32).unsqueeze(-1)
        return (floats.view(tokens, heads, -1) * by).transpose(0, 1)
    numbers, scales = stored[..., :-SCALE_BYTES], stored[..., -SCALE_BYTES:]
    return numbers.float() * scales.contiguous().view(torch.float32)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, half-split layout (Su et al. 2021), in float32.

    Args:
        x: heads [..., D]; the first R numbers are rotated.
        cos, sin: [..., R/2].
    """
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
    return torch.cat((turned, x[..., 2 * half :]), -1) if 2 * half < x.shape[-1] else turned


def paged_attention(
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    inputs: PassInputs,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    out = torch.empty_like(query)
    paging, sees = inputs.paging, inputs.sees
    starts, lengths = inputs.rows.query_start.tolist(), paging.context_lens.tolist()
    for request, length in enumerate(lengths):
        rows = slice(starts[request], starts[request + 1])
        if rows.start == rows.stop:
            continue
        keys, values = (_gather(pages, paging.block_tables[request], length) for pages in cache)
        last_seen = None if sees.last_seen is None else sees.last_seen[rows]
        mask = _mask(inputs.rows.in_context[rows], length, window, sees.causal, last_seen)
        if sees.tree is not None:
            mask = _tree_mask(inputs, sees.tree, request, rows, length, window)
        if sees.first_seen:
            keys, values = keys[:, sees.first_seen :], values[:, sees.first_seen :]
            mask = None if mask is None else mask[:, sees.first_seen :]
        own = query[rows]
        if keys.dtype in _LARGEST:
            own, keys, values = own.float(), _as_floats(keys), _as_floats(values)
        if softcap is None:
            out[rows] = _attend(own, keys, values, mask, scale, sinks)
        else:
            assert sinks is None, "no layer has sinks and a softcap"
            out[rows] = capped_attention(own, keys, values, mask, scale, softcap)
    return out


def _gather(pages: Tensor, block_table: Tensor, length: int) -> Tensor:
    """One request's rows of a paged cache, [Hk, length, D]."""
    blocks = -(-length // pages.shape[1])
    rows = pages.index_select(0, block_table[:blocks])
    return rows.view(-1, *pages.shape[2:])[:length].transpose(0, 1)


def _mask(
    positions: Tensor,
    length: int,
    window: int | None,
    causal: bool,
    last_seen: Tensor | None = None,
) -> Tensor | None:
    """[rows, length], true where a row may attend; None if every row attends to everything."""
    if window is None and (not causal or positions.shape[0] == 1):
        return None  # a single row is the last token, or comes after it
    keys = torch.arange(length, device=positions.device)
    distance = positions.unsqueeze(1) - keys
    mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if last_seen is not None:
        mask |= keys <= last_seen.unsqueeze(1)
    return mask if window is None else mask & (distance < window)


def _tree_mask(
    inputs: PassInputs, tree: TreeInputs, request: int, rows: slice, length: int, window: int | None
) -> Tensor:
    """`_mask` for rows that are nodes of trees."""
    keys = torch.arange(length, device=tree.tokens.device)
    bits = keys - tree.starts[request]
    words = tree.ancestors[rows].unsqueeze(1) >> bits.clamp(0, MOST_TREE_TOKENS)
    mask = (keys <= tree.tokens[rows].unsqueeze(1)) & ((bits < 0) | (words & 1 > 0))
    if window is None:
        return mask
    return mask & (inputs.rows.in_context[rows].unsqueeze(1) - keys < window)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Query [rows, Hq, D] over keys and values [Hk, length, D].

    Query heads that share a key head become additional rows, so that keys are not repeated.
    """
    rows, heads, head_dim = query.shape
    kv_heads = keys.shape[0]
    groups = heads // kv_heads
    folded = (
        query.view(rows, kv_heads, groups, head_dim)
        .permute(1, 2, 0, 3)
        .reshape(kv_heads, groups * rows, head_dim)
    )
    if sinks is not None:
        # A sink is a key of zeros, whose score is the mask's addend, with a value of zeros.
        keys, values = F.pad(keys, (0, 0, 0, 1)), F.pad(values, (0, 0, 0, 1))
        mask = _mask_with_sinks(mask, sinks.view(kv_heads, groups), rows, keys.shape[1], query)
    elif mask is not None:
        mask = mask.repeat(groups, 1)
    out = F.scaled_dot_product_attention(
        folded.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), attn_mask=mask, scale=scale
    )
    return (
        out.view(kv_heads, groups, rows, head_dim)
        .permute(2, 0, 1, 3)
        .reshape(rows, heads, head_dim)
    )


def capped_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Like `_attend`, in float32; scores become softcap * tanh(score / softcap)."""
    groups = query.shape[1] // keys.shape[0]
    own_keys, own_values = (x.float().repeat_interleave(groups, 0) for x in (keys, values))
    scores = query.float().transpose(0, 1) @ own_keys.transpose(1, 2) * scale
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ own_values).transpose(0, 1).to(query.dtype)


def _mask_with_sinks(
    mask: Tensor | None, sinks: Tensor, rows: int, length: int, query: Tensor
) -> Tensor:
    """Addends of scores, [Hk, groups * rows, length]; the last of each row is its sink."""
    addends = query.new_zeros(*sinks.shape, rows, length)
    if mask is not None:
        addends[..., :-1].masked_fill_(~mask, float("-inf"))
    addends[..., -1] = sinks.unsqueeze(-1)
    return addends.flatten(1, 2)


def latent_attention(
    queries: Tensor, latents: Tensor, heads: LatentHeads, inputs: PassInputs, cache: Tensor
) -> Tensor:
    """See `Ops.latent_attention`. Intermediate results have the dtype of the queries."""
    positions = inputs.rows.positions
    cos, sin = heads.cos_sin[positions].chunk(2, dim=-1)
    normed = norm(latents[:, : heads.rank], heads.norm_weight, heads.eps)
    rotated = rotate_pairs(latents[:, heads.rank :], cos, sin)
    store_rows(torch.cat((normed, rotated), -1), inputs.paging.slots, cache)
    queries = queries.view(len(queries), heads.num_heads, -1)
    plain, turning = queries[..., : heads.plain_dim], queries[..., heads.plain_dim :]
    turned = rotate_pairs(turning, cos.unsqueeze(1), sin.unsqueeze(1))
    absorbed = torch.einsum("thn,hnr->thr", plain, heads.keys)
    query = torch.cat((absorbed, turned), -1)
    if heads.query_scales is not None:
        query = (query.float() * heads.query_scales[positions, None, None]).to(query.dtype)
    # All heads share one key of R + P numbers, whose first R are also the value.
    pages = cache.unsqueeze(2)
    mixed = paged_attention(query, (pages, pages), inputs, heads.scale, None)[..., : heads.rank]
    return torch.einsum("thr,hvr->thv", mixed, heads.values).flatten(1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding with interleaved pairs, in float32: x [..., P], cos and sin [..., P/2]."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
    return turned.flatten(-2).to(x.dtype)
