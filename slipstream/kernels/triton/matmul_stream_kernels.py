"""The matmul for few rows on Hopper: tiles are loaded by TMA and multiplied by wgmma.

    out[split, m, n] = sum of x[m, k] * weight[n, k] over the split's part of k

A kernel in plain Triton loads its first tile only when its inputs are ready. This one fills its
shared memory with weights while the previous kernel still runs, so that afterwards it waits for x
alone. That can be written in Gluon, Triton's lower level, which has no interpreter.

Weights and x are both in 16 bits, or both in e4m3 with scales of their rows.

Tiles of weights and of x go through a ring buffer of `stages` slots. Weights are the first operand
of the tensor cores, in one block of `high` rows or in several that share the tile of x. A split's
part of k is added up in one chain of steps, so sums have the bits of `matmul_kernels.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from slipstream.kernels.triton.adapters_stream import (
    add_expanded,
    as_operand,
    await_inner,
    early_factors,
    early_places,
    inner_of_rows,
    make_inner,
)
from slipstream.kernels.triton.matmul_stream_parts import (
    _barrier,
    _fetch,
    _fetch_rows,
    _settled,
    _step,
    _zeros,
    launch_dependents,
    wait_for_inputs,
)

SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
SWIZZLED_BYTES = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
GELU_TANH = gl.constexpr(2)  # as in `activation.py`


@gluon.jit
def gated_value(gate, up, gated: gl.constexpr):
    """activation(gate) * up, as in `activation.py`."""
    power = gate
    if gated == GELU_TANH:
        power = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + gl.exp(-power)) * up


@gluon.jit
def _fetch_weights(
    weight, ring, slot, barrier, tile, k, width, blocks: gl.constexpr, gated: gl.constexpr, wanted
):
    """Load the tile's blocks of weights from column `k` on. The first half of a gated block is rows
    of gate, the second the rows of up that they multiply."""
    high: gl.constexpr = ring.shape[1]
    half: gl.constexpr = high // 2
    for block in gl.static_range(blocks):
        place = ring.index(slot * blocks + block)
        if gated:
            row = (tile * blocks + block) * half
            _fetch(weight, [row, k], barrier, place.slice(0, half), wanted)
            _fetch(weight, [row + width, k], barrier, place.slice(half, half), wanted)
        else:
            _fetch(weight, [(tile * blocks + block) * high, k], barrier, place, wanted)


@gluon.jit
def _weight_rows(layout: gl.constexpr, block, width, high: gl.constexpr, gated: gl.constexpr):
    """[high]: which rows of weights a block has; past the last row, the last row again."""
    line = gl.arange(0, high, layout=layout)
    if gated:
        half: gl.constexpr = high // 2
        return gl.minimum(block * half + line % half, width - 1) + line // half * width
    return gl.minimum(block * high + line, width - 1)


@gluon.jit
def _store(
    out, sums, x_scales, scales, bias, block, split, m0, rows, width, gated: gl.constexpr,
    warps: gl.constexpr,
):  # fmt: skip
    """Store `sums` [high, rows of x] of a block, after scales, bias and activation, transposed to
    `out`."""
    high: gl.constexpr = sums.shape[0]
    count: gl.constexpr = sums.shape[1]
    half: gl.constexpr = high // 2
    if scales is not None:
        line = m0 + gl.arange(0, count, layout=gl.SliceLayout(0, sums.type.layout))
        row = _weight_rows(gl.SliceLayout(1, sums.type.layout), block, width, high, gated)
        sums *= gl.load(x_scales + line, mask=line < rows, other=0.0)[None, :]
        sums *= gl.load(scales + row)[:, None]
    if bias is not None:
        row = _weight_rows(gl.SliceLayout(1, sums.type.layout), block, width, high, gated)
        added = gl.load(bias + row).to(gl.float32)
        sums += gl.where(split == 0, added, 0.0)[:, None]
    if gated:
        pairs: gl.constexpr = gl.BlockedLayout(
            [1, 1, 2], [32, 1, 1], [half // 32, 32 * warps // half, 1], [2, 0, 1]
        )
        apart = gl.permute(gl.reshape(sums, (2, half, count)), (1, 2, 0))
        gate, up = gl.split(gl.convert_layout(apart, pairs))
        sums = gated_value(gate, up, gated)
    own: gl.constexpr = sums.shape[0]
    along: gl.constexpr = own // 32
    stored: gl.constexpr = gl.BlockedLayout([2, 1], [16, 2], [along, warps // along], [0, 1])
    sums = gl.convert_layout(sums, stored)
    column = block * own + gl.arange(0, own, layout=gl.SliceLayout(1, stored))[:, None]
    line = m0 + gl.arange(0, count, layout=gl.SliceLayout(0, stored))[None, :]
    place = (split * rows + line).to(gl.int64) * width + column
    inside = (column < width) & (line < rows)
    gl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)


@gluon.constexpr_function
def _bytes_of(dtype):
    return dtype.primitive_bitwidth // 8


@gluon.jit
def _run(
    begin, stop, steps, sums, slot, turn, last, x, more_x, weight, ring, ring_x, ring_y, full, tile,
    m0, first, width, blocks: gl.constexpr, gated: gl.constexpr, stages: gl.constexpr,
):  # fmt: skip
    """The steps [begin, stop) of all chains; each refills the slot of the step before it."""
    rows: gl.constexpr = x.block_shape[0] + (0 if more_x is None else more_x.block_shape[0])
    step_k: gl.constexpr = ring.shape[2]
    size: gl.constexpr = (blocks * ring.shape[1] + rows) * step_k * _bytes_of(ring.dtype)
    for step in range(begin, stop):
        mbarrier.wait(full.index(slot), turn)
        sums = _step(ring, slot, ring_x, ring_y, sums, blocks)
        _barrier()  # all warps are done with the previous step, so its slot can be filled
        barrier, k = full.index(last), first + (step - 1 + stages) * step_k
        wanted = (step > 0) & (step - 1 + stages < steps)
        mbarrier.expect(barrier, size, wanted)
        _fetch_weights(weight, ring, last, barrier, tile, k, width, blocks, gated, wanted)
        _fetch_rows(x, more_x, m0, k, barrier, ring_x, ring_y, last, wanted)
        last = slot
        slot += 1
        if slot == stages:
            slot, turn = 0, turn ^ 1
    return sums, slot, turn, last


@gluon.jit
def _tiles(width, blocks: gl.constexpr, high: gl.constexpr, gated: gl.constexpr):
    """The number of tiles of n."""
    own: gl.constexpr = blocks * high // (2 if gated else 1)
    return (width + own - 1) // own


@gluon.jit
def _multiply(
    x, more_x, x_scales, weight, scales, bias, out, tile, split, rows, width, depth, part, ring,
    ring_x, ring_y, full, gated: gl.constexpr, blocks: gl.constexpr, stages: gl.constexpr,
    pdl: gl.constexpr, warps: gl.constexpr, inner, up, ends, adapters, counts, rank: gl.constexpr,
    padded: gl.constexpr, chunk: gl.constexpr, chunks: gl.constexpr, makers: gl.constexpr,
    shares: gl.constexpr, parts: gl.constexpr,
):  # fmt: skip
    """The body of `stream_kernel`, with its buffers as arguments."""
    high: gl.constexpr = ring.shape[1]
    step_k: gl.constexpr = ring.shape[2]
    first_rows: gl.constexpr = x.block_shape[0]
    more_rows: gl.constexpr = 0 if more_x is None else more_x.block_shape[0]
    number: gl.constexpr = _bytes_of(ring.dtype)
    size: gl.constexpr = (blocks * high + first_rows + more_rows) * step_k * number
    m0 = gl.program_id(0) * first_rows
    first = split * part
    end = gl.minimum(first + part, depth)
    steps = (end - first + step_k - 1) // step_k  # past the last column there are zeros
    for slot in gl.static_range(stages):
        barrier, k, wanted = full.index(slot), first + slot * step_k, slot < steps
        mbarrier.expect(barrier, size, wanted)
        _fetch_weights(weight, ring, slot, barrier, tile, k, width, blocks, gated, wanted)
    span: gl.constexpr = 2 * first_rows if more_rows else first_rows
    # The slots of rows may be read this early: torch's kernels write them when a pass begins, and
    # no kernel starts before one of torch's has ended.
    factors = early_factors(
        up, adapters, tile, rows, split, width, high, span, gated, rank, padded, chunk, warps
    )
    wait_for_inputs(pdl)
    for slot in gl.static_range(stages):
        k = first + slot * step_k
        _fetch_rows(x, more_x, m0, k, full.index(slot), ring_x, ring_y, slot, slot < steps)
    places = early_places(
        counts, adapters, ends, tile, m0, rows, split, width, high, gated, first_rows, more_rows,
        padded, parts, warps,
    )  # fmt: skip
    sums = _zeros(blocks, high, first_rows, warps, number)
    if more_rows:
        sums += _zeros(blocks, high, more_rows, warps, number)
    slot, turn, last = 0, 0, stages - 1
    # With adapters, `inner` is read while the last tiles are loaded.
    middle = steps
    if inner is not None:
        middle = gl.maximum(steps - stages + 1, 0)
    sums, slot, turn, last = _run(
        0, middle, steps, sums, slot, turn, last, x, more_x, weight, ring, ring_x, ring_y, full,
        tile, m0, first, width, blocks, gated, stages,
    )  # fmt: skip
    made = ()
    if inner is not None:
        sums = _settled(sums, 0)
        if split == 0:
            await_inner(counts, places[0], makers, _tiles(width, blocks, high, gated))
        made = inner_of_rows(inner, places, m0, rows, rank, padded, chunk, shares, parts, x.dtype)
        factors = as_operand(factors, sums[0])
        sums, slot, turn, last = _run(
            middle, steps, steps, sums, slot, turn, last, x, more_x, weight, ring, ring_x, ring_y,
            full, tile, m0, first, width, blocks, gated, stages,
        )  # fmt: skip
    sums = _settled(sums, 0)
    _barrier()
    for chain in gl.static_range(len(sums)):
        block, line = tile * blocks + chain % blocks, m0 + chain // blocks * first_rows
        total = sums[chain]
        if inner is not None and split == 0:
            place = (ring_x if chain < blocks else ring_y).index(0).slice(0, chunk, dim=1)
            total = add_expanded(
                total, place, factors, made[3 * chain], made[3 * chain + 1], made[3 * chain + 2],
                block, line, rows, width, span, gated, inner, up, ends,
                adapters, rank, padded, chunk, chunks, shares, parts, warps,
            )  # fmt: skip
        _store(out, total, x_scales, scales, bias, block, split, line, rows, width, gated, warps)


@gluon.jit(do_not_specialize=["rows"])
def stream_kernel(
    x, more_x, x_scales, weight, scales, bias, out, rows, width, depth, part, gated: gl.constexpr,
    blocks: gl.constexpr, high: gl.constexpr, stages: gl.constexpr, pdl: gl.constexpr,
    warps: gl.constexpr, inner, up, ends, adapters, down, counts, share, rank: gl.constexpr,
    padded: gl.constexpr, chunk: gl.constexpr, chunks: gl.constexpr, makers: gl.constexpr,
    shares: gl.constexpr, parts: gl.constexpr,
):  # fmt: skip
    """Programs (tile of rows, tile of n, split).

    x, more_x and weight are TMA descriptors: x of [rows, depth] in tiles; more_x, or None, of the
    same matrix, in smaller tiles for the rows after the last tile of x; weight of [width, depth],
    or [2 * width, depth] if `gated`. bias [width] or None; out [splits, rows, width]. Rows of x and
    of weight in e4m3 have scales [rows] and [width] or [2 * width] float32, and no adapters.

    Arguments from `inner` on are for adapters (`adapters_stream.py`), or None. With adapters the
    programs are numbered (0, `makers`, then tiles of n, split by split), there are at most 64 rows,
    and step_k is at least `chunk`.
    """
    launch_dependents(pdl)
    first_rows: gl.constexpr = x.block_shape[0]
    step_k: gl.constexpr = x.block_shape[1]
    order: gl.constexpr = SWIZZLED_BYTES if _bytes_of(x.dtype) == 1 else SWIZZLED
    ring = gl.allocate_shared_memory(weight.dtype, [stages * blocks, high, step_k], order)
    ring_x = gl.allocate_shared_memory(x.dtype, [stages, first_rows, step_k], order)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(stages):
        mbarrier.init(full.index(slot), count=1)
    tile, split = gl.program_id(1), gl.program_id(2)
    if down is not None:
        ring_y = None
        if more_x is not None:
            ring_y = gl.allocate_shared_memory(
                x.dtype, [stages, more_x.block_shape[0], step_k], order
            )
        if tile < makers:
            make_inner(
                x, more_x, down, inner, adapters, counts, tile, share, rows, depth, ring, ring_x,
                ring_y, full, stages, pdl, warps, parts * rank, makers // shares,
            )  # fmt: skip
        else:
            tiles = _tiles(width, blocks, high, gated)
            tile -= makers
            _multiply(
                x, more_x, x_scales, weight, scales, bias, out, tile % tiles, tile // tiles, rows,
                width, depth, part, ring, ring_x, ring_y, full, gated, blocks, stages, pdl, warps,
                inner, up, ends, adapters, counts, rank, padded, chunk, chunks, makers, shares,
                parts,
            )  # fmt: skip
    elif more_x is not None and gl.program_id(0) == gl.num_programs(0) - 1:
        ring_y = gl.allocate_shared_memory(x.dtype, [stages, more_x.block_shape[0], step_k], order)
        _multiply(
            x, more_x, x_scales, weight, scales, bias, out, tile, split, rows, width, depth, part,
            ring, ring_x, ring_y, full, gated, blocks, stages, pdl, warps, inner, up, ends,
            adapters, counts, rank, padded, chunk, chunks, makers, shares, parts,
        )  # fmt: skip
    else:
        _multiply(
            x, None, x_scales, weight, scales, bias, out, tile, split, rows, width, depth, part,
            ring, ring_x, None, full, gated, blocks, stages, pdl, warps, inner, up, ends, adapters,
            counts, rank, padded, chunk, chunks, makers, shares, parts,
        )  # fmt: skip
