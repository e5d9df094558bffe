"""Segments of a long context, which `attention_stream_kernel.py` adds up one after another.

A tile of a prompt chunk goes through its whole context. If a pass has few tiles, one program for
each would leave most of the device idle, so that several programs share the context of a tile.
Segments begin at fixed tokens, and the sums of each are computed on their own and then added in
order, also where one program computes them all. So a row's bits depend on the number of rows of its
request, but not on how many programs there are, nor on other requests.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from slipstream.kernels.triton.matmul_stream_parts import launch_dependents, wait_for_inputs

LINES = gl.constexpr(64)  # of one warpgroup; a tile has twice as many
# Tokens of a segment, for requests of at most `FEW_ROWS` rows in a pass, and of more. Shorter
# segments can be shared out better, but programs that compute several wait a little between two.
SHORT_SEGMENT, SEGMENT = gl.constexpr(4096), gl.constexpr(8192)
FEW_ROWS = gl.constexpr(128)
LEAST = gl.constexpr(-3.0e38)  # a score below all others, of which differences are no NaN
# What a program computes: tiles whose context is one segment, tiles over any number of segments, or
# one segment of a tile's context.
WHOLE, CHAINED, SPLIT = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
AT_ONCE = gl.constexpr(4)  # segments whose sums are loaded together


@gluon.jit
def segment_tokens(rows):
    """The tokens of a segment for a request of `rows` rows."""
    return gl.where(rows <= FEW_ROWS, SHORT_SEGMENT, SEGMENT)


@gluon.jit
def last_segment(context, rows):
    """The segment of the last token of a context; 0 without one."""
    return (gl.maximum(context, 1) - 1) // segment_tokens(rows)


def most_segments(tokens: int) -> int:
    """The largest number of segments of a context of `tokens` tokens, at least 1."""
    return (max(tokens, 1) - 1) // int(SHORT_SEGMENT.value) + 1


@gluon.jit
def end_of_sight(positions, tokens, last_seen, first, rows, context, row):
    """The end of the tokens that a row of a request sees, as in `attention_parts.py`."""
    inside = row < rows
    token = gl.load(positions + first + row, mask=inside, other=0).to(gl.int32)
    token = gl.maximum(token, context - rows)
    if tokens is not None:
        token = gl.load(tokens + first + row, mask=inside, other=0).to(gl.int32)
    if last_seen is not None:
        last = gl.load(last_seen + first + row, mask=inside, other=0).to(gl.int32)
        token = gl.maximum(token, last)
    return gl.minimum(token + 1, context)


@gluon.jit
def joined(before, largest_before, total_before, mixed, largest, total):
    """Sums of a segment added to those of all segments before it: weighted values [L, D], largest
    scores and sums of weights [L].

    Products and sums are rounded in the same way wherever this is used.
    """
    highest = gl.maximum(largest_before, largest)
    kept, share = gl.exp2(largest_before - highest), gl.exp2(largest - highest)
    total = gl.fma(total_before, kept, total * share)
    wide: gl.constexpr = gl.SliceLayout(1, mixed.type.layout)
    kept = gl.convert_layout(kept, wide)[:, None] + gl.zeros_like(mixed)
    mixed = gl.fma(before, kept, mixed * gl.convert_layout(share, wide)[:, None])
    return mixed, highest, total


@gluon.jit
def averaged(mixed, total):
    """Weighted values [L, D] divided by the sums of weights [L]; 0 if there are none."""
    share = 1.0 / gl.where(total == 0.0, 1.0, total)
    return mixed * gl.convert_layout(share, gl.SliceLayout(1, mixed.type.layout))[:, None]


@gluon.jit
def store_segment(
    parts, numbers, which, mixed, largest, total, kv_heads: gl.constexpr, groups: gl.constexpr
):  # fmt: skip
    """Store the sums of one segment of a context of several. Returns whether it is the only one."""
    part, part_largest, part_total, count = parts
    first, rows, context, tile, _, _, _, segment, kv_head, _ = numbers
    head_dim: gl.constexpr = mixed.shape[1]
    lines: gl.constexpr = largest.type.layout
    one_segment = last_segment(context, rows) == 0
    line = (tile * 2 + which) * LINES + gl.arange(0, LINES, lines)
    row = gl.cast(segment, gl.int64) * count + first + line // groups
    at = (row * kv_heads + kv_head) * groups + line % groups
    inside = (line // groups < rows) & (not one_segment)
    gl.store(part_largest + at, largest, mask=inside)
    gl.store(part_total + at, total, mask=inside)
    wide: gl.constexpr = gl.SliceLayout(1, mixed.type.layout)
    column = gl.arange(0, head_dim, gl.SliceLayout(0, mixed.type.layout))
    target = part + gl.convert_layout(at, wide)[:, None] * head_dim + column[None, :]
    gl.store(target, mixed, mask=gl.convert_layout(inside, wide)[:, None])
    return one_segment


@gluon.jit
def scratch_of(sums, which, summed: gl.constexpr, head_dim: gl.constexpr):
    """The places [lines, head_dim] where a warpgroup keeps sums of earlier segments."""
    line = (gl.program_id(0) * 2 + which) * LINES + gl.arange(0, LINES, gl.SliceLayout(1, summed))
    column = gl.arange(0, head_dim, gl.SliceLayout(0, summed))
    return sums + line[:, None] * head_dim + column[None, :]


@gluon.jit
def kept_sums(scratch, segment):
    """The sums of all segments before this one."""
    there = gl.full(scratch.shape, segment, gl.int32, scratch.type.layout) > 0
    return gl.load(scratch, mask=there, other=0.0)


@gluon.jit
def keep_sums(scratch, mixed, last):
    """Keep the sums unless they are those of the `last` segment; returns that."""
    gl.store(scratch, mixed, mask=gl.full(scratch.shape, not last, gl.int1, scratch.type.layout))
    return last


@gluon.jit
def _request_of(row, query_start, context_lens, requests, block_r: gl.constexpr):
    """(first row, rows, context) of the request that a row of the pass belongs to."""
    each: gl.constexpr = block_r // 32 if block_r > 32 else 1
    number = gl.arange(0, block_r, gl.BlockedLayout([each], [32], [gl.num_warps()], [0]))
    inside = number < requests
    starts = gl.load(query_start + number, mask=inside, other=0).to(gl.int32)
    ends = gl.load(query_start + number + 1, mask=inside, other=0).to(gl.int32)
    contexts = gl.load(context_lens + number, mask=inside, other=0).to(gl.int32)
    own = inside & (starts <= row) & (row < ends)
    first = gl.sum(gl.where(own, starts, 0), axis=0)
    rows = gl.sum(gl.where(own, ends, 0), axis=0) - first
    return first, rows, gl.sum(gl.where(own, contexts, 0), axis=0)


@gluon.jit(do_not_specialize=["requests"])
def join_segments_kernel(
    part, part_largest, part_total, out, query_start, context_lens, positions, tokens, last_seen,
    requests, short_rows, heads: gl.constexpr, head_dim: gl.constexpr, block_h: gl.constexpr,
    block_r: gl.constexpr, pdl: gl.constexpr,
):  # fmt: skip
    """Programs (row, `block_h` heads): what `SPLIT` programs left in part [segments, T, Hq, D]
    float32, part_largest and part_total [segments, T, Hq], to out [T, Hq * D].

    Rows of contexts of one segment are in `out` already.
    """
    launch_dependents(pdl)
    row, count = gl.program_id(0), gl.num_programs(0)
    wait_for_inputs(pdl)
    first, rows, context = _request_of(row, query_start, context_lens, requests, block_r)
    across: gl.constexpr = head_dim // 4
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // across, across], [4, 1], [1, 0])
    lines: gl.constexpr = gl.SliceLayout(1, layout)
    head = gl.program_id(1) * block_h + gl.arange(0, block_h, lines)
    column = gl.arange(0, head_dim, gl.SliceLayout(0, layout))
    if (rows > short_rows) & (last_segment(context, rows) > 0):
        end = end_of_sight(positions, tokens, last_seen, first, rows, context, row - first)
        segments = last_segment(end, rows) + 1
        largest = gl.full([block_h], LEAST, gl.float32, lines)
        total = gl.zeros([block_h], gl.float32, lines)
        mixed = gl.zeros([block_h, head_dim], gl.float32, layout)
        for start in range(0, segments, AT_ONCE):
            loaded = ()
            for index in gl.static_range(AT_ONCE):
                there = (head < heads) & (start + index < segments)
                at = (gl.cast(start + index, gl.int64) * count + row) * heads + head
                more = gl.load(part_largest + at, mask=there, other=LEAST)
                sums = gl.load(part_total + at, mask=there, other=0.0)
                source = part + at[:, None] * head_dim + column[None, :]
                values = gl.load(source, mask=there[:, None], other=0.0)
                loaded += (values, more, sums)  # type: ignore[assignment]
            for index in gl.static_range(AT_ONCE):
                values, more, sums = loaded[3 * index], loaded[3 * index + 1], loaded[3 * index + 2]
                mixed, largest, total = joined(mixed, largest, total, values, more, sums)
        target = out + (gl.cast(row, gl.int64) * heads + head)[:, None] * head_dim
        result = averaged(mixed, total).to(out.dtype.element_ty)
        gl.store(target + column[None, :], result, mask=(head < heads)[:, None])
