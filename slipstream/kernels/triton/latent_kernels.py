"""The kernels of latent attention for requests of few rows; `latent.py` launches them.

Queries are projected to the latent space, so that all heads of a layer share one key per token,
[latent, rotated], and one value, the latent. Line m of a request is its row m // heads and its head
m % heads.

Weights are the first operand of the tensor cores, and rows the second. Tiles have at most 32 lines,
for which the tensor cores add in one order: bits do not depend on the number of lines. Splits of
the context and their sums are those of `attention_short_kernels.py`.
"""

import triton
import triton.language as tl

from slipstream.kernels.triton.attention_parts import (
    LOG2_E,
    entries_of,
    finite,
    hidden,
    places_of,
    power_of_two,
    sight,
    split_of_each,
    split_of_lane,
    split_start,
)
from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs

ASKED = tl.constexpr(128)  # tokens at a time, one a thread


@triton.jit
def request_of(query_start, requests, row, block_r: tl.constexpr):
    """[L]: the requests that rows [L] belong to."""
    number = tl.arange(0, block_r)
    ends = tl.load(query_start + number + 1, mask=number < requests - 1, other=1 << 40)
    return tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), axis=1)


@triton.jit
def _turns(cos_sin, position, rotary_dim: tl.constexpr, block_p: tl.constexpr):
    """(cosines, sines) [block_p] of a position."""
    half: tl.constexpr = rotary_dim // 2
    pair = tl.arange(0, block_p)
    turn = cos_sin + position * rotary_dim + pair
    cos = tl.load(turn, mask=pair < half, other=0.0)
    return cos, tl.load(turn + half, mask=pair < half, other=0.0)


@triton.jit
def _turn(source, target, inside, cos, sin, by, rotary_dim: tl.constexpr):
    """Rotate the pairs (2i, 2i + 1) of vectors at `source` [L], times `by`, and store them at
    `target` [L]."""
    pair = tl.arange(0, cos.shape[0])
    moved = inside[:, None] & (pair < rotary_dim // 2)[None, :]
    at = source[:, None] + 2 * pair[None, :]
    one = tl.load(at, mask=moved, other=0.0).to(tl.float32)
    two = tl.load(at + 1, mask=moved, other=0.0).to(tl.float32)
    at = target[:, None] + 2 * pair[None, :]
    dtype: tl.constexpr = target.dtype.element_ty
    tl.store(at, ((one * cos[None, :] - two * sin[None, :]) * by).to(dtype), mask=moved)
    tl.store(at + 1, ((two * cos[None, :] + one * sin[None, :]) * by).to(dtype), mask=moved)


@triton.jit
def _store_latents(
    source, target, stored, norm_weight, eps, cos, sin, rank: tl.constexpr,
    rotary_dim: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """Norm and rotate a row's latents, and write them to the cache; `stored` is 0 or 1."""
    column, zero = tl.arange(0, block_c), tl.arange(0, 1)
    value = tl.load(source + column, mask=column < rank, other=0.0)
    gain = tl.load(norm_weight + column, mask=column < rank, other=0.0).to(tl.float32)
    wide = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, axis=0) / rank + eps)
    normed = (wide * factor * gain).to(value.dtype)
    tl.store(target + column, normed, mask=column < rank * stored)
    _turn(source + rank + zero, target + rank + zero, zero < stored, cos, sin, 1.0, rotary_dim)


