"""The kernels of attention for requests of few rows. How programs meet the work: `attention.py`.

The cached tokens of a request are folded split by split (`splits.py`), the splits of a group are
added up in their order, and then the groups. A run is what a program takes at once: a split, or a
group where there are programs enough without cutting finer; `combine_kernel` adds up the runs.

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
    columns,
    entries_of,
    finite,
    hidden,
    oldest_token,
    places_of,
    queries,
    rotated,
    sight,
    tokens_at,
)
from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs
from slipstream.kernels.triton.splits import group_of, group_start, split_of, split_start

NEW_ROWS = tl.constexpr(8)  # stored at once
SUM_COLUMNS = tl.constexpr(16)  # the fewest of a tile


@triton.jit
def _power_of_two(exponent):
    """2 ** exponent for integers up to 0, exactly; zero below the normal numbers."""
    bounded = tl.maximum(exponent, -127.0).to(tl.int32)
    return ((bounded + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _store_new(
    qkv, key_start, value_start, keys, values, positions, slots, first, rows, context, begin, end,
    row_stride, place_stride: tl.constexpr, key_weight, eps, cos_sin, causal: tl.constexpr,
    head_dim: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """One head of the request's rows whose tokens lie in [begin, end) goes to their slots.

    The new tokens are the last `rows` of the context.
    """
    half: tl.constexpr = head_dim // 2
    pair = tl.arange(0, block_d // 2)
    for start in range(0, tl.where(end > context - rows, rows, 0), NEW_ROWS):
        row = start + tl.arange(0, NEW_ROWS)
        position = tl.load(positions + first + row, mask=row < rows, other=0)
        slot = tl.load(slots + first + row, mask=row < rows, other=-1)
        token = position if causal else context - rows + row
        stored = (slot >= 0) & (token >= begin) & (token < end)
        inside = stored[:, None] & (pair < half)[None, :]
        source = (first + row).to(tl.int64) * row_stride
        moved = qkv + (source + value_start)[:, None] + pair[None, :]
        low = tl.load(moved, mask=inside, other=0.0)
        high = tl.load(moved + half, mask=inside, other=0.0)
        one, two = rotated(
            qkv, source + key_start, stored, position, key_weight, eps, cos_sin, head_dim, block_d
        )
        target = (slot * place_stride)[:, None] + pair[None, :]
        tl.store(keys + target, one.to(keys.dtype.element_ty), mask=inside)
        tl.store(keys + target + half, two.to(keys.dtype.element_ty), mask=inside)
        tl.store(values + target, low, mask=inside)
        tl.store(values + target + half, high, mask=inside)
    tl.debug_barrier()  # the other threads of this program read them next


@triton.jit
def _fold(
    query, key, value, exponent, total, mixed, token, row_begins, row_ends, row, rows, context,
    mask, mask_stride, scale, softcap, window, first_seen: tl.constexpr,
):  # fmt: skip
    """Adds one tile of tokens: (exponent, sums of weights, all alike, sums of weighted values).

    query [block_m, block_d]; key and value [block_n, block_d].
    """
    score = tl.dot(query, tl.trans(key), input_precision="ieee")
    score, factor = capped(score, scale, softcap)
    score = hidden(
        score,
        token,
        row_begins,
        row_ends,
        row,
        rows,
        context,
        mask,
        mask_stride,
        window,
        first_seen,
    )
    highest = tl.maximum(exponent, tl.ceil(tl.max(score, axis=1) * factor))
    base = finite(highest)
    negative = tl.zeros_like(score) - base[:, None]
    # Fused, as the compiler might do here and not there.
    weight = tl.exp2(tl.fma(score, tl.zeros_like(score) + factor, negative)).to(value.dtype)
    kept = _power_of_two(exponent - base)[:, None]
    # The tensor cores add in one order, however many warps there are.
    ones = tl.full((value.shape[0], SUM_COLUMNS), 1.0, value.dtype)
    total = tl.dot(weight, ones, total * kept, input_precision="ieee")
    mixed = tl.dot(weight, value, mixed * kept, input_precision="ieee")
    return highest, total, mixed


@triton.jit
def _added(exponent, total, mixed, more_exponent, more_total, more_mixed):
    """The sum of two folds."""
    highest = tl.maximum(exponent, more_exponent)
    kept = _power_of_two(exponent - finite(highest))[:, None]
    moved = _power_of_two(more_exponent - finite(highest))[:, None]
    return highest, total * kept + more_total * moved, mixed * kept + more_mixed * moved


@triton.jit
def _fold_run(
    query, keys, values, table, begin, end, row_begins, row_ends, row, rows, context, mask,
    mask_stride, scale, softcap, window, first_seen: tl.constexpr, place_stride: tl.constexpr,
    block_size: tl.constexpr, head_dim: tl.constexpr, block_n: tl.constexpr,
):  # fmt: skip
    """The fold of the tokens [begin, end): of each split on its own, then added up."""
    block_d: tl.constexpr = query.shape[1]
    exponent = tl.full((query.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((query.shape[0], SUM_COLUMNS), tl.float32)
    mixed = tl.zeros(query.shape, tl.float32)
    sum_exponent, sum_total, sum_mixed = exponent, total, mixed
    until = split_start(split_of(begin) + 1)
    entries = entries_of(table, begin, end, block_size, block_n)
    for start in range(begin, end, block_n):
        token = start + tl.arange(0, block_n)
        places = places_of(entries, start, place_stride, block_size, block_n)
        key = tokens_at(keys, places, token < end, head_dim, block_d, True)
        value = tokens_at(values, places, token < end, head_dim, block_d, True)
        entries = entries_of(table, start + block_n, end, block_size, block_n)
        exponent, total, mixed = _fold(
            query, key, value, exponent, total, mixed, token, row_begins, row_ends, row, rows,
            context, mask, mask_stride, scale, softcap, window, first_seen,
        )  # fmt: skip
        if start + block_n == until:
            sum_exponent, sum_total, sum_mixed = _added(
                sum_exponent, sum_total, sum_mixed, exponent, total, mixed
            )
            exponent = tl.full((query.shape[0],), float("-inf"), tl.float32)
            total = tl.zeros((query.shape[0], SUM_COLUMNS), tl.float32)
            mixed = tl.zeros(query.shape, tl.float32)
            until = split_start(split_of(until) + 1)
    exponent, total, mixed = _added(sum_exponent, sum_total, sum_mixed, exponent, total, mixed)
    return exponent, tl.max(total, axis=1), mixed


@triton.jit
def _prefetch(
    keys, values, table, begin, end, place_stride: tl.constexpr, block_size: tl.constexpr,
    head_dim: tl.constexpr, query_columns: tl.constexpr, block_n: tl.constexpr,
):  # fmt: skip
    """Asks for the first tile of a run, without waiting for it."""
    inside = begin + tl.arange(0, block_n) < end
    entries = entries_of(table, begin, end, block_size, block_n)
    places = places_of(entries, begin, place_stride, block_size, block_n)
    places = tl.where(inside, places, 0)
    numbers: tl.constexpr = 1024 // keys.dtype.element_ty.primitive_bitwidth  # of 128 bytes
    # At least one line; the last one twice where the head is no power of two.
    lines: tl.constexpr = (query_columns + numbers - 1) // numbers
    line = tl.minimum(tl.arange(0, lines) * numbers, head_dim - 1)
    for pages in tl.static_range(2):
        source = (values if pages else keys) + places[:, None] + line[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [source], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _runs(context, rows, window, least_groups):
    """(whether a run is a group, the first run that rows of a request see, the last)."""
    oldest = group_of(oldest_token(context, rows, window))
    newest = tl.maximum(context, 1) - 1
    grouped = group_of(newest) - oldest + 1 >= least_groups
    first_run = tl.where(grouped, oldest, split_of(oldest_token(context, rows, window)))
    return grouped, first_run, tl.where(grouped, group_of(newest), split_of(newest))


@triton.jit
def _bounds(run, grouped, oldest, context, block_n: tl.constexpr):
    """The tokens of a run that a row may see."""
    begin = tl.where(grouped, group_start(run), split_start(run))
    end = tl.where(grouped, group_start(run + 1), split_start(run + 1))
    return tl.maximum(begin, oldest // block_n * block_n), tl.minimum(end, context)


@triton.jit
def _with_sink(exponent, total, mixed, sink):
    """A sink is a score without a value; its exponent is that of a fold."""
    highest = tl.maximum(exponent, tl.ceil(sink))
    kept = _power_of_two(exponent - highest)
    return total * kept + tl.exp2(sink - highest), mixed * kept


@triton.jit
def _write(
    exponent, total, mixed, out, part, part_exponent, part_total, place, run, runs, most_runs, head,
    inside, sinks, head_dim: tl.constexpr,
):  # fmt: skip
    """The fold of a run, to be added up; or the result, where there is no other run."""
    number = columns(head_dim, mixed.shape[1])
    stored = inside[:, None] & (number >= 0)[None, :]
    if runs == 1:
        weights, result = tl.zeros_like(mixed) + total[:, None], mixed
        if sinks is not None:
            sink = tl.load(sinks + head).to(tl.float32)[:, None] * LOG2_E
            weights, result = _with_sink(exponent[:, None], weights, result, sink)
        result = result / tl.where(weights == 0.0, 1.0, weights)  # zero, if nothing was seen
        whole = out + place[:, None] * head_dim + number[None, :]
        tl.store(whole, result.to(out.dtype.element_ty), mask=stored)
    else:
        target = place * most_runs + run
        tl.store(part_exponent + target, exponent, mask=inside)
        tl.store(part_total + target, total, mask=inside)
        tl.store(part + target[:, None] * head_dim + number[None, :], mixed, mask=stored)


@triton.jit
def short_kernel(
    qkv, keys, values, out, part, part_exponent, part_total, query_start, context_lens, tables,
    positions, slots, mask, mask_stride, sinks, query_weight, key_weight, eps, cos_sin, row_stride,
    table_stride, scale, softcap, window, most_rows, most_runs, least_groups,
    kv_heads: tl.constexpr, groups: tl.constexpr, head_dim: tl.constexpr, block_size: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr, pdl: tl.constexpr,
    early: tl.constexpr, first_seen: tl.constexpr, causal: tl.constexpr,
):  # fmt: skip
    """Programs (KV head and tile, request, lane): a lane does every so-manieth run of a tile.

    Folds go to part [T, Hq, most_runs, head_dim], and to part_exponent and part_total. With
    `cos_sin`, queries and keys are as the matmul left them: the rows of a run's own tokens are
    stored by the programs that do the run, before they read them; several tiles store the same.
    """
    launch_dependents(pdl)
    if not early:
        wait_for_inputs(pdl)
    place_stride: tl.constexpr = kv_heads * head_dim
    tile, kv_head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    request, lane = tl.program_id(1), tl.program_id(2)
    first = tl.load(query_start + request).to(tl.int32)
    rows = tl.load(query_start + request + 1).to(tl.int32) - first
    context = tl.load(context_lens + request).to(tl.int32)
    grouped, first_run, last_run = _runs(context, rows, window, least_groups)
    runs = last_run - first_run + 1
    if (rows > most_rows) | (tile * block_m >= rows * groups) | (lane >= runs):
        wait_for_inputs(pdl)
        return
    row, head, position, begins, ends = sight(
        positions, first, rows, context, tile, kv_head, window, causal, groups, block_m
    )
    oldest = oldest_token(context, rows, window)
    keys += kv_head * head_dim
    values += kv_head * head_dim
    table = tables + request.to(tl.int64) * table_stride
    known = context if cos_sin is None else context - rows  # tokens that are stored already
    if early:
        begin, end = _bounds(last_run - lane, grouped, oldest, context, block_n)
        _prefetch(
            keys, values, table, begin, tl.minimum(end, known), place_stride, block_size, head_dim,
            block_d, block_n,
        )  # fmt: skip
    wait_for_inputs(pdl)
    source = (first + row).to(tl.int64) * row_stride + head * head_dim
    query = queries(
        qkv, source, row < rows, position, query_weight, eps, cos_sin, head_dim, block_d
    )
    new_mask = mask if mask is None else mask + first.to(tl.int64) * mask_stride
    place = (first + row).to(tl.int64) * kv_heads * groups + head
    for step in range(lane, runs, tl.num_programs(2)):
        begin, end = _bounds(last_run - step, grouped, oldest, context, block_n)  # long ones first
        if cos_sin is not None:
            _store_new(
                qkv, (kv_heads * groups + kv_head) * head_dim,
                (kv_heads * groups + kv_heads + kv_head) * head_dim, keys, values, positions,
                slots, first, rows, context, begin, end, row_stride, place_stride, key_weight,
                eps, cos_sin, mask is None, head_dim, block_d,
            )  # fmt: skip
        exponent, total, mixed = _fold_run(
            query, keys, values, table, begin, end, begins, ends, row, rows, context, new_mask,
            mask_stride, scale, softcap, window, first_seen, place_stride, block_size, head_dim,
            block_n,
        )  # fmt: skip
        _write(
            exponent, total, mixed, out, part, part_exponent, part_total, place, runs - 1 - step,
            runs, most_runs, head, row < rows, sinks, head_dim,
        )  # fmt: skip


@triton.jit
def combine_kernel(
    part, part_exponent, part_total, out, query_start, context_lens, sinks, window, most_rows,
    most_runs, least_groups, heads: tl.constexpr, head_dim: tl.constexpr, block_d: tl.constexpr,
    block_s: tl.constexpr, at_once: tl.constexpr, pdl: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Programs (lane, request): sums over runs; a lane does every so-manieth row and head.

    Runs that a row does not see add nothing to it.
    """
    launch_dependents(pdl)
    if not early:
        wait_for_inputs(pdl)
    request = tl.program_id(1)
    first = tl.load(query_start + request).to(tl.int32)
    rows = tl.load(query_start + request + 1).to(tl.int32) - first
    context = tl.load(context_lens + request).to(tl.int32)
    grouped, first_run, last_run = _runs(context, rows, window, least_groups)
    lines = tl.where((rows > most_rows) | (first_run == last_run), 0, rows * heads)
    wait_for_inputs(pdl)
    column = tl.arange(0, block_d)
    for own in range(tl.program_id(0), lines, tl.num_programs(0)):
        line = first.to(tl.int64) * heads + own
        place = line * most_runs - first_run
        exponent = tl.full((), float("-inf"), tl.float32)
        for start in range(first_run, last_run + 1, block_s):
            run = start + tl.arange(0, block_s)
            known = tl.load(part_exponent + place + run, mask=run <= last_run, other=float("-inf"))
            exponent = tl.maximum(exponent, tl.max(known, axis=0))
        total, mixed = _sum(
            part, part_exponent, part_total, place, exponent, grouped, first_run, last_run,
            head_dim, block_d, at_once,
        )  # fmt: skip
        if sinks is not None:
            sink = tl.load(sinks + line % heads).to(tl.float32) * LOG2_E
            total, mixed = _with_sink(exponent, total, mixed, sink)
        result = mixed / tl.where(total == 0.0, 1.0, total)
        target = out + line * head_dim + column
        tl.store(target, result.to(out.dtype.element_ty), mask=column < head_dim)


