"""The kernels of attention for requests of few rows. How programs meet the work: `attention.py`.

The cached tokens of a request are folded split by split (`attention_parts.py`), and the splits are
added up in their order: by the one program that does them all, or by `combine_kernel`.

Weights stand against an exponent: the largest score seen, in units of log 2, rounded up to an
integer. So a sum is moved from one exponent to another without rounding, and its bits follow from
what is added in which order, not from where the exponent changed. A row that sees nothing of a
tile is left as it was, bit for bit, which makes it independent of the rows beside it.
"""

import triton
import triton.language as tl

from slipstream.kernels.triton.attention_parts import (
    LOG2_E,
    capped,
    entries_of,
    finite,
    halves,
    hidden,
    oldest_token,
    places_of,
    power_of_two,
    rotated,
    scales_at,
    sight,
    split_of,
    split_of_lane,
    split_start,
    store_heads,
    turns,
)
from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs

SUM_COLUMNS = tl.constexpr(16)  # the fewest of a tile


@triton.jit
def _new_tokens(
    positions, places, tokens, slots, first, rows, begin, end, new_rows: tl.constexpr
):  # fmt: skip
    """(row, position, slot, whether it is stored) of the request's rows.

    The new tokens are the last `rows` of the context; those in [begin, end) are stored.
    """
    row = tl.arange(0, new_rows)
    position = tl.load(positions + first + row, mask=row < rows, other=0)
    slot = tl.load(slots + first + row, mask=row < rows, other=-1)
    token = position
    if places is not None:
        token = tl.load(places + first + row, mask=row < rows, other=-1)
    if tokens is not None:
        token = tl.load(tokens + first + row, mask=row < rows, other=-1)
    return row, position, slot, (slot >= 0) & (token >= begin) & (token < end)


@triton.jit
def _store(pages, place, inside, first, second, head_dim: tl.constexpr):
    """Two halves of heads [L, C] go to `place` [L]."""
    half: tl.constexpr = head_dim // 2
    pair = tl.arange(0, first.shape[1])
    target = pages + place[:, None] + pair[None, :]
    stored = inside[:, None] & (pair < half)[None, :]
    tl.store(target, first, mask=stored)
    tl.store(target + half, second, mask=stored)


@triton.jit
def _store_new(
    qkv, source, stored, turn, key_weight, eps, keys, values, key_scales, value_scales, place,
    rotary_dim: tl.constexpr, head_dim: tl.constexpr, kv_heads: tl.constexpr,
    block_d: tl.constexpr,
):  # fmt: skip
    """Keys, to be turned, from `source` [L] of `qkv`, and the values behind them, to `place`."""
    one, two = halves(qkv, source, stored, head_dim, block_d)
    value_one, value_two = halves(qkv, source + kv_heads * head_dim, stored, head_dim, block_d)
    one, two = rotated(qkv, source, stored, one, two, turn, key_weight, eps, rotary_dim, head_dim)
    at = place // 4
    store_heads(keys, key_scales, place, at, stored, one, two, head_dim)
    store_heads(values, value_scales, place, at, stored, value_one, value_two, head_dim)


@triton.jit
def _fold(
    query_one, query_two, key_one, key_two, value_one, value_two, key_scale, exponent, total, one,
    two, token, row_begins, row_ends, row, rows, ancestors, tree_start, scale, softcap, window,
    first_seen: tl.constexpr,
):  # fmt: skip
    """Adds one tile of tokens: (exponent, sums of weights, all alike, sums of weighted values).

    Heads come in halves: queries and sums of values are [block_m, block_d / 2], keys and values
    [block_n, block_d / 2].
    """
    # Halves are not joined: the compiler takes a join for the unpacking of smaller numbers, and
    # would read the factors of the product in smaller pieces.
    score = tl.dot(query_one, tl.trans(key_one), input_precision="ieee")
    score = tl.dot(query_two, tl.trans(key_two), score, input_precision="ieee")
    if key_scale is not None:
        score *= key_scale[None, :]
    score, factor = capped(score, scale, softcap)
    score = hidden(
        score, token, row_begins, row_ends, row, rows, ancestors, tree_start, window, first_seen
    )
    highest = tl.maximum(exponent, tl.ceil(tl.max(score, axis=1) * factor))
    base = finite(highest)
    negative = tl.zeros_like(score) - base[:, None]
    # Fused, as the compiler might do here and not there.
    weight = tl.exp2(tl.fma(score, tl.zeros_like(score) + factor, negative)).to(value_one.dtype)
    kept = power_of_two(exponent - base)[:, None]
    # The tensor cores add in one order, however many warps there are.
    ones = tl.full((value_one.shape[0], SUM_COLUMNS), 1.0, value_one.dtype)
    total = tl.dot(weight, ones, total * kept, input_precision="ieee")
    one = tl.dot(weight, value_one, one * kept, input_precision="ieee")
    two = tl.dot(weight, value_two, two * kept, input_precision="ieee")
    return highest, total, one, two


