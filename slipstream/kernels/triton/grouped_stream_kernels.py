"""The grouped matmul of quantized weights in bfloat16, with asynchronous copies and tensor cores.

    out[pair, n] = sum of x[row, k] * weight[expert, n, k]

Weights are stored in the order of the tensor cores' operands (`fragments.py`), so that a thread
dequantizes its part from 16 contiguous bytes, in registers, without going through shared memory
again. Threads copy weights, scales and rows of x into a ring buffer of `stages` tiles; on Hopper,
rows of x that are contiguous come with TMA if tiles have more than 8. There such tiles are
multiplied with `wgmma`; those of 8 rows, and all on other cards, with `mma.sync`, which for 8 rows
takes half the time of a `wgmma` and fewer registers. A row has the same bits with both. A sum over
k is one chain of steps for any number of rows; with FLOAT8 one for each block of 128 columns, whose
sums are multiplied by their scales and added up.

For few pairs, the second product loads its first weights before it waits for its rows. As in
`grouped_kernels.py`, the first product starts it only after its own wait.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from slipstream.kernels.triton.fragment_registers import FLOAT8
from slipstream.kernels.triton.grouped_stream_copies import (
    fetch_rest,
    fetch_weights,
    scale_pointers,
    weight_pointers,
)
from slipstream.kernels.triton.grouped_stream_products import (
    add_products,
    block_factors,
    no_sums,
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
    out, tiles, bias, row_scales, factors, base, first, choices, pairs, expert, place0, end, width,
    pitch, lift_back, chosen: gl.constexpr, gated: gl.constexpr, scatters: gl.constexpr,
    limit: gl.constexpr, alpha: gl.constexpr,
):  # fmt: skip
    """Store the sums of a program's `tiles`, of which `first` is the number of the first."""
    count: gl.constexpr = tiles[0].shape[1]
    own: gl.constexpr = 32 if gated else 64
    along: gl.constexpr = own // 32
    stored: gl.constexpr = gl.BlockedLayout([2, 1], [16, 2], [along, 4 // along], [0, 1])
    line = gl.arange(0, count, layout=gl.SliceLayout(0, stored))
    place, pair, valid = _pairs(choices, pairs, expert, place0, end, line, scatters, chosen)
    goes = pair if scatters else place
    for each in gl.static_range(len(tiles)):
        tile = first + each
        sums = _finished(
            tiles[each], bias, row_scales, base, tile, width, lift_back, gated, limit, alpha
        )
        sums = gl.convert_layout(sums, stored)
        if scatters:
            sums *= gl.load(factors + goes, mask=valid, other=0.0)[None, :]
        column = tile * own + gl.arange(0, own, layout=gl.SliceLayout(1, stored))
        at = goes[None, :].to(gl.int64) * pitch + column[:, None]
        inside = (column < width)[:, None] & valid[None, :]
        gl.store(out + at, sums.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _finished(
    sums, bias, row_scales, base, tile, width, lift_back, gated: gl.constexpr, limit: gl.constexpr,
    alpha: gl.constexpr,
):  # fmt: skip
    """The outputs of a tile: its sums times the scales of their rows, plus bias, and gated."""
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
    return sums


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
def _sum(
    x, x_tiles, weight, scales, choices, pairs, ring, ring_x, ring_scales, full, row_stride, expert,
    base, tile, width, depth, place0, end_place, lift, part, chosen: gl.constexpr,
    gathers: gl.constexpr, late: gl.constexpr, coding: gl.constexpr, columns: gl.constexpr,
    words: gl.constexpr, span: gl.constexpr, shift: gl.constexpr, gated: gl.constexpr,
    stages: gl.constexpr, high: gl.constexpr, wgmma: gl.constexpr, pdl: gl.constexpr,
):  # fmt: skip
    """`high` times [64, count]: the tiles' sums over the split's part of k."""
    count: gl.constexpr = ring_x.shape[1]
    chunks: gl.constexpr = ring_x.shape[2] // columns
    group = (base + tile * high * (32 if gated else 64)) // 32
    up_offset = width // 32 if gated else None
    last_group = (base + width + 31) // 32 - 1 - group
    first = gl.program_id(2) * part
    last_column = gl.minimum(first + part, depth)
    steps = (last_column - first + columns * chunks - 1) // (columns * chunks)
    first, of_group = first // columns, (depth + columns * span - 1) // (columns * span) * span
    end = (last_column + columns * span - 1) // (columns * span) * span
    weights, line_chunk = weight_pointers(
        weight, group, last_group, up_offset, of_group, chunks, high
    )
    words_at = scales
    if words:
        words_at = scale_pointers(
            scales, group, last_group, up_offset, of_group // span, 16 * words,
            16 * words * chunks // span, high,
        )  # fmt: skip
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
            first + slot * chunks, end, last_column, chunks, words, span, high,
        )  # fmt: skip
    sums = no_sums(count, high, wgmma)
    block_sums = sums
    layout: gl.constexpr = sums[0].type.layout
    now, turn, last = 0, 0, stages - 1
    block: gl.constexpr = max(1, 128 // (columns * chunks))  # steps of a block of FLOAT8
    for step in range(steps):
        chunk = first + step * chunks
        factors = ()
        if coding == FLOAT8:
            factors = block_factors(
                scales, group, last_group, up_offset, chunk * columns, depth,
                step % block == block - 1, high, layout,
            )  # fmt: skip
        async_copy.wait_group(stages - 2)
        if wgmma and count > 8:
            fence_async_shared()
        _barrier()  # what threads copied is there, and all warps are done with the last step
        ahead = chunk + (stages - 1) * chunks
        fetch_weights(weights, line_chunk, ring, last, ahead, end)
        fetch_rest(
            x_tiles, x_rows, there, place0, words_at, ring_x, ring_scales, full, last, ahead, end,
            last_column, chunks, words, span, high,
        )  # fmt: skip
        if x_tiles is not None:
            mbarrier.wait(full.index(now), turn)
        sums, block_sums = add_products(
            sums, block_sums, ring, ring_x, ring_scales, now, factors, step % block != 0, lift,
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
    count: gl.constexpr, chunks: gl.constexpr, stages: gl.constexpr, high: gl.constexpr,
    wgmma: gl.constexpr, pdl: gl.constexpr,
):  # fmt: skip
    """Programs (`high` tiles of n, tile of `count` rows, split); arguments as of `grouped_kernel`.

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
    ring = gl.allocate_shared_memory(gl.uint8, [stages, high * 16 * chunks, 128], BYTES)
    ring_x = gl.allocate_shared_memory(
        x.dtype.element_ty, [stages, count, columns * chunks], HALVES
    )
    ring_scales = None
    if words:
        ring_scales = gl.allocate_shared_memory(
            gl.int32, [stages, high * 32 * words * chunks // span], WORDS
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
            late, coding, columns, words, span, shift, gated, stages, high, wgmma, pdl,
        )  # fmt: skip
        own = out + gl.program_id(2).to(gl.int64) * size
        _store(
            own, sums, bias, row_scales, factors, base, tile * high, choices, pairs, expert, place,
            end, width, pitch, lift_back, chosen, gated, scatters, limit, alpha,
        )  # fmt: skip
