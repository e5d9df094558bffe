"""The attention kernel for requests of many rows (prompt chunks); `attention.py` launches it."""

import triton
import triton.language as tl

from slipstream.kernels.triton.attention_parts import (
    LOG2_E,
    capped,
    columns,
    entries_of,
    finite,
    hidden,
    places_of,
    queries,
    scales_at,
    sight,
    tokens_at,
)
from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs


@triton.jit
def _fold(
    query, largest, total, mixed, begin, end, row_begins, row_ends, row, rows, ancestors,
    tree_start, keys, values, key_scales, value_scales, table, scale, softcap, window,
    first_seen: tl.constexpr, place_stride: tl.constexpr, block_size: tl.constexpr,
    head_dim: tl.constexpr, block_n: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Online softmax (Milakov and Gimelshein 2018) over the cached tokens [begin, end).

    Returns (largest score, sum of weights, sum of weighted values [block_m, block_d]). If `masked`
    is false, every row must see all of [begin, end), which must be a whole number of tiles.
    """
    entries = entries_of(table, begin, end, block_size, block_n)
    for start in range(begin, end, block_n):
        token = start + tl.arange(0, block_n)
        places = places_of(entries, start, place_stride, block_size, block_n)
        key = tokens_at(keys, places, token < end, head_dim, query.shape[1], masked)
        value = tokens_at(values, places, token < end, head_dim, query.shape[1], masked)
        entries = entries_of(table, start + block_n, end, block_size, block_n)
        if value_scales is not None:
            by = scales_at(value_scales, places, token < end)
            value = (value.to(tl.float32) * by[:, None]).to(query.dtype)
        score = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
        if key_scales is not None:
            score *= scales_at(key_scales, places, token < end)[None, :]
        score, factor = capped(score, scale, softcap)
        if masked:
            score = hidden(
                score,
                token,
                row_begins,
                row_ends,
                row,
                rows,
                ancestors,
                tree_start,
                window,
                first_seen,
            )
        highest = tl.maximum(largest, tl.max(score, axis=1) * factor)
        base = finite(highest) if masked else highest
        negative = tl.zeros_like(score) - base[:, None]
        weight = tl.exp2(tl.fma(score, tl.zeros_like(score) + factor, negative))
        kept = tl.exp2(largest - base)
        total = total * kept + tl.sum(weight, axis=1)
        mixed = tl.dot(weight.to(value.dtype), value, mixed * kept[:, None], input_precision="ieee")
        largest = highest
    return largest, total, mixed


@triton.jit
def tile_of_program(query_start, requests, short_rows, groups, block_m, block_r: tl.constexpr):
    """(request, tile of the request) that this program computes; request -1: none.

    Only requests with more than `short_rows` rows have tiles. Programs go through the requests and
    their tiles in reverse order.
    """
    number = tl.arange(0, block_r)
    inside = number < requests
    starts = tl.load(query_start + number, mask=inside, other=0).to(tl.int32)
    rows = tl.load(query_start + number + 1, mask=inside, other=0).to(tl.int32) - starts
    tiles = tl.where(rows > short_rows, tl.cdiv(rows * groups, block_m), 0)
    until = tl.cumsum(tiles, axis=0)
    index = tl.sum(tiles, axis=0) - 1 - tl.program_id(1)
    request = tl.sum((until <= index).to(tl.int32), axis=0)
    before = tl.sum(tl.where(number == request, until - tiles, 0), axis=0)
    return tl.where(index < 0, -1, request), index - before


@triton.jit(do_not_specialize=["requests"])
def chunk_kernel(
    query, keys, values, key_scales, value_scales, out, query_start, context_lens, tables,
    positions, tokens, ancestors, tree_starts, last_seen, sinks, row_stride, table_stride, scale,
    softcap, window, requests, short_rows, kv_heads: tl.constexpr, groups: tl.constexpr,
    head_dim: tl.constexpr, stored_dim: tl.constexpr, block_size: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr, block_r: tl.constexpr,
    pdl: tl.constexpr, first_seen: tl.constexpr, causal: tl.constexpr,
):  # fmt: skip
    """Programs (KV head, tile): attention of a tile of a prompt chunk, without splits.

    A chunk's tiles are launched last tile first, for all heads, as later tiles see more tokens.
    """
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    kv_head = tl.program_id(0)
    request, tile = tile_of_program(query_start, requests, short_rows, groups, block_m, block_r)
    if request < 0:
        return
    first = tl.load(query_start + request).to(tl.int32)
    rows = tl.load(query_start + request + 1).to(tl.int32) - first
    context = tl.load(context_lens + request).to(tl.int32)
    row, head, _, begins, ends = sight(
        positions, None, tokens, last_seen, first, rows, context, tile, kv_head, window, causal,
        groups, block_m,
    )  # fmt: skip
    inside = row < rows
    source = (first + row).to(tl.int64) * row_stride + head * head_dim
    loaded = queries(query, source, inside, head_dim, block_d)
    newest = tl.max(tl.where(inside, ends, 0), axis=0)
    begin = tl.min(tl.where(inside, begins, newest), axis=0) // block_n * block_n
    largest = tl.full((block_m,), float("-inf"), tl.float32)
    total = tl.zeros((block_m,), tl.float32)
    if sinks is not None:  # a sink adds to the sum of weights, but has no value
        largest = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total += 1.0
    mixed = tl.zeros((block_m, block_d), tl.float32)
    keys += kv_head * head_dim
    values += kv_head * head_dim
    if key_scales is not None:  # a token's scales are stored after all of its heads
        key_scales += kv_heads * head_dim // 4 + kv_head
        value_scales += kv_heads * head_dim // 4 + kv_head
    table = tables + request.to(tl.int64) * table_stride
    words = ancestors if ancestors is None else ancestors + first
    tree_start = 0 if ancestors is None else tl.load(tree_starts + request).to(tl.int32)
    if ancestors is None and window is None and first_seen == 0:
        # All rows see the tokens before the first row, so these tiles need no mask.
        common = tl.min(tl.where(inside, ends, newest), axis=0) // block_n * block_n
        largest, total, mixed = _fold(
            loaded, largest, total, mixed, begin, common, begins, ends, row, rows, None, 0,
            keys, values, key_scales, value_scales, table, scale, softcap, None, 0,
            kv_heads * stored_dim, block_size, head_dim, block_n, False,
        )  # fmt: skip
        begin = common
    largest, total, mixed = _fold(
        loaded, largest, total, mixed, begin, newest, begins, ends, row, rows, words,
        tree_start, keys, values, key_scales, value_scales, table, scale, softcap, window,
        first_seen, kv_heads * stored_dim, block_size, head_dim, block_n, True,
    )  # fmt: skip
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    number = columns(head_dim, block_d)
    place = ((first + row).to(tl.int64) * kv_heads * groups + head)[:, None] * head_dim
    stored = inside[:, None] & (number >= 0)[None, :]
    tl.store(out + place + number[None, :], mixed.to(out.dtype.element_ty), mask=stored)
