"""The attention kernel for prompt chunks on Hopper; `attention.py` launches it.

It computes what `attention_chunk_kernel.py` does in the manner of FlashAttention-3 (Shah et al.
2024): four warps have the copy engine (TMA) bring pages of keys and values into a ring of slots,
and two warpgroups of 64 lines each multiply them. While a warpgroup computes the softmax of one
tile of tokens, the tensor cores compute the values that it weighted before, or what the other
warpgroup has started: the two take turns. Programs stay and go through many tiles, so that the
first keys of a tile are there when the previous tile ends.

A slot holds the keys of one tile of tokens and the values of the tile before it, as both are
multiplied in the same step. So n tiles of tokens take n + 1 slots.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from slipstream.kernels.triton.attention_segments import (
    CHAINED,
    LEAST,
    LINES,
    SPLIT,
    averaged,
    joined,
    keep_sums,
    kept_sums,
    last_segment,
    scratch_of,
    store_segment,
)
from slipstream.kernels.triton.attention_stream_loads import (
    INFO,
    TOKENS,
    after,
    lines_of,
    load_half,
    load_queries,
    tile_at,
    tiles_of_requests,
    tiles_of_segment,
    told_numbers,
)
from slipstream.kernels.triton.matmul_stream_parts import (
    _barrier,
    launch_dependents,
    wait_for_inputs,
)

SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
WORD = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
LOG2_E = gl.constexpr(1.4426950408889634)
STAGES = gl.constexpr(3)
LOADERS = gl.constexpr(4)
FIRST, SECOND = gl.constexpr(0), gl.constexpr(1)


@gluon.jit
def _turn_barrier(what: gl.constexpr, which):
    """`bar.sync` or `bar.arrive` at the barrier with which warpgroup `which` waits for its turn.

    Triton itself uses the first barriers of the 16: one for each part of the program.
    """
    gl.inline_asm_elementwise(
        what.value + " $1, 256; mov.u32 $0, 0;", "=r,r", [8 + which],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _computed(total):
    """Keep the compiler from moving a wait to before the computation of sums of weights.

    It does not know that sums are not negative, so that nothing is ever stored.
    """
    gl.inline_asm_elementwise(
        "{.reg .pred p; .reg .b32 a; mov.b32 a, 0; setp.lt.f32 p, $1, 0f00000000; "
        "@p st.volatile.shared.f32 [a], $1; mov.u32 $0, 0;}",
        "=r,r", [total], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _weights(score, largest, total, factor):
    """A step of the online softmax (Milakov and Gimelshein 2018)."""
    highest = gl.maximum(largest, gl.max(score, axis=1) * factor)
    negative = gl.zeros_like(score) - highest[:, None]
    weight = gl.exp2(gl.fma(score, gl.zeros_like(score) + factor, negative))
    kept = gl.exp2(largest - highest)
    return weight, highest, total * kept + gl.sum(weight, axis=1), kept


@gluon.jit
def _hidden(score, start, ends, words, tree_start):
    """Minus infinity for tokens that a line does not see, as in `attention_parts.py`."""
    token = start + gl.arange(0, TOKENS, gl.SliceLayout(0, score.type.layout))
    # The compiler would pack 16 conditions into a word, to take it apart again.
    score = gl.inline_asm_elementwise(
        "{.reg .pred p; setp.lt.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p;}", "=f,f,r,r",
        [score, token[None, :], ends[:, None]], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    if words is not None:
        behind = (token - tree_start)[None, :]
        bit = gl.minimum(gl.maximum(behind, 0), 63).to(gl.int64)
        shown = (behind < 0) | (((words[:, None] >> bit) & 1) != 0)
        score = gl.where(shown, score, float("-inf"))
    return score


@gluon.jit
def _first_step(
    place, rings, slot, phase, start, ends, words, tree_start, largest, total, factor,
    operand: gl.constexpr,
):  # fmt: skip
    """Weights of a segment's first tile of tokens, while there are no values to add up yet."""
    ring_k, _, _, empty = rings
    layout: gl.constexpr = largest.type.layout.parent
    _barrier()
    score = gl.zeros([LINES, TOKENS], gl.float32, layout)
    key = ring_k.index(slot).permute((1, 0))
    score = warpgroup_mma(place, key, score, use_acc=False)
    _barrier()
    mbarrier.arrive(empty.index(slot))
    slot, phase = after(slot, phase, STAGES)
    score = _hidden(score, start, ends, words, tree_start)
    weight, largest, total, _ = _weights(score, largest, total, factor)
    weights = gl.convert_layout(weight.to(place.dtype), operand)
    return weights, largest, total, slot, phase