@triton.jit(do_not_specialize=["num_rows"])
def absorb_kernel(
    queries, latents, weights, norm_weight, eps, cos_sin, query_scales, positions, slots, absorbed,
    pages, query_stride, latent_stride, head_stride, num_rows, heads: tl.constexpr,
    rank: tl.constexpr, plain_dim: tl.constexpr, rotary_dim: tl.constexpr, block_m: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr, block_h: tl.constexpr, block_c: tl.constexpr,
    block_p: tl.constexpr, pdl: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Programs (tile of the rank, head, tile of rows): queries [T, H (N + P)] to `absorbed`
    [T, H, R + P]. After the last head, two programs per row store its latents and rotate its
    queries.
    """
    launch_dependents(pdl)
    if not early:
        wait_for_inputs(pdl)
    tile, head, begin = tl.program_id(0), tl.program_id(1), tl.program_id(2) * block_m
    width: tl.constexpr = rank + rotary_dim
    if head < heads:
        column, depth = tile * block_n + tl.arange(0, block_n), tl.arange(0, block_k)
        known = (depth < plain_dim)[:, None] & (column < rank)[None, :]
        at = weights + head.to(tl.int64) * head_stride + depth[:, None] * rank + column[None, :]
        weight = tl.load(at, mask=known, other=0.0)
        wait_for_inputs(pdl)
        row = begin + tl.arange(0, block_m)
        inside = row < num_rows
        source = queries + row.to(tl.int64) * query_stride + head * (plain_dim + rotary_dim)
        loaded = inside[:, None] & (depth < plain_dim)[None, :]
        x = tl.load(source[:, None] + depth[None, :], mask=loaded, other=0.0)
        sums = tl.dot(tl.trans(weight), tl.trans(x), input_precision="ieee")
        if query_scales is not None:
            position = tl.load(positions + row, mask=inside, other=0)
            sums *= tl.load(query_scales + position)[None, :]
        place = (row.to(tl.int64) * heads + head) * width
        stored = inside[None, :] & (column < rank)[:, None]
        numbers = sums.to(absorbed.dtype.element_ty)
        tl.store(absorbed + place[None, :] + column[:, None], numbers, mask=stored)
    else:
        task = (head - heads) * tl.num_programs(0) + tile
        own = begin + task // 2
        if (task < 2 * block_m) & (own < num_rows):
            own_position, slot = tl.load(positions + own), tl.load(slots + own)
            cos, sin = _turns(cos_sin, own_position, rotary_dim, block_p)
            wait_for_inputs(pdl)
            if task % 2 == 0:
                _store_latents(
                    latents + own.to(tl.int64) * latent_stride, pages + slot * width,
                    (slot >= 0).to(tl.int32), norm_weight, eps, cos, sin, rank, rotary_dim, block_c,
                )  # fmt: skip
            else:
                by = 1.0
                if query_scales is not None:
                    by = tl.load(query_scales + own_position)
                line = tl.arange(0, block_h)
                each = queries + own.to(tl.int64) * query_stride + plain_dim
                target = absorbed + (own.to(tl.int64) * heads + line) * width + rank
                _turn(
                    each + line * (plain_dim + rotary_dim), target, line < heads, cos, sin, by,
                    rotary_dim,
                )  # fmt: skip
        else:
            wait_for_inputs(pdl)


@triton.jit
def _ask_for(
    pages, table, begin, end, width: tl.constexpr, block_size: tl.constexpr, tokens: tl.constexpr
):
    """Prefetch the rows of the tokens [begin, end) of a request, without waiting for them."""
    numbers: tl.constexpr = 1024 // pages.dtype.element_ty.primitive_bitwidth  # of 128 bytes
    lines: tl.constexpr = (width + numbers - 1) // numbers
    for start in range(begin, end, tokens):
        token = start + tl.arange(0, tokens)
        inside = token < end
        entry = tl.load(table + token // block_size, mask=inside, other=0).to(tl.int64)
        place = (entry * block_size + token % block_size) * width
        for line in tl.static_range(lines):
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; "
                "mov.u32 $0, 0; }",
                "=r,l,r", [pages + place + line * numbers, inside.to(tl.int32)],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def latents_at(
    source, places, inside, rank: tl.constexpr, rotary_dim: tl.constexpr, block_c: tl.constexpr,
    block_p: tl.constexpr,
):  # fmt: skip
    """Rows at `places` [L]: (latents [L, block_c], rotated part [L, block_p]); zeros if not
    `inside`."""
    column, pair = tl.arange(0, block_c), tl.arange(0, block_p)
    at, of_latents, of_turned = source + places[:, None], inside[:, None], inside[:, None]
    if block_c != rank:
        of_latents = of_latents & (column < rank)[None, :]
    if block_p != rotary_dim:
        of_turned = of_turned & (pair < rotary_dim)[None, :]
    latents = tl.load(at + column[None, :], mask=of_latents, other=0.0)
    return latents, tl.load(at + rank + pair[None, :], mask=of_turned, other=0.0)


@triton.jit
def _fold(
    query, turned_query, latents, turned, exponent, total, mixed, token, row_begins, row_ends, row,
    rows, ancestors, tree_start, scale, first_seen: tl.constexpr,
):  # fmt: skip
    """Add a tile of tokens: (exponent [M], sum of weights [M], sum of weighted latents [M, C])."""
    score = tl.dot(query, tl.trans(latents), input_precision="ieee")
    score = tl.dot(turned_query, tl.trans(turned), score, input_precision="ieee")
    score = hidden(
        score, token, row_begins, row_ends, row, rows, ancestors, tree_start, None, first_seen
    )
    factor = scale * LOG2_E
    highest = tl.maximum(exponent, tl.ceil(tl.max(score, axis=1) * factor))
    base = finite(highest)
    negative = tl.zeros_like(score) - base[:, None]
    weight = tl.exp2(tl.fma(score, tl.zeros_like(score) + factor, negative)).to(latents.dtype)
    kept = power_of_two(exponent - base)
    total = total * kept + tl.sum(weight.to(tl.float32), axis=1)
    mixed = tl.dot(weight, latents, mixed * kept[:, None], input_precision="ieee")
    return highest, total, mixed


@triton.jit
def latent_kernel(
    absorbed, pages, part, part_exponent, part_total, query_start, context_lens, tables, positions,
    places, tokens, ancestors, tree_starts, table_stride, scale, most_rows, most_parts,
    joined: tl.constexpr, heads: tl.constexpr, rank: tl.constexpr, rotary_dim: tl.constexpr,
    block_size: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_c: tl.constexpr,
    block_p: tl.constexpr, pdl: tl.constexpr, early: tl.constexpr, first_seen: tl.constexpr,
    causal: tl.constexpr,
):  # fmt: skip
    """Programs (tile of lines, request, lane): a lane reduces its share of a request's splits.

    Partial sums go to part [requests, most_rows, H, most_parts, R], part_exponent and part_total.
    If they are `joined`, there is one lane, and their sum is the only part.
    """
    launch_dependents(pdl)
    if not early:
        wait_for_inputs(pdl)
    width: tl.constexpr = rank + rotary_dim
    tile, request, lane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(query_start + request).to(tl.int32)
    rows = tl.load(query_start + request + 1).to(tl.int32) - first
    context = tl.load(context_lens + request).to(tl.int32)
    lanes, newest = tl.num_programs(2), tl.maximum(context, 1)
    split = split_of_lane(lane, lanes, 0, newest)
    after = split_of_lane(lane + 1, lanes, 0, newest)
    if (rows > most_rows) | (tile * block_m >= rows * heads) | (split >= after):
        wait_for_inputs(pdl)
        return
    table = tables + request.to(tl.int64) * table_stride
    row, head, _, begins, ends = sight(
        positions, places, tokens, None, first, rows, context, tile, 0, None, causal, heads, block_m
    )
    words = ancestors if ancestors is None else ancestors + first
    tree_start = 0 if ancestors is None else tl.load(tree_starts + request).to(tl.int32)
    if early:
        known = tl.minimum(split_start(after), context - rows)  # tokens of earlier passes
        _ask_for(pages, table, split_start(split), known, width, block_size, ASKED)
    begin, end = split_start(split), tl.minimum(split_start(split + 1), context)
    entries = entries_of(table, begin, end, block_size, block_n)
    wait_for_inputs(pdl)
    inside, line = row < rows, ((first + row).to(tl.int64) * heads + head) * width
    query, turned_query = latents_at(absorbed, line, inside, rank, rotary_dim, block_c, block_p)
    column = tl.arange(0, block_c)[None, :]
    stored = inside[:, None] & (column < rank)
    place = ((request * most_rows + row).to(tl.int64) * heads + head) * most_parts
    target = part + place[:, None] * rank + column
    all_exponent = tl.full((block_m,), float("-inf"), tl.float32)
    all_total = tl.zeros((block_m,), tl.float32)
    all_mixed = tl.zeros((block_m, block_c), tl.float32)
    for index in range(split, after):
        exponent = tl.full((block_m,), float("-inf"), tl.float32)
        total = tl.zeros((block_m,), tl.float32)
        mixed = tl.zeros((block_m, block_c), tl.float32)
        for start in range(begin, end, block_n):
            token = start + tl.arange(0, block_n)
            at = places_of(entries, start, width, block_size, block_n)
            entries = entries_of(table, start + block_n, end, block_size, block_n)
            latents, turned = latents_at(pages, at, token < end, rank, rotary_dim, block_c, block_p)
            exponent, total, mixed = _fold(
                query, turned_query, latents, turned, exponent, total, mixed, token, begins, ends,
                row, rows, words, tree_start, scale, first_seen,
            )  # fmt: skip
        begin, end = end, tl.minimum(split_start(index + 2), context)
        entries = entries_of(table, begin, end, block_size, block_n)
        if joined:
            highest = tl.maximum(all_exponent, exponent)
            kept = power_of_two(all_exponent - finite(highest))
            moved = power_of_two(exponent - finite(highest))
            all_total = all_total * kept + total * moved
            all_mixed = all_mixed * kept[:, None] + mixed * moved[:, None]
            all_exponent = highest
        else:
            tl.store(target + index * rank, mixed, mask=stored)
            tl.store(part_exponent + place + index, exponent, mask=inside)
            tl.store(part_total + place + index, total, mask=inside)
    if joined:
        tl.store(target, all_mixed, mask=stored)
        tl.store(part_exponent + place, all_exponent, mask=inside)
        tl.store(part_total + place, all_total, mask=inside)


@triton.jit
def _parts_at(
    part, part_exponent, part_total, place, start, splits, column, rank: tl.constexpr,
    count: tl.constexpr,
):  # fmt: skip
    """(exponents [M], sums of weights [M], sums of weighted latents [M, C]) of the splits
    start + [0, count) of lines, loaded without waiting; of those past the last, what adds nothing.
    """
    exponents, totals, values = (), (), ()
    for index in tl.static_range(count):
        known = start + index < splits
        there = place + start + index
        exponent = tl.load(part_exponent + there, mask=known, other=float("-inf"))
        exponents += (exponent,)  # type: ignore[assignment]
        totals += (tl.load(part_total + there, mask=known, other=0.0),)  # type: ignore[assignment]
        loaded = known[:, None] & (column < rank)[None, :]
        at = part + there[:, None] * rank + column[None, :]
        values += (tl.load(at, mask=loaded, other=0.0),)  # type: ignore[assignment]
    return exponents, totals, values


@triton.jit
def _with_parts(total, mixed, exponent, exponents, totals, values, count: tl.constexpr):
    """The sums of weights and of weighted latents with `count` parts added, in order."""
    for index in tl.static_range(count):
        moved = power_of_two(exponents[index] - finite(exponent))
        total += totals[index] * moved
        mixed += values[index] * moved[:, None]
    return total, mixed


@triton.jit(do_not_specialize=["num_rows"])
def values_kernel(
    part, part_exponent, part_total, weights, out, query_start, context_lens, head_stride, requests,
    num_rows, most_rows, most_parts, heads: tl.constexpr, rank: tl.constexpr,
    value_dim: tl.constexpr, block_m: tl.constexpr, block_v: tl.constexpr, block_c: tl.constexpr,
    block_r: tl.constexpr, block_s: tl.constexpr, at_once: tl.constexpr, pdl: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """Programs (tile of a value, head, tile of rows): add up the parts, and project the sums with
    the values' weights [H, V, R]: out [T, H V].

    Rows of requests with more than `most_rows` rows are skipped.
    """
    launch_dependents(pdl)
    head = tl.program_id(1)
    number, column = tl.program_id(0) * block_v + tl.arange(0, block_v), tl.arange(0, block_c)
    at = weights + head.to(tl.int64) * head_stride + number[:, None] * rank + column[None, :]
    weighed = (number < value_dim)[:, None] & (column < rank)[None, :]
    weight = tl.load(at, mask=weighed, other=0.0)
    if not early:
        wait_for_inputs(pdl)
    row = tl.program_id(2) * block_m + tl.arange(0, block_m)
    inside = row < num_rows
    request = request_of(query_start, requests, row, block_r)
    begins = tl.load(query_start + request, mask=inside, other=0)
    ends = tl.load(query_start + request + 1, mask=inside, other=0)
    context = tl.load(context_lens + request, mask=inside, other=0).to(tl.int32)
    inside &= ends - begins <= most_rows
    splits = tl.minimum(split_of_each(tl.maximum(context, 1) - 1) + 1, most_parts)
    splits = tl.where(inside & (context > 0), splits, 0)
    wait_for_inputs(pdl)
    most = tl.max(splits, axis=0)
    place = ((request * most_rows + row - begins) * heads + head) * most_parts
    exponents, totals, values = _parts_at(
        part, part_exponent, part_total, place, 0, splits, column, rank, at_once
    )
    exponent = exponents[0]
    for index in tl.static_range(1, at_once):
        exponent = tl.maximum(exponent, exponents[index])
    for start in range(at_once, most, block_s):
        split = start + tl.arange(0, block_s)
        inside_splits = split[None, :] < splits[:, None]
        of_splits = tl.load(
            part_exponent + place[:, None] + split[None, :], mask=inside_splits, other=float("-inf")
        )
        exponent = tl.maximum(exponent, tl.max(of_splits, axis=1))
    total = tl.zeros((block_m,), tl.float32)
    mixed = tl.zeros((block_m, block_c), tl.float32)
    total, mixed = _with_parts(total, mixed, exponent, exponents, totals, values, at_once)
    for start in range(at_once, most, at_once):
        exponents, totals, values = _parts_at(
            part, part_exponent, part_total, place, start, splits, column, rank, at_once
        )
        total, mixed = _with_parts(total, mixed, exponent, exponents, totals, values, at_once)
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    sums = tl.dot(weight, tl.trans(mixed.to(weight.dtype)), input_precision="ieee")
    target = out + row.to(tl.int64) * (heads * value_dim) + head * value_dim
    stored = inside[None, :] & (number < value_dim)[:, None]
    tl.store(target[None, :] + number[:, None], sums.to(out.dtype.element_ty), mask=stored)