@triton.jit
def _added(exponent, total, one, two, more_exponent, more_total, more_one, more_two):
    """The sum of two folds."""
    highest = tl.maximum(exponent, more_exponent)
    kept = power_of_two(exponent - finite(highest))[:, None]
    moved = power_of_two(more_exponent - finite(highest))[:, None]
    total = total * kept + more_total * moved
    return highest, total, one * kept + more_one * moved, two * kept + more_two * moved


@triton.jit
def _fold_splits(
    query_one, query_two, keys, values, key_scales, value_scales, table, begin, end, row_begins,
    row_ends, row, rows, ancestors, tree_start, scale, softcap, window, part, part_exponent,
    part_total, place, split, first_seen: tl.constexpr, place_stride: tl.constexpr,
    block_size: tl.constexpr, head_dim: tl.constexpr, block_n: tl.constexpr,
):  # fmt: skip
    """The sum of the folds of the tokens [begin, end), split by split from `split` on.

    Where there is a `part`, the folds go there instead, from `place` [block_m] on.
    """
    block_m: tl.constexpr = query_one.shape[0]
    block_d: tl.constexpr = 2 * query_one.shape[1]
    exponent = tl.full((block_m,), float("-inf"), tl.float32)
    total = tl.zeros((block_m, SUM_COLUMNS), tl.float32)
    one = tl.zeros(query_one.shape, tl.float32)
    two = tl.zeros(query_one.shape, tl.float32)
    sum_exponent, sum_total, sum_one, sum_two = exponent, total, one, two
    until = split_start(split + 1)
    entries = entries_of(table, begin, end, block_size, block_n)
    for start in range(begin, end, block_n):
        token = start + tl.arange(0, block_n)
        places = places_of(entries, start, place_stride, block_size, block_n)
        key_one, key_two = halves(keys, places, token < end, head_dim, block_d)
        value_one, value_two = halves(values, places, token < end, head_dim, block_d)
        entries = entries_of(table, start + block_n, end, block_size, block_n)
        key_scale = None
        if key_scales is not None:
            key_scale = scales_at(key_scales, places, token < end)
            by = scales_at(value_scales, places, token < end)[:, None]
            dtype: tl.constexpr = query_one.dtype
            key_one, key_two = key_one.to(dtype), key_two.to(dtype)
            value_one = (value_one.to(tl.float32) * by).to(dtype)
            value_two = (value_two.to(tl.float32) * by).to(dtype)
        exponent, total, one, two = _fold(
            query_one, query_two, key_one, key_two, value_one, value_two, key_scale, exponent,
            total, one, two, token, row_begins, row_ends, row, rows, ancestors, tree_start, scale,
            softcap, window, first_seen,
        )  # fmt: skip
        if start + block_n >= tl.minimum(until, end):
            if part is None:
                sum_exponent, sum_total, sum_one, sum_two = _added(
                    sum_exponent, sum_total, sum_one, sum_two, exponent, total, one, two
                )
            else:
                tl.store(part_exponent + place, exponent, mask=row < rows)
                tl.store(part_total + place, tl.max(total, axis=1), mask=row < rows)
                _store(part, place * head_dim, row < rows, one, two, head_dim)
                place += 1
            exponent = tl.full((block_m,), float("-inf"), tl.float32)
            total = tl.zeros((block_m, SUM_COLUMNS), tl.float32)
            one = tl.zeros(query_one.shape, tl.float32)
            two = tl.zeros(query_one.shape, tl.float32)
            split += 1
            until = split_start(split + 1)
    return sum_exponent, tl.max(sum_total, axis=1)[:, None], sum_one, sum_two


