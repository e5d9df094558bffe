"""The attention kernels for requests of few rows; `attention.py` launches them.

Each split of a request's context is reduced by online softmax (`attention_folds.py`). The partial
sums of the splits are then added in order: by the program itself if it has all splits, or else by
`combine_kernel`.
"""

import triton
import triton.language as tl

from slipstream.kernels.triton.attention_folds import fold_splits, store_halves
from slipstream.kernels.triton.attention_parts import (
    LOG2_E,
    entries_of,
    gains_of,
    halves,
    oldest_token,
    power_of_two,
    rotated,
    sight,
    split_of,
    split_of_lane,
    split_start,
    store_heads,
    turns,
)
from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs


@triton.jit
def _new_tokens(
    positions, places, tokens, slots, first, rows, begin, end, new_rows: tl.constexpr
):  # fmt: skip
    """(row, position, slot, whether this program stores it), each [2 new_rows], of a request's
    rows; all of them twice, see `_store_new`.

    New tokens are the last `rows` of the context. A program stores those in [begin, end) that have
    a slot.
    """
    row = tl.arange(0, 2 * new_rows) % new_rows
    position = tl.load(positions + first + row, mask=row < rows, other=0)
    slot = tl.load(slots + first + row, mask=row < rows, other=-1)
    token = position
    if places is not None:
        token = tl.load(places + first + row, mask=row < rows, other=-1)
    if tokens is not None:
        token = tl.load(tokens + first + row, mask=row < rows, other=-1)
    return row, position, slot, (slot >= 0) & (token >= begin) & (token < end)


@triton.jit
def _store_new(
    qkv, source, stored, turn, gains, eps, keys, values, key_scales, value_scales, place,
    rotary_dim: tl.constexpr, head_dim: tl.constexpr, kv_heads: tl.constexpr,
    block_d: tl.constexpr,
):  # fmt: skip
    """Rotate the keys at `source` [L] of `qkv`, and store them and their values at `place` [L].

    All lines occur twice: first for keys, then for values. Loads of values of their own would be
    moved behind the rotation by the compiler, and so wait for the memory once more.
    """
    is_value = tl.arange(0, source.shape[0]) >= source.shape[0] // 2
    source += tl.where(is_value, kv_heads * head_dim, 0)
    one, two = halves(qkv, source, stored, head_dim, block_d)
    turned_one, turned_two = rotated(
        qkv, source, stored, one, two, turn, gains, eps, rotary_dim, head_dim
    )
    one = tl.where(is_value[:, None], one, turned_one)
    two = tl.where(is_value[:, None], two, turned_two)
    scaled: tl.constexpr = key_scales is not None
    scale_at = tl.where(is_value, value_scales, key_scales) + place // 4 if scaled else None
    store_heads(tl.where(is_value, values, keys) + place, scale_at, stored, one, two, head_dim)


@triton.jit
def _ask_for(
    keys, values, table, begin, end, place_stride: tl.constexpr, block_size: tl.constexpr,
    head_dim: tl.constexpr, tokens: tl.constexpr,
):  # fmt: skip
    """Prefetch keys and values of the first `tokens` tokens of [begin, end), without waiting."""
    numbers: tl.constexpr = 1024 // keys.dtype.element_ty.primitive_bitwidth  # in 128 bytes
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
def with_sink(exponent, total, sink):
    """(sum of weights with the sink, factor for the sums of values).

    The sink is a score without a value. The exponent is raised to it as for any other score.
    """
    highest = tl.maximum(exponent, tl.ceil(sink))
    kept = power_of_two(exponent - highest)
    return total * kept + tl.exp2(sink - highest), kept


@triton.jit
def _write(sums, out, place, head, inside, sinks, head_dim: tl.constexpr, scales):
    """Store the results of a tile of lines at `place` of `out`, with the sinks of their heads."""
    exponent, total, one, two = sums
    total = tl.max(total, axis=1)[:, None]
    kept = tl.full(total.shape, 1.0, tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)[:, None] * LOG2_E
        total, kept = with_sink(exponent[:, None], total, sink)
    total = tl.where(total == 0.0, 1.0, total)  # a row that sees no token: output 0
    one, two = one * kept / total, two * kept / total
    dtype: tl.constexpr = out.dtype.element_ty
    one, two = one.to(dtype), two.to(dtype)
    store_halves(out, place * head_dim, inside, one, two, head_dim, scales is not None)


@triton.jit
def seen_splits(context, rows, window):
    """(first split that the rows of a request see, number of splits that they see)."""
    first_split = split_of(oldest_token(context, rows, window))
    return first_split, split_of(tl.maximum(context, 1) - 1) + 1 - first_split


