"""The grouped matmul of quantized weights on Hopper, with asynchronous copies and tensor cores.

    out[pair, n] = sum of x[row, k] * weight[expert, n, k]

Weights are stored in the order of the tensor cores' operands (`fragments.py`), so that a thread
dequantizes its part from 16 contiguous bytes, in registers, without going through shared memory
again. Threads copy weights, scales and rows of x into a ring buffer of `stages` tiles; rows of x
that are contiguous come with TMA if tiles have more than 8. Tiles of 8 rows are multiplied with
`mma.sync`, which takes half the time of a `wgmma` of 8 rows and fewer registers, larger tiles with
`wgmma`; a row has the same bits with both. A sum over k is one chain of steps for any number of
rows; with FLOAT8 one for each block of 128 columns, whose sums are multiplied by their scales and
added up.

For few pairs, the second product loads its first weights before it waits for its rows. As in
`grouped_kernels.py`, the first product starts it only after its own wait.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from slipstream.kernels.triton.fragment_registers import (
    FLOAT8,
    chunk_pairs,
    dequantized,
    raw_layout,
    scale_layout,
)
from slipstream.kernels.triton.grouped_stream_copies import (
    fetch_rest,
    fetch_weights,
    scale_pointers,
    weight_pointers,
)
from slipstream.kernels.triton.matmul_stream_kernels import gated_value
from slipstream.kernels.triton.matmul_stream_parts import (
    _barrier,
    launch_dependents,
    wait_for_inputs,
)

BYTES = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 1, [1, 0]))
HALVES = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
WORDS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _gated(sums, gated: gl.constexpr, limit: gl.constexpr, alpha: gl.constexpr):
    """activation(gate) * up: sums [64, rows], 32 of gate and then 32 of up -> [32, rows]."""
    count: gl.constexpr = sums.shape[1]
    pairs: gl.constexpr = gl.BlockedLayout([1, 1, 2], [32, 1, 1], [1, 4, 1], [2, 0, 1])
    apart = gl.permute(gl.reshape(sums, (2, 32, count)), (1, 2, 0))
    gate, up = gl.split(gl.convert_layout(apart, pairs))
    if limit is None:
        active = gated_value(gate, up, gated)
    else:
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
        active = (up + 1.0) * gate / (1.0 + gl.exp(-alpha * gate))
    return active


@gluon.jit
def _store(
    out, sums, bias, row_scales, factors, base, tile, choices, pairs, expert, place0, end, width,
    pitch, lift_back, chosen: gl.constexpr, gated: gl.constexpr, scatters: gl.constexpr,
    limit: gl.constexpr, alpha: gl.constexpr,
):  # fmt: skip
    count: gl.constexpr = sums.shape[1]
    line = gl.arange(0, 64, layout=gl.SliceLayout(1, sums.type.layout))
    if gated:
        row = gl.minimum(tile * 32 + line % 32, width - 1) + line // 32 * width
    else:
        row = gl.minimum(tile * 64 + line, width - 1)
    if row_scales is not None:
        sums *= gl.load(row_scales + base + row)[:, None]
    else:
        sums *= lift_back
    if bias is not None:
        added = gl.load(bias + base + row).to(gl.float32)
        sums += gl.where(gl.program_id(2) == 0, added, 0.0)[:, None]
    if gated:
        sums = _gated(sums, gated, limit, alpha)
    own: gl.constexpr = sums.shape[0]
    along: gl.constexpr = own // 32
    stored: gl.constexpr = gl.BlockedLayout([2, 1], [16, 2], [along, 4 // along], [0, 1])
    sums = gl.convert_layout(sums, stored)
    line = gl.arange(0, count, layout=gl.SliceLayout(0, stored))
    place, pair, valid = _pairs(choices, pairs, expert, place0, end, line, scatters, chosen)
    goes = pair if scatters else place
    if scatters:
        sums *= gl.load(factors + goes, mask=valid, other=0.0)[None, :]
    column = tile * own + gl.arange(0, own, layout=gl.SliceLayout(1, stored))
    at = goes[None, :].to(gl.int64) * pitch + column[:, None]
    inside = (column < width)[:, None] & valid[None, :]
    gl.store(out + at, sums.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _pairs(choices, pairs, expert, place0, end, line, reads: gl.constexpr, chosen: gl.constexpr):
    """(places, pairs, which are valid) of a tile's lines; pairs are loaded only if it `reads`."""
    if choices is None:
        place = place0 + line
        valid = place < end
        pair = place
        if reads:
            pair = gl.load(pairs + place, mask=valid, other=0)
    else:  # lines are rows, `end` of them, and places are pairs
        pair = line * chosen
        found = line * 0
        for each in gl.static_range(chosen):
            own = gl.load(choices + line * chosen + each, mask=line < end, other=-1) == expert
            pair += gl.where(own, each, 0)
            found = gl.where(own, 1, found)
        place, valid = pair, found > 0
    return place, pair, valid