@triton.jit
def _ask_for(
    keys, values, table, begin, end, place_stride: tl.constexpr, block_size: tl.constexpr,
    head_dim: tl.constexpr, tokens: tl.constexpr,
):  # fmt: skip
    """Asks for so many tokens from `begin` on, of those before `end`, without waiting for them."""
    numbers: tl.constexpr = 1024 // keys.dtype.element_ty.primitive_bitwidth  # of 128 bytes
    lines: tl.constexpr = (head_dim + numbers - 1) // numbers
    for line in tl.static_range(lines):
        token = begin + tl.arange(0, tokens)
        inside = token < end
        entry = tl.load(table + token // block_size, mask=inside, other=0).to(tl.int64)
        place = (entry * block_size + token % block_size) * place_stride + line * numbers
        for pages in tl.static_range(2):
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; "
                "mov.u32 $0, 0; }",
                "=r,l,r", [(values if pages else keys) + place, inside.to(tl.int32)],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def _with_sink(exponent, total, sink):
    """(sum of weights, factor of the sums of values) with a score that has no value.

    Its exponent is that of a fold.
    """
    highest = tl.maximum(exponent, tl.ceil(sink))
    kept = power_of_two(exponent - highest)
    return total * kept + tl.exp2(sink - highest), kept


@triton.jit
def _write(exponent, total, one, two, out, place, head, inside, sinks, head_dim: tl.constexpr):
    kept = tl.full(total.shape, 1.0, tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)[:, None] * LOG2_E
        total, kept = _with_sink(exponent[:, None], total, sink)
    total = tl.where(total == 0.0, 1.0, total)  # zero, if nothing was seen
    one, two = one * kept / total, two * kept / total
    dtype: tl.constexpr = out.dtype.element_ty
    _store(out, place * head_dim, inside, one.to(dtype), two.to(dtype), head_dim)


@triton.jit
def _splits(context, rows, window):
    """(the first split that rows of a request see, how many they see)."""
    first_split = split_of(oldest_token(context, rows, window))
    return first_split, split_of(tl.maximum(context, 1) - 1) + 1 - first_split


@triton.jit
def short_kernel(
    qkv, keys, values, key_scales, value_scales, out, part, part_exponent, part_total, query_start,
    context_lens, tables, positions, places, slots, tokens, ancestors, tree_starts, last_seen,
    sinks, query_weight, key_weight, eps, cos_sin, row_stride, table_stride, scale, softcap,
    window, most_rows, most_splits, kv_heads: tl.constexpr, groups: tl.constexpr,
    head_dim: tl.constexpr, stored_dim: tl.constexpr, block_size: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr, pdl: tl.constexpr,
    early: tl.constexpr, first_seen: tl.constexpr, causal: tl.constexpr, new_rows: tl.constexpr,
    rotary_dim: tl.constexpr,
):  # fmt: skip
    """Programs (KV head and tile, request, lane): a lane folds its share of a tile's splits.

    The folds go to part [T, Hq, most_splits, head_dim], part_exponent and part_total. Without
    them one lane adds them up. With `cos_sin`, queries and keys are as the matmul left them: rows
    of a lane's own tokens are stored by the program before it reads them, by several tiles alike.
    """
    launch_dependents(pdl)
    if not early:
        wait_for_inputs(pdl)
    place_stride: tl.constexpr = kv_heads * stored_dim
    tile, kv_head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    request, lane, lanes = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    first = tl.load(query_start + request).to(tl.int32)
    rows = tl.load(query_start + request + 1).to(tl.int32) - first
    context = tl.load(context_lens + request).to(tl.int32)
    oldest = oldest_token(context, rows, window)
    first_split, _ = _splits(context, rows, window)
    seen_from, newest = split_start(first_split), tl.maximum(context, 1)
    split = split_of_lane(lane, lanes, seen_from, newest)
    after = split_of_lane(lane + 1, lanes, seen_from, newest)
    if (rows > most_rows) | (tile * block_m >= rows * groups) | (split >= after):
        wait_for_inputs(pdl)
        return
    begin = tl.maximum(split_start(split), oldest // block_n * block_n)
    end = tl.minimum(split_start(after), context)
    keys, values = keys + kv_head * head_dim, values + kv_head * head_dim
    if key_scales is not None:  # behind all heads of a token
        key_scales += kv_heads * head_dim // 4 + kv_head
        value_scales += kv_heads * head_dim // 4 + kv_head
    table = tables + request.to(tl.int64) * table_stride
    row, head, position, begins, ends = sight(
        positions, places, tokens, last_seen, first, rows, context, tile, kv_head, window, causal,
        groups, block_m,
    )  # fmt: skip
    if early:
        known = context if cos_sin is None else context - rows  # tokens that are stored already
        _ask_for(
            keys, values, table, begin, tl.minimum(end, known), place_stride, block_size, head_dim,
            block_n,
        )  # fmt: skip
    if cos_sin is not None:
        turn = turns(cos_sin, position, row < rows, rotary_dim, head_dim, block_d)
        new_row, new_position, slot, stored = _new_tokens(
            positions, places, tokens, slots, first, rows, begin, end, new_rows
        )
        new_turn = turns(cos_sin, new_position, stored, rotary_dim, head_dim, block_d)
    wait_for_inputs(pdl)
    source = (first + row).to(tl.int64) * row_stride + head * head_dim
    one, two = halves(qkv, source, row < rows, head_dim, block_d)
    if cos_sin is not None:
        new = (first + new_row).to(tl.int64) * row_stride + (kv_heads * groups + kv_head) * head_dim
        _store_new(
            qkv, new, stored, new_turn, key_weight, eps, keys, values, key_scales, value_scales,
            slot * place_stride, rotary_dim, head_dim, kv_heads, block_d,
        )  # fmt: skip
        one, two = rotated(
            qkv, source, row < rows, one, two, turn, query_weight, eps, rotary_dim, head_dim
        )
        tl.debug_barrier()  # the other threads of this program read the new tokens next
    words = ancestors if ancestors is None else ancestors + first
    tree_start = 0 if ancestors is None else tl.load(tree_starts + request).to(tl.int32)
    place = (first + row).to(tl.int64) * kv_heads * groups + head
    exponent, total, one, two = _fold_splits(
        one, two, keys, values, key_scales, value_scales, table, begin, end, begins, ends, row,
        rows, words, tree_start, scale, softcap, window, part, part_exponent, part_total, place *
        most_splits + split - first_split, split, first_seen, place_stride, block_size, head_dim,
        block_n,
    )  # fmt: skip
    if part is None:
        _write(exponent, total, one, two, out, place, head, row < rows, sinks, head_dim)


@triton.jit
def combine_kernel(
    part, part_exponent, part_total, out, query_start, context_lens, sinks, window, most_rows,
    most_splits, heads: tl.constexpr, head_dim: tl.constexpr, block_d: tl.constexpr,
    block_s: tl.constexpr, at_once: tl.constexpr, pdl: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Programs (lane, request): sums over splits; a lane does every so-manieth row and head.

    Splits that a row does not see add nothing to it.
    """
    launch_dependents(pdl)
    if not early:
        wait_for_inputs(pdl)
    request = tl.program_id(1)
    first = tl.load(query_start + request).to(tl.int32)
    rows = tl.load(query_start + request + 1).to(tl.int32) - first
    context = tl.load(context_lens + request).to(tl.int32)
    splits = tl.where(context > 0, _splits(context, rows, window)[1], 0)
    lines = tl.where(rows > most_rows, 0, rows * heads)
    wait_for_inputs(pdl)
    column = tl.arange(0, block_d)
    for own in range(tl.program_id(0), lines, tl.num_programs(0)):
        line = first.to(tl.int64) * heads + own
        place = line * most_splits
        exponent = tl.full((), float("-inf"), tl.float32)
        for start in range(0, splits, block_s):
            split = start + tl.arange(0, block_s)
            known = tl.load(part_exponent + place + split, mask=split < splits, other=float("-inf"))
            exponent = tl.maximum(exponent, tl.max(known, axis=0))
        total = tl.zeros((), tl.float32)
        mixed = tl.zeros((block_d,), tl.float32)
        for start in range(0, splits, at_once):
            for split in tl.static_range(at_once):  # loaded at once, added one after the other
                there = place + start + split
                inside = (column < head_dim) & (start + split + 0 * column < splits)
                known = tl.load(
                    part_exponent + there, mask=start + split < splits, other=float("-inf")
                )
                more = tl.load(part_total + there, mask=start + split < splits, other=0.0)
                values = tl.load(part + there * head_dim + column, mask=inside, other=0.0)
                moved = power_of_two(known - finite(exponent))
                total += more * moved
                mixed += values * moved
        kept = tl.full((), 1.0, tl.float32)
        if sinks is not None:
            sink = tl.load(sinks + line % heads).to(tl.float32) * LOG2_E
            total, kept = _with_sink(exponent, total, sink)
        result = mixed * kept / tl.where(total == 0.0, 1.0, total)
        target = out + line * head_dim + column
        tl.store(target, result.to(out.dtype.element_ty), mask=column < head_dim)
