"""The grouped matmul: rows sorted by expert times the experts' weights, in any format.

    out[pair, n] = sum of x[row, k] * weight[expert, n, k]

As in `matmul_kernels.py`, weights are the first operand of the tensor cores, and a sum over k is
one chain of steps. Quantized weights are dequantized in registers. With one expert and no pairs,
this is the ordinary matmul of a quantized weight.

The second product of a layer's experts reads the routing before it waits for its rows. It may do
so because the first product starts it only after its own wait (`launch.py`). These loads bypass the
L1 cache, which may still hold the routing of another layer.
"""

import triton
import triton.language as tl

from slipstream.kernels.triton.activation import gated_value
from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs
from slipstream.kernels.triton.matmul_kernels import halves, weight_rows

# How weights are stored: see `operands.py`.
PLAIN, MXFP4, NVFP4, FLOAT8_BLOCKS, INT4, INT8 = (
    tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4),
    tl.constexpr(5),
)  # fmt: skip


@triton.jit
def clamped_gated_value(gate, up, limit: tl.constexpr, alpha: tl.constexpr):
    """The activation of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), clamped, in float32."""
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))


@triton.jit
def expert_tile(starts, ends, slot, experts: tl.constexpr, block: tl.constexpr):
    """(expert of tile `slot`, start of the expert's pairs, tile's number within the expert, end of
    the expert's pairs).

    Past the last tile the expert is `experts`, and nothing more is loaded.
    """
    each = tl.arange(0, block)
    after = tl.load(ends + each, mask=each < experts, other=2147483647, cache_modifier=".cg")
    expert = tl.sum((after <= slot).to(tl.int32), axis=0)
    before = tl.max(tl.where(after <= slot, after, 0), axis=0)
    there = expert < experts
    first = tl.load(starts + expert, mask=there, other=0, cache_modifier=".cg")
    end = tl.load(starts + expert + 1, mask=there, other=0, cache_modifier=".cg")
    return expert, first, slot - before, end


@triton.jit
def expert_pairs(choices, slot, line, rows, experts: tl.constexpr, chosen: tl.constexpr):
    """(expert of pair `slot`, each row's pair with that expert, whether the row has one).

    If an earlier pair has the same expert, the result is `experts`: that pair's tile has all rows.
    """
    many: tl.constexpr = triton.next_power_of_2(chosen)
    place = tl.arange(0, many)
    pair = line[:, None] * chosen + place[None, :]
    there = (line < rows)[:, None] & (place < chosen)[None, :]
    expert = tl.load(choices + slot, cache_modifier=".cg")
    own = tl.load(choices + pair, mask=there, other=experts, cache_modifier=".cg") == expert
    first = tl.min(tl.min(tl.where(own, pair, 2147483647), axis=1), axis=0)
    at = line * chosen + tl.sum(tl.where(own, place[None, :], 0), axis=1)
    valid = tl.max(own.to(tl.int32), axis=1) > 0
    return tl.where(first < slot, experts, expert), at, valid


@triton.jit
def _e2m1(codes):
    """e2m1 codes as float32: moves exponent and mantissa in place, then corrects the bias."""
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2 ** 126


