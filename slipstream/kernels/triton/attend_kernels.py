"""The kernels of attention for requests of few rows. How programs meet the work: `attend.py`.

The cached tokens of a request are folded split by split (`splits.py`), the splits of a group are
added up in their order, and then the groups, whoever does it: one program for a whole group, or
one for each split and `combine_kernel` for the rest.

Weights are powers of two against an exponent: the largest score seen, in units of log 2, rounded
up to an integer. So a sum is moved from one exponent to another without rounding, and its bits
follow from what is added in which order, not from where the exponent changed. A row that sees
nothing of a tile is left as it was, bit for bit, which makes it independent of the rows beside it.
"""

import triton
import triton.language as tl

from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs
from slipstream.kernels.triton.splits import group_of, group_start, split_of, split_start

LOG2_E = tl.constexpr(1.4426950408889634)
PREFETCHED = tl.constexpr(128)
NEW_ROWS = tl.constexpr(16)  # no request of these kernels has more


@triton.jit
def power_of_two(exponent):
    """2 ** exponent for integers up to 0, exactly; zero below the normal numbers."""
    bounded = tl.maximum(exponent, -127.0).to(tl.int32)
    return ((bounded + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def finite(exponent):
    """Where nothing has been seen, any exponent will do."""
    return tl.where(exponent == float("-inf"), 0.0, exponent)


@triton.jit
def rotated(
    source, place, inside, position, weight, eps, cos_sin, head_dim: tl.constexpr,
    block_d: tl.constexpr,
):  # fmt: skip
    """Heads [L, head_dim] at `place` [L] of `source`, normed where there is a weight, and turned.

    A number and the one it is turned with stand half a head apart: both are loaded.
    """
    half: tl.constexpr = head_dim // 2
    column = tl.arange(0, block_d)
    across = tl.where(column < half, column + half, column - half)
    loaded = inside[:, None] & (column < head_dim)[None, :]
    own = tl.load(source + place[:, None] + column[None, :], mask=loaded, other=0.0).to(tl.float32)
    other = tl.load(source + place[:, None] + across[None, :], mask=loaded, other=0.0)
    other = other.to(tl.float32)
    turn = cos_sin + position[:, None] * head_dim + (column % half)[None, :]
    cos = tl.load(turn, mask=loaded, other=0.0)
    sin = tl.load(turn + half, mask=loaded, other=0.0)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(own * own, axis=1) / head_dim + eps)[:, None]
        of_own = tl.load(weight + column, mask=column < head_dim, other=0.0).to(tl.float32)
        of_other = tl.load(weight + across, mask=column < head_dim, other=0.0).to(tl.float32)
        # Rounded to the model's dtype, as between two layers.
        own = (own * scale * of_own[None, :]).to(source.dtype.element_ty).to(tl.float32)
        other = (other * scale * of_other[None, :]).to(source.dtype.element_ty).to(tl.float32)
    return own * cos + other * tl.where(column < half, -1.0, 1.0)[None, :] * sin


@triton.jit
def _store_new(
    key, value, keys, values, positions, slots, first, rows, context, begin, end, kv_head,
    row_stride, place_stride, key_weight, eps, cos_sin, causal: tl.constexpr,
    head_dim: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """Keys and values of the request's rows whose tokens lie in [begin, end) go to their slots."""
    row = tl.arange(0, NEW_ROWS)
    position = tl.load(positions + first + row, mask=row < rows, other=0)
    slot = tl.load(slots + first + row, mask=row < rows, other=-1)
    token = position if causal else context - rows + row
    stored = (slot >= 0) & (token >= begin) & (token < end)
    column = tl.arange(0, block_d)
    inside = stored[:, None] & (column < head_dim)[None, :]
    source = (first + row).to(tl.int64) * row_stride + kv_head * head_dim
    target = (slot * place_stride + kv_head * head_dim)[:, None] + column[None, :]
    turned = rotated(key, source, stored, position, key_weight, eps, cos_sin, head_dim, block_d)
    tl.store(keys + target, turned.to(keys.dtype.element_ty), mask=inside)
    moved = tl.load(value + source[:, None] + column[None, :], mask=inside, other=0.0)
    tl.store(values + target, moved.to(values.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # the other threads of this program read them next


@triton.jit
def _fold(
    query, key, value, exponent, total, mixed, token, end, row_begins, row_ends, row, rows, context,
    mask, mask_stride, scale, softcap,
):  # fmt: skip
    """Adds one tile of tokens: (exponent, sum of weights, sum of weighted values).

    query [block_m, block_d]; key and value [block_n, block_d] of the tokens below `end`; a row sees
    the tokens [row_begins, row_ends), and of the request's new tokens those that its line of `mask`
    names, where there is one.
    """
    score = tl.dot(query, tl.trans(key), input_precision="ieee")
    factor = scale * LOG2_E
    if softcap is not None:
        # tanh by an exponential that may overflow to infinity and then still gives 1.
        power = tl.exp2(score * (scale * 2.0 * LOG2_E / softcap))
        score = 1.0 - 2.0 / (power + 1.0)
        factor = softcap * LOG2_E
    seen = (token[None, :] < row_ends[:, None]) & (token[None, :] >= row_begins[:, None])
    seen &= (token < end)[None, :]
    if mask is not None:
        new = (token - (context - rows))[None, :]
        line = mask + row[:, None] * mask_stride + new
        asked = (new >= 0) & seen & (row < rows)[:, None]
        seen &= (new < 0) | (tl.load(line, mask=asked, other=0) != 0)
    score = tl.where(seen, score, float("-inf"))
    highest = tl.maximum(exponent, tl.ceil(tl.max(score, axis=1) * factor))
    base = finite(highest)
    weight = tl.exp2(tl.fma(score, tl.zeros_like(score) + factor, tl.zeros_like(score) - base[:, None]))
    kept = power_of_two(exponent - base)
    total = total * kept + tl.sum(weight, axis=1)
    mixed = tl.dot(weight.to(value.dtype), value, mixed * kept[:, None], input_precision="ieee")
    return highest, total, mixed


@triton.jit
def _added(exponent, total, mixed, more_exponent, more_total, more_mixed):
    """The sum of two folds."""
    highest = tl.maximum(exponent, more_exponent)
    kept = power_of_two(exponent - finite(highest))
    moved = power_of_two(more_exponent - finite(highest))
    total = total * kept + more_total * moved
    return highest, total, mixed * kept[:, None] + more_mixed * moved[:, None]


@triton.jit
def _places(table, token, inside, place_stride, block_size: tl.constexpr):
    """Where tokens stand in the cache, in numbers."""
    block = tl.load(table + token // block_size, mask=inside, other=0).to(tl.int64)
    return (block * block_size + token % block_size) * place_stride


@triton.jit
def _tokens(pages, places, inside, head_dim: tl.constexpr, block_d: tl.constexpr):
    column = tl.arange(0, block_d)
    loaded = inside[:, None]
    if head_dim != block_d:
        loaded = loaded & (column < head_dim)[None, :]
    return tl.load(pages + places[:, None] + column[None, :], mask=loaded, other=0.0)


@triton.jit
def _prefetch(keys, values, table, begin, end, place_stride, block_size: tl.constexpr):
    """Asks for the first tokens of a run, without waiting for them."""
    token = begin + tl.arange(0, PREFETCHED)
    inside = token < end
    places = _places(table, tl.where(inside, token, begin), token >= 0, place_stride, block_size)
    half = tl.arange(0, 2) * 64
    for pages in tl.static_range(2):
        source = (values if pages else keys) + places[:, None] + half[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [source], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _bounds(run, oldest, context, grouped: tl.constexpr, block_n: tl.constexpr):
    """The tokens of a run: a group, or a split."""
    if grouped:
        begin, end = group_start(run), group_start(run + 1)
    else:
        begin, end = split_start(run), split_start(run + 1)
    return tl.maximum(begin, oldest // block_n * block_n), tl.minimum(end, context)


@triton.jit
def _run_of(token, grouped: tl.constexpr):
    return group_of(token) if grouped else split_of(token)


@triton.jit
def _closes_group(split):
    after = split_start(split + 1)
    return group_start(group_of(after)) == after


@triton.jit
def _finished(exponent, total, mixed, head, sinks):
    """Folds of all that a row sees -> its values; a sink is a score without a value."""
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        highest = tl.maximum(exponent, tl.ceil(sink))
        kept = power_of_two(exponent - highest)
        total = total * kept + tl.exp2(sink - highest)
        mixed = mixed * kept[:, None]
    return mixed / tl.where(total == 0.0, 1.0, total)[:, None]  # a row that sees nothing is zero


@triton.jit
def short_kernel(
    query, key, value, keys, values, out, part, part_exponent, part_total, query_start,
    context_lens, tables, positions, slots, mask, mask_stride, sinks, query_weight, key_weight,
    eps, cos_sin, row_stride, place_stride, table_stride, scale, softcap, window, most_rows,
    most_runs, kv_heads, groups: tl.constexpr, head_dim: tl.constexpr, block_size: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr, grouped: tl.constexpr,
    pdl: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Programs (KV head and tile, request, lane): a lane does every so-manieth run of a tile.

    A run is a split of the context or a group of them. Writes its fold to part
    [T, Hq, most_runs, head_dim] and two scalars, or, where it is all of the context, the result.
    With `cos_sin` queries and keys are those of the matmul, and the new ones of a run are stored
    by the program that does the run, before it reads them; several tiles store the same twice.
    """
    launch_dependents(pdl)
    if not early:
        wait_for_inputs(pdl)
    tile = tl.program_id(0) // kv_heads
    kv_head = tl.program_id(0) % kv_heads
    request = tl.program_id(1)
    first = tl.load(query_start + request).to(tl.int32)
    rows = tl.load(query_start + request + 1).to(tl.int32) - first
    context = tl.load(context_lens + request).to(tl.int32)
    if (rows > most_rows) | (tile * block_m >= rows * groups):
        wait_for_inputs(pdl)
        return
    line = tile * block_m + tl.arange(0, block_m)
    row = line // groups
    head = kv_head * groups + line % groups
    valid = row < rows
    column = tl.arange(0, block_d)
    stored = valid[:, None] & (column < head_dim)[None, :]
    oldest = 0
    if window is not None:
        oldest = tl.maximum(context - rows - window + 1, 0)
    first_run = _run_of(oldest, grouped)
    last_run = tl.where(context > 0, _run_of(tl.maximum(context, 1) - 1, grouped), first_run)
    known = context  # tokens that are in the cache already
    if cos_sin is not None:
        known = context - rows
    table = tables + request.to(tl.int64) * table_stride
    keys += kv_head * head_dim
    values += kv_head * head_dim
    new_mask = mask
    if mask is not None:
        new_mask = mask + first.to(tl.int64) * mask_stride
    position = tl.load(positions + first + row, mask=valid, other=0)
    # A row of no meaning may stand anywhere.
    own = tl.maximum(position.to(tl.int32), context - rows)
    ends = tl.minimum(own + 1, context) if mask is None else tl.zeros_like(own) + context
    begins = tl.zeros_like(own)
    if window is not None:
        begins = tl.maximum(own - window + 1, 0)
    lane = tl.program_id(2)
    for step in range(lane, last_run - first_run + 1, tl.num_programs(2)):
        run = last_run - step  # the long ones first
        begin, end = _bounds(run, oldest, context, grouped, block_n)
        if early:
            _prefetch(keys, values, table, begin, tl.minimum(end, known), place_stride, block_size)
            wait_for_inputs(pdl)
        source = (first + row).to(tl.int64) * row_stride + head * head_dim
        if cos_sin is None:
            lines = tl.load(query + source[:, None] + column[None, :], mask=stored, other=0.0)
        else:
            lines = rotated(
                query, source, valid, position, query_weight, eps, cos_sin, head_dim, block_d
            ).to(query.dtype.element_ty)
            if end > known:
                _store_new(
                    key, value, keys - kv_head * head_dim, values - kv_head * head_dim, positions,
                    slots, first, rows, context, begin, end, kv_head, row_stride, place_stride,
                    key_weight, eps, cos_sin, mask is None, head_dim, block_d,
                )  # fmt: skip
        exponent = tl.full((block_m,), float("-inf"), tl.float32)
        total = tl.zeros((block_m,), tl.float32)
        mixed = tl.zeros((block_m, block_d), tl.float32)
        sum_exponent, sum_total, sum_mixed = exponent, total, mixed
        for start in range(begin, end, block_n):
            token = start + tl.arange(0, block_n)
            inside = token < end
            places = _places(table, token, inside, place_stride, block_size)
            key_tile = _tokens(keys, places, inside, head_dim, block_d)
            value_tile = _tokens(values, places, inside, head_dim, block_d)
            exponent, total, mixed = _fold(
                lines, key_tile, value_tile, exponent, total, mixed, token, end, begins,
                ends, row, rows, context, new_mask, mask_stride, scale, softcap,
            )  # fmt: skip
            if grouped and start + block_n == split_start(split_of(start) + 1):
                sum_exponent, sum_total, sum_mixed = _added(
                    sum_exponent, sum_total, sum_mixed, exponent, total, mixed
                )
                exponent = tl.full((block_m,), float("-inf"), tl.float32)
                total = tl.zeros((block_m,), tl.float32)
                mixed = tl.zeros((block_m, block_d), tl.float32)
        if grouped:
            exponent, total, mixed = _added(
                sum_exponent, sum_total, sum_mixed, exponent, total, mixed
            )
        place = (first + row).to(tl.int64) * kv_heads * groups + head
        if grouped and first_run == last_run:
            result = _finished(exponent, total, mixed, head, sinks).to(out.dtype.element_ty)
            tl.store(out + place[:, None] * head_dim + column[None, :], result, mask=stored)
        else:
            place = place * most_runs + run
            tl.store(part_exponent + place, exponent, mask=valid)
            tl.store(part_total + place, total, mask=valid)
            tl.store(part + place[:, None] * head_dim + column[None, :], mixed, mask=stored)


@triton.jit
def combine_kernel(
    part, part_exponent, part_total, out, query_start, context_lens, positions, sinks, window,
    most_rows, most_runs, heads, causal: tl.constexpr, head_dim: tl.constexpr,
    block_d: tl.constexpr, block_s: tl.constexpr, grouped: tl.constexpr, pdl: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """Programs (query head, row, request): the sum over the runs that the row sees."""
    launch_dependents(pdl)
    if not early:
        wait_for_inputs(pdl)
    head, row, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(query_start + request).to(tl.int32)
    rows = tl.load(query_start + request + 1).to(tl.int32) - first
    context = tl.load(context_lens + request).to(tl.int32)
    oldest = 0
    if window is not None:
        oldest = tl.maximum(context - rows - window + 1, 0)
    first_run = _run_of(oldest, grouped)
    last_run = tl.where(context > 0, _run_of(tl.maximum(context, 1) - 1, grouped), first_run)
    if (rows > most_rows) | (row >= rows) | (grouped and first_run == last_run):
        wait_for_inputs(pdl)
        return
    if context <= 0:
        last_run = first_run - 1
    wait_for_inputs(pdl)
    place = ((first + row).to(tl.int64) * heads + head) * most_runs
    exponent = float("-inf")
    for start in range(first_run, last_run + 1, block_s):
        run = start + tl.arange(0, block_s)
        found = tl.load(part_exponent + place + run, mask=run <= last_run, other=float("-inf"))
        exponent = tl.maximum(exponent, tl.max(found, axis=0))
    column = tl.arange(0, block_d)
    total = tl.zeros((1,), tl.float32)
    mixed = tl.zeros((1, block_d), tl.float32)
    sum_total, sum_mixed = total, mixed
    for run in tl.range(first_run, last_run + 1, loop_unroll_factor=8):
        moved = power_of_two(tl.load(part_exponent + place + run) - finite(exponent))
        source = part + (place + run) * head_dim + column[None, :]
        values = tl.load(source, mask=(column < head_dim)[None, :], other=0.0)
        sum_total += tl.load(part_total + place + run) * moved
        sum_mixed += values * moved
        closed = True if grouped else _closes_group(run)
        if closed:
            total += sum_total
            mixed += sum_mixed
            sum_total = tl.zeros((1,), tl.float32)
            sum_mixed = tl.zeros((1, block_d), tl.float32)
    total += sum_total
    mixed += sum_mixed
    head = head + tl.zeros((1,), tl.int32)
    result = _finished(exponent + tl.zeros((1,), tl.float32), total, mixed, head, sinks)
    target = out + ((first + row).to(tl.int64) * heads + head)[:, None] * head_dim + column[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=(column < head_dim)[None, :])
