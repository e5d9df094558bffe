"""Reduces tokens that several requests share, for all of these at once; `attention.py` launches it.

A program has a KV head, some splits of the shared tokens, and the lines of several requests, so
that keys and values are read once for all of them. It leaves what `short_kernel` would leave of
each split for `combine_kernel`, with the same bits: tokens are added in the same tiles and order,
and products have `block_m` lines, as tensor cores add in another order from 64 lines on. So a
program has more lines as several such tiles, one after the other.
"""

import triton
import triton.language as tl

from slipstream.kernels.triton.attention_folds import fold_splits
from slipstream.kernels.triton.attention_parts import (
    entries_of,
    gains_of,
    halves,
    rotated,
    split_of,
    split_of_lane,
    split_start,
    turns,
)
from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs


@triton.jit
def _lines(
    first_line, members, requests, query_start, context_lens, most_rows, end, kv_head,
    kv_heads: tl.constexpr, groups: tl.constexpr, block_m: tl.constexpr,
):  # fmt: skip
    """(row of the pass, place of the row among all rows of `part`, query head, whether it is a line
    that sees all tokens up to `end`), each [block_m].

    Each request of the group has most_rows * groups lines, some of which may be no rows.
    """
    line = first_line + tl.arange(0, block_m)
    number = line // (most_rows * groups)
    member = tl.load(members + number, mask=number < requests, other=0).to(tl.int32)
    request = tl.maximum(member - 1, 0)
    first = tl.load(query_start + request).to(tl.int32)
    rows = tl.load(query_start + request + 1).to(tl.int32) - first
    context = tl.load(context_lens + request).to(tl.int32)
    row = line % (most_rows * groups) // groups
    inside = (member > 0) & (row < rows) & (rows <= most_rows) & (end <= context - rows)
    head = kv_head * groups + line % groups
    return first + row, (request * most_rows + row).to(tl.int64), head, inside


@triton.jit
def _query(
    qkv, positions, row, head, inside, row_stride, gains, eps, cos_sin,
    rotary_dim: tl.constexpr, head_dim: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """Both halves of the rotated queries of these lines, as `fold_splits` takes them."""
    source = row.to(tl.int64) * row_stride + head * head_dim
    one, two = halves(qkv, source, inside, head_dim, block_d)
    if cos_sin is not None:
        position = tl.load(positions + row, mask=inside, other=0)
        turn = turns(cos_sin, position, inside, rotary_dim, head_dim, block_d)
        one, two = rotated(qkv, source, inside, one, two, turn, gains, eps, rotary_dim, head_dim)
    return one, two


@triton.jit(do_not_specialize=["requests", "most_rows", "most_splits"])
def shared_kernel(
    qkv, keys, values, key_scales, value_scales, part, part_exponent, part_total, query_start,
    context_lens, tables, positions, tokens, members, query_weight, eps, cos_sin, row_stride,
    table_stride, scale, softcap, requests, most_rows, most_splits, kv_heads: tl.constexpr,
    groups: tl.constexpr, head_dim: tl.constexpr, stored_dim: tl.constexpr,
    block_size: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr,
    pdl: tl.constexpr, early: tl.constexpr, first_seen: tl.constexpr, rotary_dim: tl.constexpr,
    tiles: tl.constexpr,
):  # fmt: skip
    """Programs (KV head and lines, lane): each lane reduces its share of the splits that lie in the
    shared tokens; see `SharedBlocks` for `tokens` and `members`. A program has `tiles` tiles of
    lines. Partial sums go where those of `short_kernel` go."""
    launch_dependents(pdl)
    if not early:
        wait_for_inputs(pdl)
    place_stride: tl.constexpr = kv_heads * stored_dim
    first_line = tl.program_id(0) // kv_heads * (tiles * block_m)
    kv_head = tl.program_id(0) % kv_heads
    leader = tl.maximum(tl.load(members).to(tl.int32) - 1, 0)
    shared = split_start(split_of(tl.load(tokens + leader).to(tl.int32)))
    split = split_of_lane(tl.program_id(1), tl.num_programs(1), 0, shared)
    after = split_of_lane(tl.program_id(1) + 1, tl.num_programs(1), 0, shared)
    if (tl.load(members + first_line // (most_rows * groups)) == 0) | (split >= after):
        wait_for_inputs(pdl)
        return
    begin, end = split_start(split), split_start(after)
    keys, values = keys + kv_head * head_dim, values + kv_head * head_dim
    if key_scales is not None:  # stored after all heads of a token
        key_scales += kv_heads * head_dim // 4 + kv_head
        value_scales += kv_heads * head_dim // 4 + kv_head
    table = tables + leader.to(tl.int64) * table_stride
    entries = entries_of(table, begin, end, block_size, block_n)
    has_norms: tl.constexpr = query_weight is not None
    gains = gains_of(query_weight, rotary_dim, head_dim, block_d) if has_norms else None
    wait_for_inputs(pdl)
    queries, views, lines = (), (), ()
    for index in tl.static_range(tiles):
        row, line, head, inside = _lines(
            first_line + index * block_m, members, requests, query_start, context_lens, most_rows,
            shared, kv_head, kv_heads, groups, block_m,
        )  # fmt: skip
        query = _query(
            qkv, positions, row, head, inside, row_stride, gains, eps, cos_sin,
            rotary_dim, head_dim, block_d,
        )  # fmt: skip
        queries += (query,)  # type: ignore[assignment]
        place = (line * (kv_heads * groups) + head) * most_splits
        lines += ((place, inside),)  # type: ignore[assignment]
        unused = tl.zeros((block_m,), tl.int32)
        views += ((unused, unused + end, unused),)  # type: ignore[assignment]
    fold_splits(
        queries, views, lines, keys, values, key_scales, value_scales, table, entries, begin, end,
        None, None, 0, scale, softcap, None, part, part_exponent, part_total, split, first_seen,
        place_stride, block_size, head_dim, block_n, pdl,
    )  # fmt: skip
