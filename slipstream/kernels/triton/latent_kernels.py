"""The first two kernels of latent attention for requests of few rows; `latent.py` launches them.

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
    finite,
    hidden,
    power_of_two,
    sight,
    split_of_lane,
    split_start,
)
from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs

ASKED = tl.constexpr(128)  # tokens at a time, one a thread
TASKS = tl.constexpr(3)  # of a row, beside the heads' products


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
def _store_normed(
    source, target, stored, norm_weight, eps, rank: tl.constexpr, block_c: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    """Norm a row's latents once they are there, and store them; `stored` is 0 or 1."""
    column = tl.arange(0, block_c)
    gain = tl.load(norm_weight + column, mask=column < rank, other=0.0).to(tl.float32)
    wait_for_inputs(pdl)
    value = tl.load(source + column, mask=column < rank, other=0.0)
    wide = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, axis=0) / rank + eps)
    normed = (wide * factor * gain).to(value.dtype)
    tl.store(target + column, normed, mask=column < rank * stored)


@triton.jit(do_not_specialize=["num_rows"])
def absorb_kernel(
    queries, latents, weights, norm_weight, eps, cos_sin, query_scales, positions, slots, absorbed,
    pages, query_stride, latent_stride, head_stride, num_rows, heads: tl.constexpr,
    rank: tl.constexpr, plain_dim: tl.constexpr, rotary_dim: tl.constexpr, block_m: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr, block_h: tl.constexpr, block_c: tl.constexpr,
    block_p: tl.constexpr, pdl: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Programs (tile of the rank, head, tile of rows): queries [T, H (N + P)] to `absorbed`
    [T, H, R + P]. After the last head, three programs per row store its normed latents, their
    rotated part, and rotate its queries.
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
        row = begin + tl.arange(0, block_m)
        inside = row < num_rows
        if query_scales is not None:
            each_by = tl.load(query_scales + tl.load(positions + row, mask=inside, other=0))
        wait_for_inputs(pdl)
        source = queries + row.to(tl.int64) * query_stride + head * (plain_dim + rotary_dim)
        loaded = inside[:, None] & (depth < plain_dim)[None, :]
        x = tl.load(source[:, None] + depth[None, :], mask=loaded, other=0.0)
        sums = tl.dot(tl.trans(weight), tl.trans(x), input_precision="ieee")
        if query_scales is not None:
            sums *= each_by[None, :]
        place = (row.to(tl.int64) * heads + head) * width
        stored = inside[None, :] & (column < rank)[:, None]
        numbers = sums.to(absorbed.dtype.element_ty)
        tl.store(absorbed + place[None, :] + column[:, None], numbers, mask=stored)
    else:
        task = (head - heads) * tl.num_programs(0) + tile
        own = (begin + task // TASKS).to(tl.int64)
        if (task < TASKS * block_m) & (own < num_rows):
            position, slot = tl.load(positions + own), tl.load(slots + own)
            latent, page = latents + own * latent_stride, pages + slot * width
            stored = (slot >= 0).to(tl.int32)
            if task % TASKS == 0:
                _store_normed(latent, page, stored, norm_weight, eps, rank, block_c, pdl)
            else:
                cos, sin = _turns(cos_sin, position, rotary_dim, block_p)
                by = 1.0
                if query_scales is not None:
                    by = tl.load(query_scales + position)
                wait_for_inputs(pdl)
                if task % TASKS == 1:
                    zero = tl.arange(0, 1)
                    at = rank + zero
                    _turn(latent + at, page + at, zero < stored, cos, sin, 1.0, rotary_dim)
                else:
                    line = tl.arange(0, block_h)
                    each = queries + own * query_stride + line * (plain_dim + rotary_dim)
                    target = absorbed + (own * heads + line) * width + rank
                    _turn(each + plain_dim, target, line < heads, cos, sin, by, rotary_dim)
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
def groups_of(table, start, end, block_size: tl.constexpr, block_n: tl.constexpr):
    """[block_n // G] int32: where the cache has every G-th token from `start` on, counted in
    tokens; G tokens lie side by side. `start` is a multiple of block_n, and tokens from `end` on
    are taken as the one before it.
    """
    apart: tl.constexpr = block_size & -block_size
    size: tl.constexpr = apart if apart < block_n else block_n
    token = tl.minimum(start + tl.arange(0, block_n // size) * size, tl.maximum(end, 1) - 1)
    return tl.load(table + token // block_size) * block_size + token % block_size


@triton.jit
def places_in(groups, start, end, width: tl.constexpr, block_n: tl.constexpr):
    """[block_n] int64: where the rows of the tokens from `start` on begin in the cache; the last
    row's place for tokens from `end` on. So loads need no mask: their scores are hidden."""
    size: tl.constexpr = block_n // groups.shape[0]
    unit: tl.constexpr = width & -width  # so that 32 bits are enough for all but the last product
    last = end - 1 - start - tl.arange(0, groups.shape[0]) * size  # of each group
    within = tl.minimum(tl.arange(0, size)[None, :], tl.maximum(last, 0)[:, None])
    places = tl.reshape((groups[:, None] + within) * (width // unit), (block_n,))
    return tl.multiple_of(places.to(tl.uint32).to(tl.int64) * unit, unit)


@triton.jit
def latents_at(
    source, places, inside, rank: tl.constexpr, rotary_dim: tl.constexpr, block_c: tl.constexpr,
    block_p: tl.constexpr,
):  # fmt: skip
    """Rows at `places` [L]: (latents [L, block_c], rotated part [L, block_p]); zeros if not
    `inside`, unless that is None."""
    column, pair = tl.arange(0, block_c), tl.arange(0, block_p)
    # A thread's column is added first, so that it takes one instruction for each row.
    at, turned_at = (source + column)[None, :], (source + rank + pair)[None, :]
    latents = _numbers_at(at + places[:, None], column, inside, rank, block_c)
    return latents, _numbers_at(turned_at + places[:, None], pair, inside, rotary_dim, block_p)


@triton.jit
def _numbers_at(at, column, inside, size: tl.constexpr, block: tl.constexpr):
    if inside is not None:
        loaded = inside[:, None]
        if block != size:
            loaded = loaded & (column < size)[None, :]
        value = tl.load(at, mask=loaded, other=0.0)
    elif block != size:
        value = tl.load(at, mask=(column < size)[None, :], other=0.0)
    else:
        value = tl.load(at)
    return value


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
    groups = groups_of(table, begin, end, block_size, block_n)
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
            at = places_in(groups, start, end, width, block_n)
            groups = groups_of(table, start + block_n, end, block_size, block_n)
            latents, turned = latents_at(pages, at, None, rank, rotary_dim, block_c, block_p)
            exponent, total, mixed = _fold(
                query, turned_query, latents, turned, exponent, total, mixed, token, begins, ends,
                row, rows, words, tree_start, scale, first_seen,
            )  # fmt: skip
        begin, end = end, tl.minimum(split_start(index + 2), context)
        groups = groups_of(table, begin, end, block_size, block_n)
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
