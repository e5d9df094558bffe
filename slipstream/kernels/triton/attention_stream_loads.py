"""What `attention_stream_kernel.py` loads: a tile's queries and the pages of its tokens.

Warps that only load find out the tiles, and tell the warpgroups in shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from slipstream.kernels.triton.attention_segments import (
    CHAINED,
    LINES,
    SPLIT,
    end_of_sight,
    last_segment,
    segment_tokens,
)
from slipstream.kernels.triton.matmul_stream_parts import _barrier, _fetch, wait_for_inputs

TOKENS = gl.constexpr(128)  # of a tile
HALF = gl.constexpr(64)  # tokens of a tile that one warp loads
INFO = gl.constexpr(10)  # numbers that describe a segment to the warpgroups


@gluon.jit
def tiles_of_requests(
    query_start, context_lens, requests, short_rows, groups, block_r: gl.constexpr,
    mode: gl.constexpr,
):  # fmt: skip
    """[block_r] each: number, first row, rows, context, tiles and units of work of the requests.

    A unit is a tile, or if `SPLIT` a tile and one segment of its context.
    """
    each: gl.constexpr = block_r // 32 if block_r > 32 else 1
    number = gl.arange(0, block_r, gl.BlockedLayout([each], [32], [gl.num_warps()], [0]))
    inside = number < requests
    starts = gl.load(query_start + number, mask=inside, other=0).to(gl.int32)
    rows = gl.load(query_start + number + 1, mask=inside, other=0).to(gl.int32) - starts
    contexts = gl.load(context_lens + number, mask=inside, other=0).to(gl.int32)
    tiles = (rows * groups + 2 * LINES - 1) // (2 * LINES)
    tiles = gl.where(rows > short_rows, tiles, 0)
    units = tiles
    if mode == SPLIT:
        units = tiles * (last_segment(contexts, rows) + 1)
    return number, starts, rows, contexts, tiles, units


@gluon.jit
def tile_at(turn, programs):
    """Which tile a program computes at its turn: every other time in reverse order, so that all
    programs have about the same work."""
    program = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 1, programs - 1 - program, program)


@gluon.jit
def after(slot, phase, stages: gl.constexpr):
    """The next slot, and the phase of its barriers."""
    wraps = slot + 1 == stages
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _rows_of_pages(table, start, context, box: gl.constexpr, block_size: gl.constexpr):
    """The first row in the cache of each copy; past the context, the last one's again."""
    rows = ()
    for copy in gl.static_range(HALF // box):
        token = gl.minimum(gl.maximum(start + copy * box, 0), (context - 1) // box * box)
        entry = gl.load(table + token // block_size)
        rows += (entry * block_size + token % block_size,)  # type: ignore[assignment]
    return rows


@gluon.jit
def _tell(told, told_ends, slot, ends, inside, newest, first, rows, context, tile, count,
          request, tree_starts, segment, kv_head, more):  # fmt: skip
    """Describe the segment whose first keys come into `slot` to the warpgroups."""
    common = gl.min(gl.where(inside, ends, newest), axis=0)  # tokens that all lines see
    tree_start = context
    if tree_starts is not None:
        tree_start = gl.load(tree_starts + request).to(gl.int32)
    plain = gl.minimum(common, tree_start) // TOKENS  # tiles of tokens that need no mask
    numbers = (first, rows, context, tile, count, plain, tree_start, segment, kv_head, more)
    for i in gl.static_range(INFO):
        one = gl.full([1], numbers[i], gl.int32, ends.type.layout)
        told.index(slot * INFO + i).store(one)
    told_ends.index(slot).store(ends)
    _barrier()


@gluon.jit
def load_half(pages, ring, shared, sizes: gl.constexpr, lag: gl.constexpr, half: gl.constexpr):
    """The part of a warp that loads one half of each tile's keys (`lag` 0) or values (1: they are
    needed one step later).

    There are four such warps, as one alone could not start copies as fast as they are needed.
    """
    told, told_ends, full, empty, turns, total, programs, query_start, context_lens = shared[:9]
    tables, positions, tokens, tree_starts, last_seen = shared[9:14]
    requests, short_rows, table_stride = shared[14:]
    kv_heads: gl.constexpr = sizes[0]
    groups: gl.constexpr = sizes[1]
    block_size: gl.constexpr = sizes[2]
    stages: gl.constexpr = ring.shape[0]
    head_dim: gl.constexpr = ring.shape[2]
    box: gl.constexpr = pages.block_shape[0]
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    wait_for_inputs(sizes[4])
    mode: gl.constexpr = sizes[5]
    number, starts, counts, contexts, tiles, units = tiles_of_requests(
        query_start, context_lens, requests, short_rows, groups, sizes[3], mode
    )
    until = gl.associative_scan(units, 0, _add)
    slot, phase = 0, 1
    for turn in range(turns):
        index = tile_at(turn, programs)
        kv_head, place = index % kv_heads, total - 1 - index // kv_heads
        request = gl.sum((until <= place).to(gl.int32), axis=0)
        own = number == request
        context = gl.sum(gl.where(own, contexts, 0), axis=0)
        table = tables + request.to(gl.int64) * table_stride
        unit = place - gl.sum(gl.where(own, until - units, 0), axis=0)
        tile, segment = unit, 0
        if mode == SPLIT:
            across = gl.sum(gl.where(own, tiles, 0), axis=0)
            tile, segment = unit % across, unit // across
        first = gl.sum(gl.where(own, starts, 0), axis=0)
        rows = gl.sum(gl.where(own, counts, 0), axis=0)
        row = (tile * 2 * LINES + gl.arange(0, 2 * LINES, lanes)) // groups
        ends = end_of_sight(positions, tokens, last_seen, first, rows, context, row)
        # At least 1: padding has no context, but the warpgroups take two steps or more.
        newest = gl.max(gl.where(row < rows, gl.maximum(ends, 1), 0), axis=0)
        count = (newest + TOKENS - 1) // TOKENS
        after_last = segment + 1
        if mode == CHAINED:
            after_last = last_segment(newest, rows) + 1
        for part in range(segment, after_last):
            more_parts = (turn + 1 < turns) | (part + 1 < after_last)
            begin, end = tiles_of_segment(part, count, rows)
            start = begin * TOKENS + half * HALF - lag * TOKENS
            at = _rows_of_pages(table, start, context, box, block_size)
            for step in range(end - begin + 1):
                start += TOKENS
                # Read a step ahead: a copy would wait for the block table.
                more = _rows_of_pages(table, start, context, box, block_size)
                barrier = full.index(slot)
                mbarrier.wait(empty.index(slot), phase)
                if lag + half == 0:  # noqa: SIM102 - known to the compiler, the other is not
                    if step == 0:
                        _tell(told, told_ends, slot, ends, row < rows, newest, first, rows,
                              context, tile, count, request, tree_starts, part, kv_head,
                              more_parts.to(gl.int32))  # fmt: skip
                if step == (0 if lag else end - begin):
                    mbarrier.arrive(barrier)
                else:
                    mbarrier.expect(barrier, 2 * HALF * head_dim)
                    for copy in gl.static_range(HALF // box):
                        goes = ring.index(slot).slice(half * HALF + copy * box, box)
                        _fetch(pages, [at[copy], kv_head * head_dim], barrier, goes)
                at = more
                slot, phase = after(slot, phase, stages)


@gluon.jit
def tiles_of_segment(segment, count, rows):
    """The tiles of tokens [begin, end) of a segment for a tile that sees `count` of them: one at
    least, of which it then sees nothing. rows: of the request."""
    across = segment_tokens(rows) // TOKENS
    begin = segment * across
    return begin, gl.maximum(gl.minimum(count, begin + across), begin + 1)


@gluon.jit
def lines_of(numbers, which, groups: gl.constexpr, layout: gl.constexpr):
    """(row of the pass [lines, 1], query head [lines, 1], whether there is one) of a tile."""
    line = (numbers[3] * 2 + which) * LINES + gl.arange(0, LINES, gl.SliceLayout(1, layout))
    row, head = (line // groups)[:, None], (numbers[8] * groups + line % groups)[:, None]
    return (numbers[0] + row).to(gl.int64), head, row < numbers[1]


@gluon.jit
def told_numbers(told, slot):
    """What describes the segment whose first keys are in `slot`, see `_tell`."""
    numbers = ()
    for at in gl.static_range(INFO):
        one = told.index(slot * INFO + at).load(gl.BlockedLayout([1], [32], [4], [0]))
        numbers += (gl.max(one, axis=0),)  # type: ignore[assignment]
    return numbers


@gluon.jit
def load_queries(
    query, told, full, slot, phase, which, row_stride, groups: gl.constexpr,
    head_dim: gl.constexpr, copied: gl.constexpr, wanted,
):  # fmt: skip
    """The queries of the segment whose first keys come into `slot`."""
    mbarrier.wait(full.index(slot), phase, wanted)
    row, head, inside = lines_of(told_numbers(told, slot), which, groups, copied)
    column = gl.arange(0, head_dim, gl.SliceLayout(0, copied))[None, :]
    source = query + row * row_stride + head * head_dim + column
    return gl.load(source, mask=inside & wanted, other=0.0)