@gluon.jit
def _steps(
    begin, end, state, place, rings, ends, words, tree_start, factor, which: gl.constexpr,
    masked: gl.constexpr,
):  # fmt: skip
    """Scores of the tiles [begin, end), each with the weighted values of the tile before it.

    state: the last tile's weights [lines, tokens], weighted values [lines, head_dim] without
    them, largest score and sum of weights [lines], and the slot that comes next with its phase.
    """
    weights, mixed, largest, total, slot, phase = state
    ring_k, ring_v, full, empty = rings
    layout: gl.constexpr = largest.type.layout.parent
    operand: gl.constexpr = weights.type.layout
    for tile in range(begin, end):
        mbarrier.wait(full.index(slot), phase)
        _turn_barrier("bar.sync", which)
        score = gl.zeros([LINES, TOKENS], gl.float32, layout)
        key = ring_k.index(slot).permute((1, 0))
        score = warpgroup_mma(place, key, score, use_acc=False, is_async=True)
        mixed = warpgroup_mma(weights, ring_v.index(slot), mixed, is_async=True)
        _turn_barrier("bar.arrive", 1 - which)
        score = warpgroup_mma_wait(1, deps=(score,))
        if masked:
            score = _hidden(score, tile * TOKENS, ends, words, tree_start)
        weight, largest, total, kept = _weights(score, largest, total, factor)
        _computed(total)
        mixed = warpgroup_mma_wait(0, deps=(mixed,))
        weights = gl.convert_layout(weight.to(weights.dtype), operand)
        _barrier()
        mbarrier.arrive(empty.index(slot))
        mixed *= gl.convert_layout(kept, gl.SliceLayout(1, operand.parent))[:, None]
        slot, phase = after(slot, phase, STAGES)
    return weights, mixed, largest, total, slot, phase


@gluon.jit
def _segment(
    numbers, place, rings, slot, phase, ends, words, largest, total, factor, which: gl.constexpr,
    operand: gl.constexpr,
):  # fmt: skip
    """A segment of the context: all but the last tile's weighted values, which are started.

    Returns (weighted values, largest score, sum of weights, slot of the last values, phase).
    """
    _, rows, context, _, count, plain, tree_start, segment, _, _ = numbers
    _, ring_v, full, _ = rings
    head_dim: gl.constexpr = ring_v.shape[2]
    summed: gl.constexpr = operand.parent
    begin, end = tiles_of_segment(segment, count, rows)
    mixed = gl.zeros([LINES, head_dim], gl.float32, summed)
    mbarrier.wait(full.index(slot), phase)
    weights, largest, total, slot, phase = _first_step(
        place, rings, slot, phase, begin * TOKENS, ends, words, tree_start, largest, total, factor,
        operand,
    )  # fmt: skip
    plain = gl.minimum(gl.maximum(plain, begin + 1), end)
    state = (weights, mixed, largest, total, slot, phase)
    state = _steps(
        begin + 1, plain, state, place, rings, ends, words, tree_start, factor, which, False
    )
    state = _steps(plain, end, state, place, rings, ends, words, tree_start, factor, which, True)
    weights, mixed, largest, total, slot, phase = state
    mbarrier.wait(full.index(slot), phase)
    value = ring_v.index(slot)
    if end * TOKENS > context:  # zero times what lies behind the context may be NaN
        copied: gl.constexpr = gl.BlockedLayout(
            [1, 8], [256 // head_dim, head_dim // 8], [4, 1], [1, 0]
        )
        token = (end - 1) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, copied))
        there = value.load(copied)
        value.store(gl.where((token < context)[:, None], there, gl.zeros_like(there)))
        fence_async_shared()
        _barrier()
    mixed = warpgroup_mma(weights, value, mixed, is_async=True)
    return mixed, largest, total, slot, phase