@triton.jit
def _sum(
    part, part_exponent, part_total, place, exponent, grouped, first_run, last_run,
    head_dim: tl.constexpr, block_d: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    """(sum of weights, sum of weighted values [block_d]) of a line's runs, group by group.

    So many runs are loaded `at_once`; they are added one after the other.
    """
    column = tl.arange(0, block_d)
    total = tl.zeros((), tl.float32)
    mixed = tl.zeros((block_d,), tl.float32)
    sum_total, sum_mixed = total, mixed
    for start in range(first_run, last_run + 1, at_once):
        for step in tl.static_range(at_once):
            run = start + step
            known = tl.load(part_exponent + place + run, mask=run <= last_run, other=float("-inf"))
            moved = _power_of_two(known - finite(exponent))
            more = tl.load(part_total + place + run, mask=run <= last_run, other=0.0)
            inside = (column < head_dim) & (run + 0 * column <= last_run)
            values = tl.load(part + (place + run) * head_dim + column, mask=inside, other=0.0)
            sum_total += more * moved
            sum_mixed += values * moved
            after = split_start(run + 1)
            closed = tl.where(grouped, 1, group_of(after) - group_of(split_start(run))) > 0
            total += tl.where(closed, sum_total, 0.0)
            mixed += tl.where(closed, sum_mixed, 0.0)
            sum_total = tl.where(closed, 0.0, sum_total)
            sum_mixed = tl.where(closed, 0.0, sum_mixed)
    return total + sum_total, mixed + sum_mixed
