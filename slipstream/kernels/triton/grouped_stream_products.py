"""The products of a step of `grouped_stream_kernels.py`.

Tiles of weights in a slot of the ring buffer are dequantized in registers and multiplied by the
rows of x in the same slot.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from slipstream.kernels.triton.fragment_registers import (
    FLOAT8,
    chunk_pairs,
    dequantized,
    raw_layout,
    scale_layout,
)
from slipstream.kernels.triton.grouped_stream_copies import group_offset


@gluon.constexpr_function
def _layout(count, wgmma):
    """The layout of the sums of `wgmma`, if it is there and tiles have more than 8 rows, else of
    `mma.sync`."""
    if count == 8 or not wgmma:
        return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, count, 16]
    )


@gluon.jit
def no_sums(count: gl.constexpr, high: gl.constexpr, wgmma: gl.constexpr):
    """`high` sums [64, count] of nothing."""
    sums = ()
    for _ in gl.static_range(high):
        sums += (gl.zeros([64, count], gl.float32, _layout(count, wgmma)),)  # type: ignore[assignment]
    return sums


@gluon.jit
def _tile(
    ring, ring_scales, slot, tile: gl.constexpr, chunks: gl.constexpr, words: gl.constexpr,
    span: gl.constexpr,
):  # fmt: skip
    """(weights, scales) of one of the tiles in a slot, as `chunk_pairs` returns them."""
    own = ring.index(slot).slice(tile * 16 * chunks, 16 * chunks)
    raw = own.load(raw_layout(chunks))
    codes = chunk_pairs(gl.reshape(raw, (2, chunks, 2, 4, 2, 4, 2, 2, 4)), chunks)
    scales = (codes[0], codes[0])  # not used without words
    if words:
        size: gl.constexpr = 32 * words * chunks // span
        of_tile = ring_scales.index(slot).slice(tile * size, size)
        raw = of_tile.load(scale_layout(chunks // span, words))
        scales = chunk_pairs(gl.reshape(raw, (2, chunks // span, words, 2, 4, 2, 1, 1, 1)), chunks)
    return codes, scales


@gluon.jit
def _begun(
    codes, scales, tile_x, before, adds, lift, coding: gl.constexpr, columns: gl.constexpr,
    words: gl.constexpr, shift: gl.constexpr, chunks: gl.constexpr,
):  # fmt: skip
    """(the product of a tile of weights and one of x, plus `before` if it `adds`, operands that
    must stay until it is done)."""
    layout: gl.constexpr = before.type.layout
    taken = dequantized(codes[0], scales[0], layout, coding, words, shift, lift)
    rows = tile_x.slice(0, 2 * columns, dim=1).permute((1, 0))
    operands = (taken,)
    if layout.version[0] == 2:
        operand: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
        begun = mma_v2(taken, rows.load(operand), gl.where(adds, before, 0.0))
    else:
        begun = warpgroup_mma(taken, rows, before, use_acc=adds, is_async=True)
    if chunks == 4:  # dequantize the rest while the tensor cores work
        more = dequantized(codes[1], scales[1], layout, coding, words, shift, lift)
        rest = tile_x.slice(2 * columns, 2 * columns, dim=1).permute((1, 0))
        if layout.version[0] == 2:
            begun = mma_v2(more, rest.load(operand), begun)
        else:
            begun = warpgroup_mma(more, rest, begun, is_async=True)
        operands += (more,)  # type: ignore[assignment]
    return begun, operands


@gluon.jit
def block_factors(
    scales, group, last, up_offset, column, depth, ends, high: gl.constexpr, layout: gl.constexpr
):
    """The scales of the tiles' rows for the block of a column, [64, 1] each; 0 unless it `ends`."""
    factors = ()
    for tile in gl.static_range(high):
        half = 2 * tile + gl.arange(0, 64, layout=gl.SliceLayout(1, layout)) // 32
        row = (group + group_offset(half, last, up_offset)).to(gl.int64)
        factor = gl.load(scales + row * (depth // 128) + column // 128)
        factors += (gl.where(ends, factor, 0.0)[:, None],)  # type: ignore[assignment]
    return factors


@gluon.jit
def add_products(
    sums, block_sums, ring, ring_x, ring_scales, slot, factors, continues, lift,
    coding: gl.constexpr, columns: gl.constexpr, words: gl.constexpr, span: gl.constexpr,
    shift: gl.constexpr, chunks: gl.constexpr,
):  # fmt: skip
    """`sums` and, for FLOAT8, the sums of the present block, with the products of a slot.

    All tiles' products run on the tensor cores at once."""
    high: gl.constexpr = len(sums)
    begun = ()
    operands = ()
    for tile in gl.static_range(high):
        codes, scales = _tile(ring, ring_scales, slot, tile, chunks, words, span)
        before, adds = sums[tile], True
        if coding == FLOAT8:
            before, adds = block_sums[tile], continues
        one, used = _begun(
            codes, scales, ring_x.index(slot), before, adds, lift, coding, columns, words, shift,
            chunks,
        )  # fmt: skip
        begun += (one,)  # type: ignore[assignment]
        operands += used
    done = begun
    if sums[0].type.layout.version[0] == 3:
        done = warpgroup_mma_wait(0, deps=begun + operands)
    totals = ()
    for tile in gl.static_range(high):
        if coding == FLOAT8:
            totals += (sums[tile] + done[tile] * factors[tile],)  # type: ignore[assignment]
        else:
            totals += (done[tile],)  # type: ignore[assignment]
    return totals, done[:high]
