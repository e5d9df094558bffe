"""The kernels of paged attention. What they compute and how rows meet programs: `attention.py`.

Scores are kept in units of log 2 throughout. A row that sees nothing of a tile is left as it was,
bit for bit: that is what makes it independent of the rows beside it.
"""

import triton
import triton.language as tl

from slipstream.kernels.triton.splits import split_of, split_start

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(source, inside, checked: tl.constexpr):
    return tl.load(source, mask=inside, other=0.0) if checked else tl.load(source)


@triton.jit
def _scores(query, key, scale, softcap):
    """[rows, tokens] scaled and capped, in units of log 2."""
    score = tl.dot(query, tl.trans(key), input_precision="ieee")
    if softcap is None:
        score *= scale * LOG2_E
    else:
        # tanh by an exponential that may overflow to infinity and then still gives 1.
        power = tl.exp2(score * (scale * 2.0 * LOG2_E / softcap))
        score = (softcap * LOG2_E) * (1.0 - 2.0 / (power + 1.0))
    return score


@triton.jit
def _fold(
    query, largest, total, mixed, begin, end, row_ends, row_begins, row, rows, context, mask,
    mask_stride, keys, values, table, place_stride, scale, softcap, block_size: tl.constexpr,
    head_dim: tl.constexpr, block_n: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Online softmax (Milakov and Gimelshein 2018) over the cached tokens [begin, end).

    query [block_m, block_d]; a row sees the tokens [row_begins, row_ends), and of the request's
    `rows` new tokens those that its line of `mask` names, where there is one. Without `masked`
    every row is known to see all of [begin, end), a whole number of tiles.
    Returns (largest score, sum of weights, sum of weighted values [block_m, block_d]).
    """
    column = tl.arange(0, query.shape[1])
    whole: tl.constexpr = head_dim == query.shape[1]
    for first in range(begin, end, block_n):
        token = first + tl.arange(0, block_n)
        inside = token < end
        block = tl.load(table + token // block_size, mask=inside, other=0)
        place = block.to(tl.int64) * block_size + token % block_size
        offset = place[:, None] * place_stride + column[None, :]
        loaded = inside[:, None] & (column < head_dim)[None, :]
        key = _load(keys + offset, loaded, masked or not whole)
        score = _scores(query, key, scale, softcap)
        if masked:
            seen = (token[None, :] < row_ends[:, None]) & (token[None, :] >= row_begins[:, None])
            seen &= inside[None, :]
            if mask is not None:
                new = (token - (context - rows))[None, :]
                line = mask + row[:, None] * mask_stride + new
                asked = (new >= 0) & seen & (row < rows)[:, None]
                seen &= (new < 0) | (tl.load(line, mask=asked, other=0) != 0)
            score = tl.where(seen, score, float("-inf"))
        highest = tl.maximum(largest, tl.max(score, axis=1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(score - base[:, None])
        kept = tl.exp2(largest - base)
        total = total * kept + tl.sum(weight, axis=1)
        value = _load(values + offset, loaded, masked or not whole)
        mixed = tl.dot(weight.to(value.dtype), value, mixed * kept[:, None], input_precision="ieee")
        largest = highest
    return largest, total, mixed


@triton.jit
def _tile(
    query, positions, first, rows, context, tile, kv_head, row_stride, window, first_seen,
    causal: tl.constexpr, groups: tl.constexpr, head_dim: tl.constexpr, block_m: tl.constexpr,
    block_d: tl.constexpr,
):  # fmt: skip
    """The tile's (rows, heads, queries, first tokens seen, ends of tokens seen).

    Line m of a request and KV head is its row m // groups and its query head m % groups.
    """
    line = tile * block_m + tl.arange(0, block_m)
    row = line // groups
    head = kv_head * groups + line % groups
    valid = row < rows
    position = tl.load(positions + first + row, mask=valid, other=0).to(tl.int32)
    ends = tl.minimum(position + 1, context) if causal else tl.zeros_like(position) + context
    ends = tl.where(valid, ends, 0)
    begins = tl.zeros_like(position) + first_seen
    if window is not None:
        begins = tl.maximum(position - window + 1, first_seen)
    column = tl.arange(0, block_d)
    place = (first + row)[:, None].to(tl.int64) * row_stride + head[:, None] * head_dim
    inside = valid[:, None] & (column < head_dim)[None, :]
    loaded = tl.load(query + place + column[None, :], mask=inside, other=0.0)
    return row, head, loaded, begins, ends


@triton.jit
def split_kernel(
    query, keys, values, part, part_largest, part_total, query_start, context_lens, tables,
    positions, mask, mask_stride, row_stride, place_stride, table_stride, scale, softcap, window,
    most_rows, most_splits, kv_heads, first_seen: tl.constexpr, groups: tl.constexpr,
    head_dim: tl.constexpr, block_size: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
    block_d: tl.constexpr,
):  # fmt: skip
    """Programs (lane, KV head and tile, request): a lane does every so-manieth split of a tile.

    Writes each split's fold: part [R, most_rows, Hq, most_splits, head_dim], and its two scalars.
    How many lanes there are changes who computes a split, never what is computed.
    """
    request = tl.program_id(2)
    tile = tl.program_id(1) // kv_heads
    kv_head = tl.program_id(1) % kv_heads
    first = tl.load(query_start + request).to(tl.int32)
    rows = tl.load(query_start + request + 1).to(tl.int32) - first
    context = tl.load(context_lens + request).to(tl.int32)
    if (rows > most_rows) | (tile * block_m >= rows * groups) | (context <= 0):
        return
    row, head, loaded, begins, ends = _tile(
        query, positions, first, rows, context, tile, kv_head, row_stride, window, first_seen,
        mask is None, groups, head_dim, block_m, block_d,
    )  # fmt: skip
    newest = tl.max(ends, axis=0)
    oldest = tl.min(tl.where(row < rows, begins, newest), axis=0)
    first_split = split_of(oldest)
    last_split = split_of(tl.maximum(newest, 1) - 1)
    place = ((request * most_rows + row).to(tl.int64) * kv_heads * groups + head) * most_splits
    column = tl.arange(0, block_d)
    stored = (row < rows)[:, None] & (column < head_dim)[None, :]
    new_mask = mask
    if mask is not None:
        new_mask = mask + first.to(tl.int64) * mask_stride
    for lane in range(first_split + tl.program_id(0), last_split + 1, tl.num_programs(0)):
        split = first_split + last_split - lane  # the long ones first
        begin = tl.maximum(split_start(split), oldest // block_n * block_n)
        end = tl.minimum(split_start(split + 1), newest)
        largest = tl.full((block_m,), float("-inf"), tl.float32)
        total = tl.zeros((block_m,), tl.float32)
        mixed = tl.zeros((block_m, block_d), tl.float32)
        largest, total, mixed = _fold(
            loaded, largest, total, mixed, begin, end, ends, begins, row, rows, context, new_mask,
            mask_stride, keys + kv_head * head_dim, values + kv_head * head_dim,
            tables + request.to(tl.int64) * table_stride, place_stride, scale, softcap,
            block_size, head_dim, block_n, True,
        )  # fmt: skip
        tl.store(part_largest + place + split, largest, mask=row < rows)
        tl.store(part_total + place + split, total, mask=row < rows)
        target = part + (place + split)[:, None] * head_dim + column[None, :]
        tl.store(target, mixed, mask=stored)


@triton.jit
def combine_kernel(
    part, part_largest, part_total, out, query_start, context_lens, positions, sinks, window,
    most_rows, most_splits, causal: tl.constexpr, head_dim: tl.constexpr, chunk: tl.constexpr,
    block_d: tl.constexpr,
):  # fmt: skip
    """Programs (row, query head, request): adds the folds of the splits that the row sees.

    Their number follows from the row's own position, and the order is that of the splits.
    """
    row, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(query_start + request).to(tl.int32)
    rows = tl.load(query_start + request + 1).to(tl.int32) - first
    if (rows > most_rows) | (row >= rows):
        return
    end = tl.load(context_lens + request).to(tl.int32)
    position = tl.load(positions + first + row).to(tl.int32)
    if causal:
        end = tl.minimum(position + 1, end)
    begin = 0
    if window is not None:
        begin = tl.maximum(position - window + 1, 0)
    first_split = split_of(begin)
    splits = tl.where(end > 0, split_of(tl.maximum(end, 1) - 1) + 1, 0)
    heads = tl.num_programs(1)
    place = ((request * most_rows + row).to(tl.int64) * heads + head) * most_splits
    highest = float("-inf")
    if sinks is not None:
        highest = tl.load(sinks + head).to(tl.float32) * LOG2_E
    sink = highest
    for start in range(first_split, splits, chunk):
        split = start + tl.arange(0, chunk)
        found = tl.load(part_largest + place + split, mask=split < splits, other=float("-inf"))
        highest = tl.maximum(highest, tl.max(found, axis=0))
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.exp2(sink - highest)
    column = tl.arange(0, block_d)
    mixed = tl.zeros((block_d,), tl.float32)
    for start in range(first_split, splits, chunk):
        split = start + tl.arange(0, chunk)
        inside = split < splits
        found = tl.load(part_largest + place + split, mask=inside, other=float("-inf"))
        weight = tl.exp2(found - highest)
        total += tl.sum(weight * tl.load(part_total + place + split, mask=inside, other=0.0), 0)
        source = part + (place + split)[:, None] * head_dim + column[None, :]
        loaded = inside[:, None] & (column < head_dim)[None, :]
        mixed += tl.sum(weight[:, None] * tl.load(source, mask=loaded, other=0.0), axis=0)
    mixed = mixed / tl.where(total == 0.0, 1.0, total)  # a row that sees nothing is zero
    target = out + ((first + row).to(tl.int64) * heads + head) * head_dim + column
    tl.store(target, mixed.to(out.dtype.element_ty), mask=column < head_dim)


@triton.jit
def _tile_of_program(query_start, requests, short_rows, groups, block_m, block_r: tl.constexpr):
    """(request, tile of the request) of this program, the last tile first; request -1: none.

    Tiles belong to the requests with more than `short_rows` rows, in their order.
    """
    number = tl.arange(0, block_r)
    inside = number < requests
    starts = tl.load(query_start + number, mask=inside, other=0).to(tl.int32)
    rows = tl.load(query_start + number + 1, mask=inside, other=0).to(tl.int32) - starts
    tiles = tl.where(rows > short_rows, tl.cdiv(rows * groups, block_m), 0)
    until = tl.cumsum(tiles, axis=0)
    index = tl.sum(tiles, axis=0) - 1 - tl.program_id(0)
    request = tl.sum((until <= index).to(tl.int32), axis=0)
    before = tl.sum(tl.where(number == request, until - tiles, 0), axis=0)
    return tl.where(index < 0, -1, request), index - before


@triton.jit
def chunk_kernel(
    query, keys, values, out, query_start, context_lens, tables, positions, mask, mask_stride,
    sinks, row_stride, place_stride, table_stride, scale, softcap, window, requests, short_rows,
    kv_heads, first_seen: tl.constexpr, groups: tl.constexpr, head_dim: tl.constexpr,
    block_size: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_d: tl.constexpr,
    block_r: tl.constexpr,
):  # fmt: skip
    """Programs (tile, KV head): a tile of a prompt chunk over all that it sees, without splits."""
    kv_head = tl.program_id(1)
    request, tile = _tile_of_program(query_start, requests, short_rows, groups, block_m, block_r)
    if request < 0:
        return
    first = tl.load(query_start + request).to(tl.int32)
    rows = tl.load(query_start + request + 1).to(tl.int32) - first
    context = tl.load(context_lens + request).to(tl.int32)
    row, head, loaded, begins, ends = _tile(
        query, positions, first, rows, context, tile, kv_head, row_stride, window, first_seen,
        mask is None, groups, head_dim, block_m, block_d,
    )  # fmt: skip
    newest = tl.max(ends, axis=0)
    begin = tl.min(tl.where(row < rows, begins, newest), axis=0) // block_n * block_n
    largest = tl.full((block_m,), float("-inf"), tl.float32)
    total = tl.zeros((block_m,), tl.float32)
    if sinks is not None:  # a score without a value
        largest = tl.load(sinks + head, mask=row < rows, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    mixed = tl.zeros((block_m, block_d), tl.float32)
    keys += kv_head * head_dim
    values += kv_head * head_dim
    table = tables + request.to(tl.int64) * table_stride
    new_mask = mask
    if mask is not None:
        new_mask = mask + first.to(tl.int64) * mask_stride
    elif window is None and first_seen == 0:
        # Most tiles of keys lie wholly before the first row.
        common = tl.min(tl.where(row < rows, ends, newest), axis=0) // block_n * block_n
        largest, total, mixed = _fold(
            loaded, largest, total, mixed, begin, common, ends, begins, row, rows, context, None,
            mask_stride, keys, values, table, place_stride, scale, softcap, block_size, head_dim,
            block_n, False,
        )  # fmt: skip
        begin = common
    largest, total, mixed = _fold(
        loaded, largest, total, mixed, begin, newest, ends, begins, row, rows, context, new_mask,
        mask_stride, keys, values, table, place_stride, scale, softcap, block_size, head_dim,
        block_n, True,
    )  # fmt: skip
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    column = tl.arange(0, block_d)
    place = ((first + row).to(tl.int64) * kv_heads * groups + head)[:, None] * head_dim
    stored = (row < rows)[:, None] & (column < head_dim)[None, :]
    tl.store(out + place + column[None, :], mixed.to(out.dtype.element_ty), mask=stored)