@triton.jit
def _splits_of_lane(lane, lanes, context, rows, window, shared, request):
    """(first split that the rows of a request see, first split of a lane, first after it). Lanes
    leave out the splits that `shared_kernel` reduces, of the first shared[request] tokens."""
    first_split, _ = seen_splits(context, rows, window)
    seen_from, newest = split_start(first_split), tl.maximum(context, 1)
    if shared is not None:
        together = split_start(split_of(tl.load(shared + request).to(tl.int32)))
        seen_from = tl.where(together <= context - rows, together, seen_from)
    split = split_of_lane(lane, lanes, seen_from, newest)
    return first_split, split, split_of_lane(lane + 1, lanes, seen_from, newest)


@triton.jit(do_not_specialize=["most_rows", "most_splits"])
def short_kernel(
    qkv, keys, values, key_scales, value_scales, out, part, part_exponent, part_total, query_start,
    context_lens, tables, positions, places, slots, tokens, ancestors, tree_starts, last_seen,
    shared, sinks, query_weight, key_weight, eps, cos_sin, row_stride, table_stride, scale, softcap,
    window, most_rows, most_splits, kv_heads: tl.constexpr, groups: tl.constexpr,
    head_dim: tl.constexpr, stored_dim: tl.constexpr, block_size: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr, pdl: tl.constexpr,
    early: tl.constexpr, first_seen: tl.constexpr, causal: tl.constexpr, new_rows: tl.constexpr,
    rotary_dim: tl.constexpr,
):  # fmt: skip
    """Programs (KV head and tile, request, lane): each lane reduces its share of a tile's splits.

    Partial sums go to part [requests, most_rows, Hq, most_splits, head_dim], part_exponent and
    part_total, if given, else to `out`. With `cos_sin`, a lane rotates and stores new tokens first.
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
    first_split, split, after = _splits_of_lane(lane, lanes, context, rows, window, shared, request)
    if (rows > most_rows) | (tile * block_m >= rows * groups) | (split >= after):
        wait_for_inputs(pdl)
        return
    oldest = oldest_token(context, rows, window) // block_n * block_n
    begin, end = tl.maximum(split_start(split), oldest), tl.minimum(split_start(after), context)
    keys, values = keys + kv_head * head_dim, values + kv_head * head_dim
    if key_scales is not None:  # stored after all heads of a token
        key_scales += kv_heads * head_dim // 4 + kv_head
        value_scales += kv_heads * head_dim // 4 + kv_head
    table = tables + request.to(tl.int64) * table_stride
    row, head, position, begins, ends = sight(
        positions, places, tokens, last_seen, first, rows, context, tile, kv_head, window, causal,
        groups, block_m,
    )  # fmt: skip
    if early:
        known = context if cos_sin is None else context - rows  # tokens that the cache has already
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
    has_norms: tl.constexpr = query_weight is not None
    query_gains = gains_of(query_weight, rotary_dim, head_dim, block_d) if has_norms else None
    key_gains = gains_of(key_weight, rotary_dim, head_dim, block_d) if has_norms else None
    entries = entries_of(table, begin, end, block_size, block_n)
    wait_for_inputs(pdl)
    source = (first + row).to(tl.int64) * row_stride + head * head_dim
    one, two = halves(qkv, source, row < rows, head_dim, block_d)
    if cos_sin is not None:
        new = (first + new_row).to(tl.int64) * row_stride + (kv_heads * groups + kv_head) * head_dim
        _store_new(
            qkv, new, stored, new_turn, key_gains, eps, keys, values, key_scales, value_scales,
            slot * place_stride, rotary_dim, head_dim, kv_heads, block_d,
        )  # fmt: skip
        one, two = rotated(
            qkv, source, row < rows, one, two, turn, query_gains, eps, rotary_dim, head_dim
        )
        tl.debug_barrier()  # other threads of this program read the stored tokens next
    words = ancestors if ancestors is None else ancestors + first
    tree_start = 0 if ancestors is None else tl.load(tree_starts + request).to(tl.int32)
    line = first + row if part is None else request * most_rows + row
    place = line.to(tl.int64) * kv_heads * groups + head
    sums = fold_splits(
        ((one, two),), ((begins, ends, row),), ((place * most_splits - first_split, row < rows),),
        keys, values, key_scales, value_scales, table, entries, begin, end, rows, words, tree_start,
        scale, softcap, window, part, part_exponent, part_total, split, first_seen, place_stride,
        block_size, head_dim, block_n, pdl,
    )  # fmt: skip
    if part is None:
        _write(sums[0], out, place, head, row < rows, sinks, head_dim, key_scales)