@triton.jit
def _power_of_two(scales):
    """e8m0 scales as float32."""
    scales = scales.to(tl.int32)
    bits = tl.where(scales == 0, 0x400000, scales << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _four_bit_scales(scales, zeros, at, inside, form: tl.constexpr):
    """(scales, zero points) of groups as float32; e2m1 formats ignore the zero points."""
    zero = 8.0
    if form == MXFP4:
        scale = _power_of_two(tl.load(scales + at, mask=inside, other=0))
    else:
        scale = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
    if zeros is not None:
        zero = tl.load(zeros + at, mask=inside, other=0).to(tl.float32)
    return scale, zero


@triton.jit
def _number(codes, scale, zero, form: tl.constexpr):
    return ((codes & 15).to(tl.float32) - zero if form == INT4 else _e2m1(codes)) * scale


@triton.jit
def _four_bits(
    sums, values, scales, zeros, x, row, x_at, valid, depth: tl.constexpr, form: tl.constexpr,
    group: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """Add the products with 4-bit weights: one for even and one for odd columns, which are the low
    and high halves of bytes."""
    byte = tl.arange(0, block_k // 2)
    # The range of float16 is too small for the scales of MXFP4.
    halved: tl.constexpr = form == MXFP4 and x.dtype.element_ty == tl.float16
    wide: tl.constexpr = tl.float32 if halved else x.dtype.element_ty
    for k in range(0, depth, block_k):
        inside = (byte + k // 2 < depth // 2)[None, :]
        codes = tl.load(
            values + row[:, None] * (depth // 2) + (k // 2 + byte)[None, :], mask=inside, other=0
        ).to(tl.int32)
        at = row[:, None] * (depth // group) + ((k // 2 + byte) // (group // 2))[None, :]
        scale, zero = _four_bit_scales(scales, zeros, at, inside, form)
        even = tl.load(x_at + k + 2 * byte[None, :], mask=valid & inside, other=0.0)
        odd = tl.load(x_at + k + 2 * byte[None, :] + 1, mask=valid & inside, other=0.0)
        low, high = _number(codes, scale, zero, form), _number(codes >> 4, scale, zero, form)
        sums = tl.dot(low.to(wide), tl.trans(even.to(wide)), sums, input_precision="ieee")
        sums = tl.dot(high.to(wide), tl.trans(odd.to(wide)), sums, input_precision="ieee")
    return sums


@triton.jit
def _eight_bit_blocks(
    sums, values, scales, row, x_at, column, valid, depth: tl.constexpr, block_rows: tl.constexpr,
    block_columns: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """Add the products with e4m3 blocks. Each block is summed before it is scaled, since scales are
    float32."""
    blocks: tl.constexpr = (depth + block_columns - 1) // block_columns
    for block in range(0, blocks):
        own = tl.zeros_like(sums)
        for k in tl.static_range(0, block_columns, block_k):
            at = block * block_columns + k + column
            inside = ((at < depth) & (k + column < block_columns))[None, :]
            weight = tl.load(values + row[:, None] * depth + at[None, :], mask=inside, other=0.0)
            tile_x = tl.load(x_at + at[None, :], mask=valid & inside, other=0.0)
            own = tl.dot(weight.to(tile_x.dtype), tl.trans(tile_x), own, input_precision="ieee")
        sums += own * tl.load(scales + row // block_rows * blocks + block)[:, None]
    return sums


@triton.jit
def _plain(
    sums, values, row, x_at, column, valid, depth: tl.constexpr, block_k: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    for k in tl.range(0, depth, block_k, num_stages=stages):
        inside = (column + k < depth)[None, :]
        at = values + row[:, None] * depth + (k + column)[None, :]
        weight = tl.load(at, mask=inside, other=0.0)
        tile_x = tl.load(x_at + k + column[None, :], mask=valid & inside, other=0.0)
        if weight.dtype.is_fp8():  # e4m3 is exact in float16; sums are float32
            weight = weight.to(tl.float16)
            tile_x = tile_x.to(tl.float16)
        elif weight.dtype == tl.int8:
            weight = weight.to(tile_x.dtype)
        sums = tl.dot(weight, tl.trans(tile_x), sums, input_precision="ieee")
    return sums


@triton.jit
def _finished(
    sums, x_scales, row_scales, bias, row, source, valid, gated: tl.constexpr,
    limit: tl.constexpr, alpha: tl.constexpr,
):  # fmt: skip
    """Apply the scales of rows of x and of weights, bias and activation to `sums`."""
    if x_scales is not None:
        sums *= tl.load(x_scales + source, mask=valid, other=0.0)[None, :]
    if row_scales is not None:
        sums *= tl.load(row_scales + row)[:, None]
    if bias is not None:
        sums += tl.load(bias + row).to(tl.float32)[:, None]
    if gated:
        gate, up = halves(sums)
        if limit is None:
            sums = gated_value(gate, up, gated)
        else:
            sums = clamped_gated_value(gate, up, limit, alpha)
    return sums


@triton.jit
def _tile_of(
    choices, pairs, starts, ends, slot, line, rows, experts: tl.constexpr, block: tl.constexpr,
    chosen: tl.constexpr,
):  # fmt: skip
    """(expert of a tile, place and pair of each of its lines, which lines are valid)."""
    expert = 0
    if choices is not None:
        expert, pair, valid = expert_pairs(choices, slot, line, rows, experts, chosen)
        place = pair
    elif pairs is not None:
        expert, first, part, end = expert_tile(starts, ends, slot, experts, block)
        place = first + part * line.shape[0] + line
        valid = place < end
        pair = tl.load(pairs + place, mask=valid, other=0, cache_modifier=".cg")
    else:
        place = slot * line.shape[0] + line
        valid = place < rows
        pair = place
    return expert, place, pair, valid


@triton.jit
def _begin(gathers: tl.constexpr, chosen: tl.constexpr, pdl: tl.constexpr):
    """Start the next kernel, and if the kernel `gathers`, wait for its inputs. The first product of
    a choice waits before it starts the second, which reads the choice early."""
    if not (gathers and chosen):
        launch_dependents(pdl)
    if gathers:
        wait_for_inputs(pdl)
    if gathers and chosen:
        launch_dependents(pdl)


@triton.jit(do_not_specialize=["rows"])
def grouped_kernel(
    x, x_scales, values, scales, zeros, row_scales, bias, shared, choices, pairs, starts, ends,
    factors, out, row_stride, rows, width, depth: tl.constexpr, experts: tl.constexpr,
    block: tl.constexpr, chosen: tl.constexpr, gathers: tl.constexpr, form: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, gated: tl.constexpr,
    limit: tl.constexpr, alpha: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
    block_k: tl.constexpr, stages: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Programs (tile of n, tile of rows). values [experts * width, depth], twice the rows if
    `gated`; row_scales (float32) and bias: one number for each of these rows. `shared` is the last
    expert.

    Pairs are sorted by expert; with `choices` they are not, and each tile belongs to a pair. If it
    `gathers`, a pair's row of x is pair // chosen, and its row of `out` its place in that order.
    Otherwise its row of x is its place, and its row of `out` is the pair, multiplied by the pair's
    factor. Without `pairs` and `choices` there is one expert, and row i of x gives row i of `out`.
    A program without a tile may end without waiting. At least the first pair's program waits, so
    this kernel ends after the previous one, which later kernels rely on.
    """
    tile = tl.program_id(0)
    row = weight_rows(tile, width, block_n, gated)
    _begin(gathers, choices is not None or pairs is not None, pdl)
    slot, line = tl.program_id(1), tl.arange(0, block_m)
    expert, place, pair, valid = _tile_of(
        choices, pairs, starts, ends, slot, line, rows, experts, block, chosen
    )
    if expert == experts:
        return
    if experts > 1:
        if shared is not None:
            values = tl.where(expert == experts - 1, shared, values)
            expert = tl.where(expert == experts - 1, 0, expert)
        row += tl.cast(expert, tl.int64) * width * (2 if gated else 1)
    source = pair // chosen if gathers else place
    column = tl.arange(0, block_k)
    x_at = x + source.to(tl.int64)[:, None] * row_stride
    there = valid[:, None]
    if not gathers:
        wait_for_inputs(pdl)
    sums = tl.zeros((block_n, block_m), dtype=tl.float32)
    if scales is None:
        sums = _plain(sums, values, row, x_at, column, there, depth, block_k, stages)
    elif form == FLOAT8_BLOCKS:
        sums = _eight_bit_blocks(
            sums, values, scales, row, x_at, column, there, depth, block_rows, block_columns,
            block_k,
        )  # fmt: skip
    else:
        sums = _four_bits(
            sums, values, scales, zeros, x, row, x_at, there, depth, form, block_columns, block_k
        )
    sums = _finished(sums, x_scales, row_scales, bias, row, source, valid, gated, limit, alpha)
    goes = place if gathers else pair
    if factors is not None:
        sums *= tl.load(factors + pair, mask=valid, other=0.0)[None, :]
    own: tl.constexpr = sums.shape[0]
    n = tile * own + tl.arange(0, own)
    at = goes[None, :].to(tl.int64) * width + n[:, None]
    inside = (n < width)[:, None] & valid[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=inside)