@gluon.jit
def _expert_of_pair(
    choices, slot, rows, experts: gl.constexpr, chosen: gl.constexpr, count: gl.constexpr,
    late: gl.constexpr,
):  # fmt: skip
    """The expert of pair `slot`, or `experts` if an earlier pair has the same expert.

    A kernel that waits `late` bypasses the L1 cache, which may hold the choice of another layer."""
    cache: gl.constexpr = ".cg" if late else ""
    across: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    each = gl.arange(0, _power(count * chosen), layout=across)
    own = gl.load(choices + each, mask=each < rows * chosen, other=-1, cache_modifier=cache)
    expert = gl.load(choices + slot, cache_modifier=cache)
    first = gl.min(gl.where(own == expert, each, 2147483647), axis=0)
    return gl.where(first < slot, experts, expert)


@gluon.constexpr_function
def _power(size):
    return 1 << (size - 1).bit_length()


@gluon.jit
def _expert_tile(starts, ends, slot, experts: gl.constexpr, block: gl.constexpr):
    """Like `expert_tile` of `grouped_kernels.py`."""
    across: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    each = gl.arange(0, block, layout=across)
    after = gl.load(ends + each, mask=each < experts, other=2147483647)
    expert = gl.sum((after <= slot).to(gl.int32), axis=0)
    before = gl.max(gl.where(after <= slot, after, 0), axis=0)
    there = expert < experts
    first = gl.load(starts + expert, mask=there, other=0)
    end = gl.load(starts + expert + 1, mask=there, other=0)
    return expert, first, slot - before, end


