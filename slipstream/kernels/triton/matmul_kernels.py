"""The matmul for few rows, which reads weights once, as the first operand of the tensor cores.

    out[split, m, n] = sum of x[m, k] * weight[n, k] over the split's part of k

A tile of weights [block_n, block_k] is multiplied by rows [block_k, block_m]. The tensor cores add
up a split's part of k in one chain of steps, so the bits of a sum depend only on the splits, and
neither on tile sizes nor on the number of rows.
"""

import triton
import triton.language as tl

from slipstream.kernels.triton.activation import gated_value
from slipstream.kernels.triton.adapters import add_expanded
from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs

PREFETCHED_BYTES = tl.constexpr(256)


@triton.jit
def weight_rows(tile, width, block_n: tl.constexpr, gated: tl.constexpr):
    """[block_n] int64: the rows of a tile of weights; past the last row, the last row again.

    A gated tile alternates between 8 rows of the gate and the 8 rows of up that they multiply: a
    thread's accumulators of the tensor cores are 8 rows apart, so it has both of a pair.
    """
    line = tl.arange(0, block_n)
    if gated:
        row = tile * (block_n // 2) + line // 16 * 8 + line % 8
        row = tl.minimum(row, width - 1) + (line // 8 % 2) * width
    else:
        row = tl.minimum(tile * block_n + line, width - 1)
    return row.to(tl.int64)


@triton.jit
def halves(total):
    """Sums [block_n, block_m] of a gated tile -> (gate, up), each [block_n / 2, block_m]."""
    block_n: tl.constexpr = total.shape[0]
    block_m: tl.constexpr = total.shape[1]
    apart = tl.permute(tl.reshape(total, (block_n // 16, 2, 8, block_m)), (0, 2, 3, 1))
    gate, up = tl.split(apart)
    return tl.reshape(gate, (block_n // 2, block_m)), tl.reshape(up, (block_n // 2, block_m))


@triton.jit
def _prefetch(weight, row, first, depth: tl.constexpr, columns: tl.constexpr):
    """Prefetch `columns` columns of the given rows, from column `first` on, into the L2 cache."""
    size: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    piece = tl.arange(0, columns * size // PREFETCHED_BYTES) * (PREFETCHED_BYTES // size)
    address = (weight + row[:, None] * depth + first + piece[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 256; mov.u32 $0, 0;",
        "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _product(tile_w, tile_x, total):
    if tile_w.dtype.is_fp8():  # e4m3 is exact in float16; sums are float32
        tile_w = tile_w.to(tl.float16)
        tile_x = tile_x.to(tl.float16)
    return tl.dot(tile_w, tl.trans(tile_x), total, input_precision="ieee")


@triton.jit
def _chain(
    total, weight_at, x_at, column, valid, begin, end, ragged: tl.constexpr, block_k: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    """`total` plus the product over the columns [begin, end).

    The bounds must not be constants: Triton would unroll a loop of one step, and begin that step's
    sum with the bias that is added after it, which changes last bits.
    """
    for k in tl.range(begin, end, block_k, num_stages=stages):
        if ragged:
            inside = (column + k < end)[None, :]
            tile_w = tl.load(weight_at + k, mask=inside, other=0.0)
            tile_x = tl.load(x_at + k, mask=valid[:, None] & inside, other=0.0)
        else:
            tile_w = tl.load(weight_at + k, eviction_policy="evict_first")
            tile_x = tl.load(x_at + k, mask=valid[:, None], other=0.0)
        total = _product(tile_w, tile_x, total)
    return total


@triton.jit
def _scaled(sums, by_line, by_row):
    if by_line is not None:
        sums *= by_line
    if by_row is not None:
        sums *= by_row
    return sums


@triton.jit
def _store(out, sums, tile, split, line, rows, width, gated: tl.constexpr):
    if gated:
        gate, up = halves(sums)
        sums = gated_value(gate, up, gated)
    own: tl.constexpr = sums.shape[0]
    column = tile * own + tl.arange(0, own)
    inside = (column < width)[:, None] & (line < rows)[None, :]
    place = (split * rows + line)[None, :].to(tl.int64) * width + column[:, None]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def matmul_kernel(
    x, x_scales, weight, weight_scales, bias, out, row_stride, rows, width, depth: tl.constexpr,
    part: tl.constexpr, joined: tl.constexpr, gated: tl.constexpr, block_m: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr, stages: tl.constexpr, ahead: tl.constexpr,
    pdl: tl.constexpr, inner, up, ends, adapters, rank: tl.constexpr, padded: tl.constexpr,
    chunk: tl.constexpr, chunks: tl.constexpr, splits_k: tl.constexpr, parts: tl.constexpr,
):  # fmt: skip
    """Programs (tile of rows, tile of n, part of `out`). x [rows, depth]; weight [width, depth], or
    [2 * width, depth] if `gated`; out [parts, rows, width]: each has the sum of `joined` splits.

    Before it waits for x, a program prefetches `ahead` columns of its weights. Arguments from
    `inner` on are what adapters add (`adapters.py`), or None.
    """
    launch_dependents(pdl)
    tile, split = tl.program_id(1), tl.program_id(2)
    first = split * part * joined
    ragged: tl.constexpr = depth % block_k != 0 or part % block_k != 0
    row = weight_rows(tile, width, block_n, gated)
    column = tl.arange(0, block_k)
    weight_at = weight + row[:, None] * depth + column[None, :]
    if ahead:
        _prefetch(weight, row, first, depth, ahead)
    wait_for_inputs(pdl)
    line = tl.program_id(0) * block_m + tl.arange(0, block_m)
    valid = line < rows
    x_at = x + line[:, None].to(tl.int64) * row_stride + column[None, :]
    by_row, by_line = None, None
    if weight_scales is not None:
        by_row = tl.load(weight_scales + row)[:, None]
    if x_scales is not None:
        by_line = tl.load(x_scales + line, mask=valid, other=0.0)[None, :]
    sums = tl.zeros((block_n, block_m), dtype=tl.float32)
    end = tl.minimum(first + part, depth)
    sums = _chain(sums, weight_at, x_at, column, valid, first, end, ragged, block_k, stages)
    sums = _scaled(sums, by_line, by_row)
    # As when splits are separate: each is scaled by itself, and the first one has the bias.
    if bias is not None:
        added = tl.load(bias + row).to(tl.float32)
        sums += tl.where(split == 0, added, 0.0)[:, None]
    for other in tl.static_range(1, joined):
        begin = first + other * part
        end = tl.minimum(begin + part, depth)
        none = tl.zeros((block_n, block_m), dtype=tl.float32)
        own = _chain(none, weight_at, x_at, column, valid, begin, end, ragged, block_k, stages)
        sums += _scaled(own, by_line, by_row)
    if inner is not None and split == 0:
        sums = add_expanded(
            sums, row, line, rows, inner, up, ends, adapters, rank, padded, chunk, chunks, splits_k,
            parts,
        )  # fmt: skip
    _store(out, sums, tile, split, line, rows, width, gated)