@gluon.jit
def _sums_before(sinks, head, first, lines: gl.constexpr):
    """Largest score and sum of weights [lines] before any token of a segment, the `first` or not.

    The score is finite, so that the weights of a line that sees nothing are zero.
    """
    largest = gl.full([LINES], LEAST, gl.float32, lines)
    total = gl.zeros([LINES], gl.float32, lines)
    if sinks is not None:  # a sink adds to the sum of weights, but has no value
        largest = gl.where(first, gl.load(sinks + head).to(gl.float32) * LOG2_E, largest)
        total = gl.where(first, 1.0, total)
    return largest, total


@gluon.jit
def _attend(shared, sizes: gl.constexpr, which: gl.constexpr):
    """The part of a warpgroup, for half of the lines of each tile."""
    query, out, parts, sinks, places, ring_k, ring_v, told, told_ends, full, empty = shared[:11]
    turns, ancestors, row_stride, scale = shared[11:]
    kv_heads: gl.constexpr = sizes[0]
    groups: gl.constexpr = sizes[1]
    mode: gl.constexpr = sizes[5]
    head_dim: gl.constexpr = ring_k.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    lines: gl.constexpr = gl.SliceLayout(1, layout)
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, head_dim, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, summed, 2)
    copied: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // head_dim, head_dim // 8], [4, 1], [1, 0]
    )
    wait_for_inputs(sizes[4])
    place, rings = places.index(which), (ring_k, ring_v, full, empty)
    factor = scale * LOG2_E
    slot, phase = 0, 0
    if which == 1:
        _turn_barrier("bar.arrive", 0)
    all_largest = gl.full([LINES], LEAST, gl.float32, lines)
    all_total = gl.zeros([LINES], gl.float32, lines)
    more = (turns > 0).to(gl.int32)
    queries = load_queries(
        query, told, full, slot, phase, which, row_stride, groups, head_dim, copied, more > 0
    )
    while more > 0:
        # `load_queries` has read them too, but Triton 3.6 had trouble with numbers that the loop
        # carries.
        numbers = told_numbers(told, slot)
        first, rows, _, tile, count, _, _, segment, kv_head, more = numbers
        place.store(queries)
        fence_async_shared()
        ends = told_ends.index(slot).slice(which * LINES, LINES).load(lines)
        line = (tile * 2 + which) * LINES + gl.arange(0, LINES, lines)
        words = ancestors
        if ancestors is not None:
            words = gl.load(ancestors + first + line // groups, mask=line // groups < rows, other=0)
        sink = kv_head * groups + line % groups
        largest, total = _sums_before(sinks, sink, segment == 0, lines)
        mixed, largest, total, slot, phase = _segment(
            numbers, place, rings, slot, phase, ends, words, largest, total, factor, which, operand
        )
        row, head, inside = lines_of(numbers, which, groups, copied)
        column = gl.arange(0, head_dim, gl.SliceLayout(0, copied))[None, :]
        target = out + (row * kv_heads * groups + head) * head_dim + column
        done = empty.index(slot)
        slot, phase = after(slot, phase, STAGES)
        queries = load_queries(
            query, told, full, slot, phase, which, row_stride, groups, head_dim, copied, more > 0
        )
        mixed = warpgroup_mma_wait(0, deps=(mixed,))
        _barrier()
        mbarrier.arrive(done)
        if mode == CHAINED:
            scratch = scratch_of(parts[0], which, summed, head_dim)
            before = kept_sums(scratch, segment)
            fresh = segment == 0
            all_largest = gl.where(fresh, LEAST, all_largest)
            all_total = gl.where(fresh, 0.0, all_total)
            mixed, largest, total = joined(before, all_largest, all_total, mixed, largest, total)
            all_largest, all_total = largest, total
            inside &= keep_sums(scratch, mixed, last_segment(count * TOKENS, rows) == segment)
        if mode == SPLIT:
            inside &= store_segment(parts, numbers, which, mixed, largest, total, kv_heads, groups)
        place.store(averaged(mixed, total).to(ring_k.dtype))
        gl.store(target, place.load(copied), mask=inside)


@gluon.jit(do_not_specialize=["requests"])
def attention_stream_kernel(
    query, keys, values, out, part, part_largest, part_total, query_start, context_lens, tables,
    positions, tokens, ancestors, tree_starts, last_seen, sinks, row_stride, table_stride, scale,
    count, requests, short_rows, kv_heads: gl.constexpr, groups: gl.constexpr,
    block_size: gl.constexpr, block_r: gl.constexpr, mode: gl.constexpr, pdl: gl.constexpr,
):  # fmt: skip
    """Attention of requests with more than `short_rows` rows; see `_chunks` of `attention.py`.

    query [T, Hq * D] has rows `row_stride` apart; out [T, Hq * D] is contiguous. keys and values
    are TMA descriptors of the cache [tokens, Hk * D], in boxes of a page, or of half a tile where
    pages are larger. count: T. block_r: a power of two, at least `requests`. mode: see
    `attention_segments.py`; if `SPLIT`, part, part_largest and part_total get what
    `join_segments_kernel` reads; if `CHAINED`, part has room for [2, 64, D] of each program.

    Programs go through the tiles of all KV heads, the last tiles of each request first, as later
    tiles see more tokens.
    """
    launch_dependents(pdl)
    head_dim: gl.constexpr = keys.block_shape[1]
    dtype: gl.constexpr = keys.dtype
    places = gl.allocate_shared_memory(dtype, [2, LINES, head_dim], SWIZZLED)
    ring_k = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, head_dim], SWIZZLED)
    ring_v = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, head_dim], SWIZZLED)
    told = gl.allocate_shared_memory(gl.int32, [STAGES * INFO, 1], WORD)
    told_ends = gl.allocate_shared_memory(gl.int32, [STAGES, 2 * LINES], WORD)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=LOADERS)
        mbarrier.init(empty.index(slot), count=2)
    wait_for_inputs(pdl)
    _, _, _, _, _, units = tiles_of_requests(
        query_start, context_lens, requests, short_rows, groups, block_r, mode
    )
    total = gl.sum(units, axis=0)
    programs = gl.num_programs(0)
    turns = total * kv_heads // programs
    turns += (tile_at(turns, programs) < total * kv_heads).to(gl.int32)
    sizes: gl.constexpr = (kv_heads, groups, block_size, block_r, pdl, mode)
    parts = (part, part_largest, part_total, count)
    shared = (
        query, out, parts, sinks, places, ring_k, ring_v, told, told_ends, full, empty, turns,
        ancestors, row_stride, scale,
    )  # fmt: skip
    lists = (
        told, told_ends, full, empty, turns, total, programs, query_start, context_lens, tables,
        positions, tokens, tree_starts, last_seen, requests, short_rows, table_stride,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_attend, (shared, sizes, FIRST)),
            (_attend, (shared, sizes, SECOND)),
            (load_half, (keys, ring_k, lists, sizes, FIRST, FIRST)),
            (load_half, (keys, ring_k, lists, sizes, FIRST, SECOND)),
            (load_half, (values, ring_v, lists, sizes, SECOND, FIRST)),
            (load_half, (values, ring_v, lists, sizes, SECOND, SECOND)),
        ],
        [4, 1, 1, 1, 1],
        [232, 40, 40, 40, 40],
    )