@gluon.jit
def _scale_pairs(ring_scales, slot, chunks: gl.constexpr, words: gl.constexpr, span: gl.constexpr):
    """The scales in a slot, as `chunk_pairs` returns them."""
    raw = ring_scales.index(slot).load(scale_layout(chunks // span, words))
    raw = gl.reshape(raw, (2, chunks // span, words, 2, 4, 2, 1, 1, 1))
    return chunk_pairs(raw, chunks)


@gluon.jit
def _product(
    codes, pair_scales, tile_x, before, adds, lift, coding: gl.constexpr, columns: gl.constexpr,
    words: gl.constexpr, shift: gl.constexpr, chunks: gl.constexpr,
):  # fmt: skip
    """The product of a tile of weights and one of x, plus `before` if it `adds`."""
    layout: gl.constexpr = before.type.layout
    taken = dequantized(codes[0], pair_scales[0], layout, coding, words, shift, lift)
    rows = tile_x.slice(0, 2 * columns, dim=1).permute((1, 0))
    if layout.version[0] == 2:
        operand: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
        start = gl.where(adds, before, 0.0)
        done = mma_v2(taken, rows.load(operand), start)
        if chunks == 4:
            more = dequantized(codes[1], pair_scales[1], layout, coding, words, shift, lift)
            rest = tile_x.slice(2 * columns, 2 * columns, dim=1).permute((1, 0))
            done = mma_v2(more, rest.load(operand), done)
    else:
        begun = warpgroup_mma(taken, rows, before, use_acc=adds, is_async=True)
        if chunks == 4:  # dequantize the rest while the tensor cores work
            more = dequantized(codes[1], pair_scales[1], layout, coding, words, shift, lift)
            rest = tile_x.slice(2 * columns, 2 * columns, dim=1).permute((1, 0))
            begun = warpgroup_mma(more, rest, begun, is_async=True)
            done, _, _ = warpgroup_mma_wait(0, deps=(begun, taken, more))
        else:
            done, _ = warpgroup_mma_wait(0, deps=(begun, taken))
    return done


@gluon.jit
def _block_factor(scales, group, up_offset, column, depth, ends, layout: gl.constexpr):
    """[64, 1]: the scales of a tile's rows for the block of a column; 0 unless the block `ends`."""
    half = gl.arange(0, 64, layout=gl.SliceLayout(1, layout)) // 32
    row = (group + half * up_offset).to(gl.int64)
    factor = gl.load(scales + row * (depth // 128) + column // 128)
    return gl.where(ends, factor, 0.0)[:, None]


@gluon.jit
def _added(
    sums, block_sums, ring, ring_x, ring_scales, slot, factor, continues, lift,
    coding: gl.constexpr, columns: gl.constexpr, words: gl.constexpr, span: gl.constexpr,
    shift: gl.constexpr, chunks: gl.constexpr,
):  # fmt: skip
    """`sums` and, for FLOAT8, the sums of the present block, with the products of a slot."""
    raw = ring.index(slot).load(raw_layout(chunks))
    codes = chunk_pairs(gl.reshape(raw, (2, chunks, 2, 4, 2, 4, 2, 2, 4)), chunks)
    tile_x = ring_x.index(slot)
    scales = (None, None)
    if words:
        scales = _scale_pairs(ring_scales, slot, chunks, words, span)
    if coding == FLOAT8:
        block_sums = _product(
            codes, scales, tile_x, block_sums, continues, lift, coding, columns, words, shift,
            chunks,
        )  # fmt: skip
        sums += block_sums * factor
    else:
        sums = _product(
            codes, scales, tile_x, sums, True, lift, coding, columns, words, shift, chunks
        )
    return sums, block_sums


@gluon.constexpr_function
def _sums_layout(count):
    """The layout of the sums of `mma.sync` for tiles of 8 rows, else of `wgmma`."""
    if count == 8:
        return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, count, 16]
    )


@gluon.jit
def _sum(
    x, x_tiles, weight, scales, choices, pairs, ring, ring_x, ring_scales, full, row_stride, expert,
    base, tile, width, depth, place0, end_place, lift, part, chosen: gl.constexpr,
    gathers: gl.constexpr, late: gl.constexpr, coding: gl.constexpr, columns: gl.constexpr,
    words: gl.constexpr, span: gl.constexpr, shift: gl.constexpr, gated: gl.constexpr,
    stages: gl.constexpr, pdl: gl.constexpr,
):  # fmt: skip
    """[64, count]: the tile's sums over the split's part of k."""
    count: gl.constexpr = ring_x.shape[1]
    chunks: gl.constexpr = ring_x.shape[2] // columns
    group = (base + tile * (32 if gated else 64)) // 32
    # A last tile of 32 rows has its only half twice.
    up_offset = width // 32 if gated else (tile * 64 + 32 < width).to(gl.int32)
    first = gl.program_id(2) * part
    last_column = gl.minimum(first + part, depth)
    steps = (last_column - first + columns * chunks - 1) // (columns * chunks)
    first, of_group = first // columns, (depth + columns * span - 1) // (columns * span) * span
    end = (last_column + columns * span - 1) // (columns * span) * span
    weights, line_chunk = weight_pointers(weight, group, up_offset, of_group, chunks)
    words_at = scales
    if words:
        words_at = scale_pointers(
            scales, group, up_offset, of_group // span, 16 * words, 32 * words * chunks // span
        )
    across: gl.constexpr = columns * chunks // 8
    x_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
    line = gl.arange(0, count, layout=gl.SliceLayout(1, x_layout))
    for slot in gl.static_range(stages - 1):
        fetch_weights(weights, line_chunk, ring, slot, first + slot * chunks, end)
    if late:
        wait_for_inputs(pdl)
    place, pair, there = _pairs(choices, pairs, expert, place0, end_place, line, gathers, chosen)
    source = pair // chosen if gathers else place
    x_rows = x + source.to(gl.int64) * row_stride
    for slot in gl.static_range(stages - 1):
        fetch_rest(
            x_tiles, x_rows, there, place0, words_at, ring_x, ring_scales, full, slot,
            first + slot * chunks, end, last_column, chunks, words, span,
        )  # fmt: skip
    sums_layout: gl.constexpr = _sums_layout(count)
    sums = gl.zeros([64, count], gl.float32, sums_layout)
    block_sums = sums
    now, turn, last = 0, 0, stages - 1
    block: gl.constexpr = max(1, 128 // (columns * chunks))  # steps of a block of FLOAT8
    for step in range(steps):
        chunk = first + step * chunks
        factor = 1.0
        if coding == FLOAT8:
            ends = step % block == block - 1
            factor = _block_factor(
                scales, group, up_offset, chunk * columns, depth, ends, sums_layout
            )
        async_copy.wait_group(stages - 2)
        if count > 8:
            fence_async_shared()
        _barrier()  # what threads copied is there, and all warps are done with the last step
        ahead = chunk + (stages - 1) * chunks
        fetch_weights(weights, line_chunk, ring, last, ahead, end)
        fetch_rest(
            x_tiles, x_rows, there, place0, words_at, ring_x, ring_scales, full, last, ahead, end,
            last_column, chunks, words, span,
        )  # fmt: skip
        if x_tiles is not None:
            mbarrier.wait(full.index(now), turn)
        sums, block_sums = _added(
            sums, block_sums, ring, ring_x, ring_scales, now, factor, step % block != 0, lift,
            coding, columns, words, span, shift, chunks,
        )  # fmt: skip
        last = now
        now += 1
        if now == stages:
            now, turn = 0, turn ^ 1
    async_copy.wait_group(0)
    return sums


@gluon.jit(do_not_specialize=["rows"])
def grouped_stream_kernel(
    x, x_tiles, weight, scales, row_scales, bias, choices, pairs, starts, ends, factors, out,
    row_stride, rows, width, depth, part, size, pitch, lift, lift_back, experts: gl.constexpr,
    block: gl.constexpr, chosen: gl.constexpr, gathers: gl.constexpr, late: gl.constexpr,
    coding: gl.constexpr, columns: gl.constexpr, words: gl.constexpr, span: gl.constexpr,
    shift: gl.constexpr, gated: gl.constexpr, limit: gl.constexpr, alpha: gl.constexpr,
    count: gl.constexpr, chunks: gl.constexpr, stages: gl.constexpr, pdl: gl.constexpr,
):  # fmt: skip
    """Programs (tile of n, tile of `count` rows, split); arguments as of `grouped_kernel`.

    A split adds up `part` columns. In `out`, splits are `size` elements apart, and rows `pitch`
    elements.

    x_tiles is a TMA descriptor of x if its rows are contiguous and tiles are large, else None.
    weight points to the fragments [.., 128] bytes, tiles of 32 rows and one chunk of `columns`
    columns; scales has `words` words for every 16 rows and `span` chunks, in order.

    With `late`, the kernel waits for its inputs after it has started to load the first weights.
    That needs the expert early: there is no choice, or a second product reads the choice early.
    """
    chooses: gl.constexpr = choices is not None or pairs is not None
    if not gathers:
        launch_dependents(pdl)
    tile = gl.program_id(0)
    ring = gl.allocate_shared_memory(gl.uint8, [stages, 16 * chunks, 128], BYTES)
    ring_x = gl.allocate_shared_memory(
        x.dtype.element_ty, [stages, count, columns * chunks], HALVES
    )
    ring_scales = None
    if words:
        ring_scales = gl.allocate_shared_memory(
            gl.int32, [stages, 32 * words * chunks // span], WORDS
        )
    full = None
    if x_tiles is not None:
        full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
        for slot in gl.static_range(stages):
            mbarrier.init(full.index(slot), count=1)
    if not late:
        wait_for_inputs(pdl)
    if gathers:
        launch_dependents(pdl)
    if choices is not None:
        expert = _expert_of_pair(choices, gl.program_id(1), rows, experts, chosen, count, late)
        first, line, end, base = 0, 0, rows, expert * (width * 2 if gated else width)
    elif pairs is not None:
        expert, first, line, end = _expert_tile(starts, ends, gl.program_id(1), experts, block)
        base = expert * (width * 2 if gated else width)
    else:
        expert, first, line, end, base = 0, 0, gl.program_id(1), rows, 0
    scatters: gl.constexpr = chooses and not gathers
    if expert < experts:
        place = first + line * count
        sums = _sum(
            x, x_tiles, weight, scales, choices, pairs, ring, ring_x, ring_scales, full,
            row_stride, expert, base, tile, width, depth, place, end, lift, part, chosen, gathers,
            late, coding, columns, words, span, shift, gated, stages, pdl,
        )  # fmt: skip
        own = out + gl.program_id(2).to(gl.int64) * size
        _store(
            own, sums, bias, row_scales, factors, base, tile, choices, pairs, expert, place, end,
            width, pitch, lift_back, chosen, gated, scatters, limit, alpha,
        )  # fmt: skip
