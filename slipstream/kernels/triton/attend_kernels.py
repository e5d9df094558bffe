"""The kernels of attention for requests of few rows. How programs meet the work: `attend.py`.

The cached tokens of a request are folded split by split (`splits.py`), the splits of a group are
added up in their order, and then the groups. A program takes one split or a whole group of them,
as a request's context and the number of programs suggest, and `combine_kernel` does the rest.

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
PREFETCHED = tl.constexpr(128)  # tokens
NEW_ROWS = tl.constexpr(8)  # stored at once
MOST_LEVELS = tl.constexpr(10)
SUM_COLUMNS = tl.constexpr(16)
COMBINED = tl.constexpr(16)  # runs loaded at once
ENOUGH = tl.constexpr(256)  # programs to keep the machine busy


@triton.jit
def power_of_two(exponent):
    """2 ** exponent for integers up to 0, exactly; zero below the normal numbers."""
    bounded = tl.maximum(exponent, -127.0).to(tl.int32)
    return ((bounded + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def tree_sum(value):
    """[L, C] -> [L], C a power of two: neighbours first, so that no layout changes the bits."""
    lines: tl.constexpr = value.shape[0]
    for _ in tl.static_range(MOST_LEVELS):
        if value.shape[1] > 1:
            value = tl.sum(tl.reshape(value, (lines, value.shape[1] // 2, 2)), axis=2)
    return tl.reshape(value, (lines,))


@triton.jit
def finite(exponent):
    """Where nothing has been seen, any exponent will do."""
    return tl.where(exponent == float("-inf"), 0.0, exponent)


@triton.jit
def columns(head_dim: tl.constexpr, block_d: tl.constexpr):
    """Which number of a head stands in each column of a tile, -1 for none.

    Either half of the head has half of the columns.
    """
    column = tl.arange(0, block_d)
    if head_dim != block_d:
        half: tl.constexpr = head_dim // 2
        block_half: tl.constexpr = block_d // 2
        number = tl.where(column < block_half, column, column - block_half + half)
        column = tl.where(column % block_half < half, number, -1)
    return column


@triton.jit
def rotated(
    source, place, inside, position, weight, eps, cos_sin, head_dim: tl.constexpr,
    block_d: tl.constexpr,
):  # fmt: skip
    """Heads at `place` [L] of `source`, normed where there is a weight, and turned: two halves."""
    half: tl.constexpr = head_dim // 2
    pair = tl.arange(0, block_d // 2)
    loaded = inside[:, None] & (pair < half)[None, :]
    start = source + place[:, None] + pair[None, :]
    first = tl.load(start, mask=loaded, other=0.0).to(tl.float32)
    second = tl.load(start + half, mask=loaded, other=0.0).to(tl.float32)
    turn = cos_sin + position[:, None] * head_dim + pair[None, :]
    cos = tl.load(turn, mask=loaded, other=0.0)
    sin = tl.load(turn + half, mask=loaded, other=0.0)
    if weight is not None:
        one = tl.load(weight + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
        two = tl.load(weight + half + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
        squares = tree_sum(first * first + second * second)
        scale = tl.rsqrt(squares / head_dim + eps)[:, None]
        # Rounded to the model's dtype, as between two layers.
        first = (first * scale * one).to(source.dtype.element_ty).to(tl.float32)
        second = (second * scale * two).to(source.dtype.element_ty).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _store_new(
    qkv, key_start, value_start, keys, values, positions, slots, first, rows, context, begin, end,
    row_stride, place_stride: tl.constexpr, key_weight, eps, cos_sin, causal: tl.constexpr,
    head_dim: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """Keys and values of the request's rows whose tokens lie in [begin, end) go to their slots."""
    half: tl.constexpr = head_dim // 2
    pair = tl.arange(0, block_d // 2)
    for start in range(0, rows, NEW_ROWS):
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
def _entries(table, start, end, block_size: tl.constexpr, block_n: tl.constexpr):
    """[block_n]: the blocks of the tokens from `start` on, a multiple of block_n, below `end`."""
    token = tl.arange(0, block_n)
    if block_n % block_size == 0:  # most of it is the same for every tile
        place = start // block_size + token // block_size
    else:
        place = (start + token) // block_size
    return tl.load(table + place, mask=start + token < end, other=0)


@triton.jit
def _tokens(
    pages, entries, start, end, place_stride: tl.constexpr, block_size: tl.constexpr,
    head_dim: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """[block_n, block_d]: keys or values of one head; zero from token `end` on."""
    token = tl.arange(0, block_n)
    within = token % block_size if block_n % block_size == 0 else (start + token) % block_size
    place = entries.to(tl.int64) * (block_size * place_stride) + within * place_stride
    number = columns(head_dim, block_d)
    loaded = (start + token < end)[:, None]
    if head_dim != block_d:
        loaded = loaded & (number >= 0)[None, :]
    return tl.load(pages + place[:, None] + number[None, :], mask=loaded, other=0.0)


@triton.jit
def _fold(
    query, key, value, exponent, total, mixed, token, row_begins, row_ends, row, rows, context,
    mask, mask_stride, scale, softcap, window,
):  # fmt: skip
    """Adds one tile of tokens: (exponent, sums of weights, all alike, sums of weighted values).

    query [block_m, block_d]; key and value [block_n, block_d]; a row sees the tokens
    [row_begins, row_ends), and of the request's new tokens those that its line of `mask` names,
    where there is one.
    """
    score = tl.dot(query, tl.trans(key), input_precision="ieee")
    factor = scale * LOG2_E
    if softcap is not None:
        # tanh by an exponential that may overflow to infinity and then still gives 1.
        power = tl.exp2(score * (scale * 2.0 * LOG2_E / softcap))
        score = 1.0 - 2.0 / (power + 1.0)
        factor = softcap * LOG2_E
    seen = token[None, :] < row_ends[:, None]
    if window is not None:
        seen &= token[None, :] >= row_begins[:, None]
    if mask is not None:
        new = (token - (context - rows))[None, :]
        line = mask + row[:, None] * mask_stride + new
        asked = (new >= 0) & seen & (row < rows)[:, None]
        seen &= (new < 0) | (tl.load(line, mask=asked, other=0) != 0)
    score = tl.where(seen, score, float("-inf"))
    highest = tl.maximum(exponent, tl.ceil(tl.max(score, axis=1) * factor))
    base = finite(highest)
    # Fused, as the compiler might do here and not there.
    negative = tl.zeros_like(score) - base[:, None]
    weight = tl.exp2(tl.fma(score, tl.zeros_like(score) + factor, negative)).to(value.dtype)
    kept = power_of_two(exponent - base)[:, None]
    # The tensor cores add in one order, however many warps there are.
    ones = tl.full((value.shape[0], SUM_COLUMNS), 1.0, value.dtype)
    total = tl.dot(weight, ones, total * kept, input_precision="ieee")
    mixed = tl.dot(weight, value, mixed * kept, input_precision="ieee")
    return highest, total, mixed


@triton.jit
def _added(exponent, total, mixed, more_exponent, more_total, more_mixed):
    """The sum of two folds."""
    highest = tl.maximum(exponent, more_exponent)
    kept = power_of_two(exponent - finite(highest))
    moved = power_of_two(more_exponent - finite(highest))
    total = total * kept[:, None] + more_total * moved[:, None]
    return highest, total, mixed * kept[:, None] + more_mixed * moved[:, None]


@triton.jit
def _fold_run(
    query, keys, values, table, entries, begin, end, row_begins, row_ends, row, rows, context, mask,
    mask_stride, scale, softcap, window, place_stride: tl.constexpr, block_size: tl.constexpr,
    head_dim: tl.constexpr, block_n: tl.constexpr,
):  # fmt: skip
    """The fold of the tokens [begin, end): of each split on its own, then added up."""
    exponent = tl.full((query.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((query.shape[0], SUM_COLUMNS), tl.float32)
    mixed = tl.zeros(query.shape, tl.float32)
    sum_exponent, sum_total, sum_mixed = exponent, total, mixed
    until = split_start(split_of(begin) + 1)
    for start in range(begin, end, block_n):
        key = _tokens(
            keys, entries, start, end, place_stride, block_size, head_dim, block_n, query.shape[1]
        )
        value = _tokens(
            values, entries, start, end, place_stride, block_size, head_dim, block_n, query.shape[1]
        )
        entries = _entries(table, start + block_n, end, block_size, block_n)
        exponent, total, mixed = _fold(
            query, key, value, exponent, total, mixed, start + tl.arange(0, block_n), row_begins,
            row_ends, row, rows, context, mask, mask_stride, scale, softcap, window,
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
    keys, values, entries, start, end, place_stride: tl.constexpr, block_size: tl.constexpr,
    head_dim: tl.constexpr, block_n: tl.constexpr,
):  # fmt: skip
    """Asks for the first tile of a run, without waiting for it."""
    token = tl.arange(0, block_n)
    within = token % block_size if block_n % block_size == 0 else (start + token) % block_size
    place = entries.to(tl.int64) * (block_size * place_stride) + within * place_stride
    place = tl.where(start + token < end, place, 0)
    line = tl.arange(0, head_dim * keys.dtype.element_ty.primitive_bitwidth // 1024) * 64
    for pages in tl.static_range(2):
        source = (values if pages else keys) + place[:, None] + line[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [source], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _runs(context, rows, window, programs):
    """(whether a run is a group, the first run that a request's rows see, the last, first token).

    A group goes to one program where that leaves enough programs. `programs` per run.
    """
    oldest = 0
    if window is not None:
        oldest = tl.maximum(context - rows - window + 1, 0)
    newest = tl.maximum(context, 1) - 1
    grouped = (group_of(newest) - group_of(oldest) + 1) * programs >= ENOUGH
    first_run = tl.where(grouped, group_of(oldest), split_of(oldest))
    last_run = tl.where(grouped, group_of(newest), split_of(newest))
    return grouped, first_run, last_run, oldest


@triton.jit
def _with_sink(exponent, total, mixed, sink):
    """A sink is a score without a value; its exponent is that of a fold."""
    highest = tl.maximum(exponent, tl.ceil(sink))
    kept = power_of_two(exponent - highest)
    return highest, total * kept + tl.exp2(sink - highest), mixed * kept


@triton.jit
def short_kernel(
    qkv, keys, values, out, part, part_exponent, part_total, query_start,
    context_lens, tables, positions, slots, mask, mask_stride, sinks, query_weight, key_weight,
    eps, cos_sin, row_stride, table_stride, scale, softcap, window, most_rows, most_runs,
    kv_heads: tl.constexpr, groups: tl.constexpr, head_dim: tl.constexpr, block_size: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr,
    pdl: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Programs (KV head and tile, request, lane): a lane does every so-manieth run of a tile.

    Writes the run's fold to part [T, Hq, most_runs, head_dim] and two scalars, or, where it is all
    of the context, the result. With `cos_sin` queries and keys are those of the matmul, and the
    new ones of a run are stored by the program that does the run, before it reads them; several
    tiles store the same twice.
    """
    launch_dependents(pdl)
    if not early:
        wait_for_inputs(pdl)
    place_stride: tl.constexpr = kv_heads * head_dim
    tile = tl.program_id(0) // kv_heads
    kv_head = tl.program_id(0) % kv_heads
    request = tl.program_id(1)
    lane = tl.program_id(2)
    first = tl.load(query_start + request).to(tl.int32)
    rows = tl.load(query_start + request + 1).to(tl.int32) - first
    context = tl.load(context_lens + request).to(tl.int32)
    programs = tl.num_programs(0) * tl.num_programs(1)
    grouped, first_run, last_run, oldest = _runs(context, rows, window, programs)
    idle = (rows > most_rows) | (tile * block_m >= rows * groups)
    if idle | (lane > last_run - first_run):
        wait_for_inputs(pdl)
        return
    row, head, position, begins, ends = _sight(
        positions, first, rows, context, tile, kv_head, window, mask is None, groups, block_m
    )
    table = tables + request.to(tl.int64) * table_stride
    keys += kv_head * head_dim
    values += kv_head * head_dim
    known = context
    if cos_sin is not None:
        known = context - rows  # the others are stored here
    if early:
        begin, end = _bounds(last_run - lane, grouped, oldest, context, block_n)
        entries = _entries(table, begin, end, block_size, block_n)
        _prefetch(
            keys, values, entries, begin, tl.minimum(end, known), place_stride, block_size,
            head_dim, block_n,
        )  # fmt: skip
        wait_for_inputs(pdl)
    query = _queries(
        qkv, first, row, rows, head, position, query_weight, eps, cos_sin, row_stride, head_dim,
        block_d,
    )  # fmt: skip
    new_mask = mask
    if mask is not None:
        new_mask = mask + first.to(tl.int64) * mask_stride
    number = columns(head_dim, block_d)
    stored = (row < rows)[:, None] & (number >= 0)[None, :]
    place = (first + row).to(tl.int64) * kv_heads * groups + head
    for run in range(last_run - lane, first_run - 1, -tl.num_programs(2)):
        begin, end = _bounds(run, grouped, oldest, context, block_n)
        entries = _entries(table, begin, end, block_size, block_n)
        if cos_sin is not None:
            if end > known:
                _store_new(
                    qkv, (kv_heads * groups + kv_head) * head_dim,
                    (kv_heads * groups + kv_heads + kv_head) * head_dim, keys, values, positions,
                    slots, first, rows, context, begin, end, row_stride, place_stride, key_weight,
                    eps, cos_sin, mask is None, head_dim, block_d,
                )  # fmt: skip
        exponent, total, mixed = _fold_run(
            query, keys, values, table, entries, begin, end, begins, ends, row, rows, context,
            new_mask, mask_stride, scale, softcap, window, place_stride, block_size, head_dim,
            block_n,
        )  # fmt: skip
        if first_run == last_run:
            weights, result = tl.zeros_like(mixed) + total[:, None], mixed
            if sinks is not None:
                sink = tl.load(sinks + head).to(tl.float32)[:, None] * LOG2_E
                _, weights, result = _with_sink(exponent[:, None], weights, result, sink)
            result = result / tl.where(weights == 0.0, 1.0, weights)  # zero, if nothing was seen
            whole = out + place[:, None] * head_dim + number[None, :]
            tl.store(whole, result.to(out.dtype.element_ty), mask=stored)
        else:
            target = place * most_runs + run - first_run
            tl.store(part_exponent + target, exponent, mask=row < rows)
            tl.store(part_total + target, total, mask=row < rows)
            tl.store(part + target[:, None] * head_dim + number[None, :], mixed, mask=stored)


@triton.jit
def _bounds(run, grouped, oldest, context, block_n: tl.constexpr):
    """The tokens of a run."""
    begin = tl.where(grouped, group_start(run), split_start(run))
    end = tl.where(grouped, group_start(run + 1), split_start(run + 1))
    return tl.maximum(begin, oldest // block_n * block_n), tl.minimum(end, context)


@triton.jit
def _sight(
    positions, first, rows, context, tile, kv_head, window, causal: tl.constexpr,
    groups: tl.constexpr, block_m: tl.constexpr,
):  # fmt: skip
    """(row, query head, position, first token seen, end of the tokens seen) of a tile's lines.

    Line m of a request and KV head is its row m // groups and its query head m % groups.
    """
    line = tile * block_m + tl.arange(0, block_m)
    row = line // groups
    position = tl.load(positions + first + row, mask=row < rows, other=0)
    own = tl.maximum(position.to(tl.int32), context - rows)  # one that means nothing may be lower
    ends = tl.minimum(own + 1, context) if causal else tl.zeros_like(own) + context
    begins = own
    if window is not None:
        begins = own - window + 1
    return row, kv_head * groups + line % groups, position, begins, ends


@triton.jit
def _queries(
    qkv, first, row, rows, head, position, weight, eps, cos_sin, row_stride,
    head_dim: tl.constexpr, block_d: tl.constexpr,
):  # fmt: skip
    """[block_m, block_d]: the queries of a tile's lines."""
    source = (first + row).to(tl.int64) * row_stride + head * head_dim
    valid = row < rows
    if cos_sin is None:
        number = columns(head_dim, block_d)
        inside = valid[:, None] & (number >= 0)[None, :]
        query = tl.load(qkv + source[:, None] + number[None, :], mask=inside, other=0.0)
    else:
        one, two = rotated(qkv, source, valid, position, weight, eps, cos_sin, head_dim, block_d)
        halves = tl.join(one.to(qkv.dtype.element_ty), two.to(qkv.dtype.element_ty))
        query = tl.reshape(tl.permute(halves, (0, 2, 1)), (row.shape[0], block_d))
    return query


@triton.jit
def combine_kernel(
    part, part_exponent, part_total, out, query_start, context_lens, sinks, window, most_rows,
    most_runs, programs, heads: tl.constexpr, head_dim: tl.constexpr, block_d: tl.constexpr,
    block_s: tl.constexpr, pdl: tl.constexpr, early: tl.constexpr,
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
    grouped, first_run, last_run, oldest = _runs(context, rows, window, programs)
    lines = rows * heads
    if (rows > most_rows) | (first_run == last_run):
        lines = 0
    wait_for_inputs(pdl)
    column = tl.arange(0, block_d)
    for line in range(tl.program_id(0), lines, tl.num_programs(0)):
        place = (first.to(tl.int64) * heads + line) * most_runs - first_run
        exponent = tl.full((), float("-inf"), tl.float32)
        for start in range(first_run, last_run + 1, block_s):
            run = start + tl.arange(0, block_s)
            found = tl.load(
                part_exponent + place + run, mask=run <= last_run, other=float("-inf")
            )
            exponent = tl.maximum(exponent, tl.max(found, axis=0))
        total = tl.zeros((), tl.float32)
        mixed = tl.zeros((block_d,), tl.float32)
        sum_total, sum_mixed = total, mixed
        for start in range(first_run, last_run + 1, COMBINED):
            for step in tl.static_range(COMBINED):
                run = start + step
                asked = run <= last_run
                found = tl.load(part_exponent + place + run, mask=asked, other=float("-inf"))
                moved = power_of_two(found - finite(exponent))
                more = tl.load(part_total + place + run, mask=asked, other=0.0)
                source = part + (place + run) * head_dim + column
                values = tl.load(source, mask=(column < head_dim) & (run + 0 * column <= last_run), other=0.0)
                sum_total += more * moved
                sum_mixed += values * moved
                closed = tl.where(grouped, 1, _closes_group(run)) > 0
                total += tl.where(closed, sum_total, 0.0)
                mixed += tl.where(closed, sum_mixed, 0.0)
                sum_total = tl.where(closed, 0.0, sum_total)
                sum_mixed = tl.where(closed, 0.0, sum_mixed)
        total, mixed = total + sum_total, mixed + sum_mixed
        if sinks is not None:
            sink = tl.load(sinks + line % heads).to(tl.float32) * LOG2_E
            exponent, total, mixed = _with_sink(exponent, total, mixed, sink)
        result = mixed / tl.where(total == 0.0, 1.0, total)
        target = out + (first.to(tl.int64) * heads + line) * head_dim + column
        tl.store(target, result.to(out.dtype.element_ty), mask=column < head_dim)


@triton.jit
def _closes_group(split):
    return group_of(split_start(split + 1)) - group_of(split_start(split))
