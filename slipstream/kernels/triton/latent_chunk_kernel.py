"""The kernel of latent attention for requests of many rows (prompt chunks): see `latent.py`."""

import triton
import triton.language as tl

from slipstream.kernels.triton.attention_chunk_kernel import tile_of_program
from slipstream.kernels.triton.attention_parts import (
    LOG2_E,
    finite,
    hidden,
    sight,
)
from slipstream.kernels.triton.latent_kernels import groups_of, latents_at, places_in
from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs


@triton.jit
def _fold(
    query, turned_query, largest, total, mixed, begin, end, row_begins, row_ends, row, rows,
    ancestors, tree_start, pages, table, scale, first_seen: tl.constexpr, rank: tl.constexpr,
    rotary_dim: tl.constexpr, block_size: tl.constexpr, block_n: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Online softmax (Milakov and Gimelshein 2018) over the cached tokens [begin, end).

    Returns (largest score, sum of weights, sum of weighted latents [block_m, block_c]). If `masked`
    is false, every row must see all of [begin, end), which must be a whole number of tiles.
    """
    block_c: tl.constexpr = query.shape[1]
    block_p: tl.constexpr = turned_query.shape[1]
    width: tl.constexpr = rank + rotary_dim
    groups = groups_of(table, begin, end, block_size, block_n)
    for start in range(begin, end, block_n):
        token = start + tl.arange(0, block_n)
        there = places_in(groups, start, end, width, block_n)
        groups = groups_of(table, start + block_n, end, block_size, block_n)
        latent, turned = latents_at(pages, there, None, rank, rotary_dim, block_c, block_p)
        score = tl.dot(query, tl.trans(latent), input_precision="ieee")
        score = tl.dot(turned_query, tl.trans(turned), score, input_precision="ieee")
        factor = scale * LOG2_E
        if masked:
            score = hidden(
                score, token, row_begins, row_ends, row, rows, ancestors, tree_start, None,
                first_seen,
            )  # fmt: skip
        highest = tl.maximum(largest, tl.max(score, axis=1) * factor)
        base = finite(highest) if masked else highest
        negative = tl.zeros_like(score) - base[:, None]
        weight = tl.exp2(tl.fma(score, tl.zeros_like(score) + factor, negative))
        kept = tl.exp2(largest - base)
        total = total * kept + tl.sum(weight, axis=1)
        mixed = tl.dot(
            weight.to(latent.dtype), latent, mixed * kept[:, None], input_precision="ieee"
        )
        largest = highest
    return largest, total, mixed


@triton.jit(do_not_specialize=["requests"])
def latent_chunk_kernel(
    absorbed, pages, out, query_start, context_lens, tables, positions, tokens, ancestors,
    tree_starts, table_stride, scale, requests, short_rows, heads: tl.constexpr,
    rank: tl.constexpr, rotary_dim: tl.constexpr, block_size: tl.constexpr, block_m: tl.constexpr,
    block_n: tl.constexpr, block_c: tl.constexpr, block_p: tl.constexpr, block_r: tl.constexpr,
    pdl: tl.constexpr, first_seen: tl.constexpr, causal: tl.constexpr,
):  # fmt: skip
    """Programs (0, tile): attention of a tile of a prompt chunk; out [T, H, R].

    The tiles that see the most tokens come first.
    """
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    request, tile = tile_of_program(query_start, requests, short_rows, heads, block_m, block_r)
    if request < 0:
        return
    first = tl.load(query_start + request).to(tl.int32)
    rows = tl.load(query_start + request + 1).to(tl.int32) - first
    context = tl.load(context_lens + request).to(tl.int32)
    row, head, _, begins, ends = sight(
        positions, None, tokens, None, first, rows, context, tile, 0, None, causal, heads, block_m
    )
    inside = row < rows
    line = (first + row).to(tl.int64) * heads + head
    query, turned_query = latents_at(
        absorbed, line * (rank + rotary_dim), inside, rank, rotary_dim, block_c, block_p
    )
    newest = tl.max(tl.where(inside, ends, 0), axis=0)
    largest = tl.full((block_m,), float("-inf"), tl.float32)
    total = tl.zeros((block_m,), tl.float32)
    mixed = tl.zeros((block_m, block_c), tl.float32)
    table = tables + request.to(tl.int64) * table_stride
    words = ancestors if ancestors is None else ancestors + first
    tree_start = 0 if ancestors is None else tl.load(tree_starts + request).to(tl.int32)
    begin = newest * 0
    if ancestors is None and first_seen == 0:
        # Most tiles of tokens are entirely before the first row.
        common = tl.min(tl.where(inside, ends, newest), axis=0) // block_n * block_n
        largest, total, mixed = _fold(
            query, turned_query, largest, total, mixed, begin, common, begins, ends, row, rows,
            None, 0, pages, table, scale, 0, rank, rotary_dim, block_size, block_n, False,
        )  # fmt: skip
        begin = common
    largest, total, mixed = _fold(
        query, turned_query, largest, total, mixed, begin, newest, begins, ends, row, rows, words,
        tree_start, pages, table, scale, first_seen, rank, rotary_dim, block_size, block_n, True,
    )  # fmt: skip
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    column = tl.arange(0, block_c)
    stored = inside[:, None] & (column < rank)[None, :]
    target = out + line[:, None] * rank + column[None, :]
    tl.store(target, mixed.to(out.dtype.element_ty), mask=stored)
