"""The matmul of few rows by small matrices: all weights wait in registers for x to arrive.

A small matrix takes less time to read than a kernel to start, so what counts is how much is left
to do once the kernel before has ended. Here a program holds its weights by then, in the very
registers that the tensor cores read. Plain Triton cannot say so; Gluon, its lower layer, can, but
has no interpreter.

    out[split, m, n] = sum of x[m, k] * weight[n, k] over the split's part of k

A part is cut into `lanes`, each summed up in one chain of steps by a warp of its own (or several
warps, for other rows of weights), then together. Bits follow from parts and lanes alone.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from slipstream.kernels.triton.gluon_launch import launch_dependents, wait_for_inputs

# A lane's columns come in four tiles; a thread holds eight neighbours of each row, 16 bytes.
TILES = gl.constexpr(4)
NEIGHBOURS = gl.constexpr(8)


@gluon.jit
def _weight_rows(tile, width, block_n: gl.constexpr, gated: gl.constexpr, layout: gl.constexpr):
    """As in `matmul_kernels.py`: a gated tile alternates 8 gates and the 8 rows they multiply."""
    line = gl.arange(0, block_n, layout=layout)
    if gated:
        row = tile * (block_n // 2) + line // 16 * 8 + line % 8
        row = gl.minimum(row, width - 1) + (line // 8 % 2) * width
    else:
        row = gl.minimum(tile * block_n + line, width - 1)
    return row


@gluon.jit
def _lanes(lanes: gl.constexpr, layout: gl.constexpr):
    """[lanes, 1, 1]"""
    return gl.arange(0, lanes, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]


@gluon.jit
def _middle(size: gl.constexpr, layout: gl.constexpr):
    """[1, size, 1]"""
    return gl.arange(0, size, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]


@gluon.jit
def _last(size: gl.constexpr, layout: gl.constexpr):
    """[1, 1, size]"""
    return gl.arange(0, size, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]


@gluon.jit
def _step(weights, rows, sums):
    if weights.dtype.is_fp8():  # exact in float16, whose products are added up in float32
        weights = weights.to(gl.float16)
        rows = rows.to(gl.float16)
    return mma_v2(weights, rows, sums)


@gluon.jit
def _loaded_sums(
    w0, w1, w2, w3, x, row_stride, rows, m0, first, sums, own: gl.constexpr, layout: gl.constexpr
):
    """The rows of x go to the registers at once: more than 16 would not all fit."""
    sub: gl.constexpr = own // TILES
    line = m0 + _last(sums.shape[2], layout)
    at = (
        x + line * row_stride + (first + _lanes(sums.shape[0], layout) * own) + _middle(sub, layout)
    )
    inside = line < rows
    sums = _step(w0, gl.load(at, mask=inside, other=0.0), sums)
    sums = _step(w1, gl.load(at + sub, mask=inside, other=0.0), sums)
    sums = _step(w2, gl.load(at + 2 * sub, mask=inside, other=0.0), sums)
    return _step(w3, gl.load(at + 3 * sub, mask=inside, other=0.0), sums)


@gluon.jit
def _store(
    out, sums, tile, split, m0, rows, width, gated: gl.constexpr, lanes: gl.constexpr,
    row_warps: gl.constexpr,
):  # fmt: skip
    block_m: gl.constexpr = sums.shape[1]
    if gated:
        block_n: gl.constexpr = sums.shape[0]
        apart = gl.permute(gl.reshape(sums, (block_n // 16, 2, 8, block_m)), (0, 2, 3, 1))
        gate, up = gl.split(apart)
        sums = gl.reshape(gate / (1.0 + gl.exp(-gate)) * up, (block_n // 2, block_m))
    height: gl.constexpr = sums.shape[0]
    along: gl.constexpr = 32 if height >= 32 else 16
    stored: gl.constexpr = gl.BlockedLayout(
        [1, 1], [along, 32 // along], [1, lanes * row_warps], [0, 1]
    )
    sums = gl.convert_layout(sums, stored)
    column = tile * height + gl.arange(0, height, layout=gl.SliceLayout(1, stored))[:, None]
    line = m0 + gl.arange(0, block_m, layout=gl.SliceLayout(0, stored))[None, :]
    place = (split * rows + line).to(gl.int64) * width + column
    inside = (column < width) & (line < rows)
    gl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["rows"])
def resident_kernel(
    x, x_scales, weight, weight_scales, bias, out, row_stride, rows, width, depth: gl.constexpr,
    part: gl.constexpr, gated: gl.constexpr, block_m: gl.constexpr, block_n: gl.constexpr,
    lanes: gl.constexpr, row_warps: gl.constexpr, pdl: gl.constexpr,
):  # fmt: skip
    """Programs (tile of rows, tile of n, split); arguments as in `matmul_kernels.py`."""
    launch_dependents(pdl)
    own: gl.constexpr = part // lanes
    sub: gl.constexpr = own // TILES
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[lanes, row_warps, 1], instr_shape=[1, 16, 8]
    )
    left: gl.constexpr = gl.DotOperandLayout(0, layout, NEIGHBOURS)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, NEIGHBOURS)
    m0 = gl.program_id(0) * block_m
    tile = gl.program_id(1)
    split = gl.program_id(2)
    first = split * part
    middle: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, left))
    row = _weight_rows(tile, width, block_n, gated, middle)[None, :, None]
    at = weight + row * depth + (first + _lanes(lanes, left) * own) + _last(sub, left)
    w0 = gl.load(at)
    w1 = gl.load(at + sub)
    w2 = gl.load(at + 2 * sub)
    w3 = gl.load(at + 3 * sub)
    wait_for_inputs(pdl)
    sums = gl.zeros([lanes, block_n, block_m], gl.float32, layout)
    sums = _loaded_sums(w0, w1, w2, w3, x, row_stride, rows, m0, first, sums, own, right)
    sums = gl.sum(sums, axis=0)
    flat: gl.constexpr = gl.SliceLayout(0, layout)
    row = _weight_rows(tile, width, block_n, gated, gl.SliceLayout(1, flat))
    if x_scales is not None:
        line = m0 + gl.arange(0, block_m, layout=gl.SliceLayout(0, flat))
        sums = sums * gl.load(x_scales + line, mask=line < rows, other=0.0)[None, :]
    if weight_scales is not None:
        sums = sums * gl.load(weight_scales + row)[:, None]
    if bias is not None:
        added = gl.load(bias + row).to(gl.float32)
        sums += gl.where(split == 0, added, 0.0)[:, None]
    _store(out, sums, tile, split, m0, rows, width, gated, lanes, row_warps)
