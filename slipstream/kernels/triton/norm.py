"""RMS norms: one program per row, computed in float32 and rounded once at the end.

The sum with the residual is rounded to the model's dtype before it is normed, so that the norm is
computed from the same numbers that are stored as the next residual.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.inboxes import Channel
from slipstream.kernels.norm import (
    Addend,
    Norm,
    PostNorm,
    PostNormAddend,
    SublayerOutput,
    UnreducedSum,
)
from slipstream.kernels.triton import launch
from slipstream.kernels.triton.exchange import (
    count,
    epoch_of,
    receive_sum,
    send_share,
    send_sum,
    sum_of_shares,
    summed_over_ranks,
)
from slipstream.kernels.triton.launch import (
    empty_rows,
    launch_dependents,
    next_power_of_2,
    wait_for_inputs,
)

FLOAT8_MAX = tl.constexpr(448.0)  # of e4m3
# The smallest normal number, so that a row of zeros has a scale that is not zero.
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


NO_POST_NORM = PostNorm()


@dataclass(frozen=True)
class MatmulRows:
    """The left operand of a matmul: values [T, K], and scales of rows [T] float32 or None."""

    values: Tensor
    scales: Tensor | None


@triton.jit
def _to_e4m3(value):
    """Convert float32, at most 448 in magnitude, to e4m3; rounds to nearest, ties to even.

    The value is rounded to 3 mantissa bits, or below 2^-6 to multiples of 2^-9, so that the
    conversion itself is exact. (Triton's interpreter loses a carry when it rounds.)
    """
    bits = value.to(tl.int32, bitcast=True)
    bits += 0x7FFFF + ((bits >> 20) & 1)
    normal = (bits & -0x100000).to(tl.float32, bitcast=True)
    small = (value + 24576.0) - 24576.0  # float32 has steps of 2^-9 there
    return tl.where(tl.abs(value) < 0.015625, small, normal).to(tl.float8e4nv)


@triton.jit
def _rounded(value):
    """(row in e4m3, its scale), where the largest magnitude of the row becomes 448."""
    largest = tl.maximum(tl.max(tl.abs(value), axis=0), TINY * FLOAT8_MAX)
    scale = tl.div_rn(largest, FLOAT8_MAX)
    return _to_e4m3(tl.div_rn(value, scale + tl.zeros_like(value))), scale


@triton.jit
def summed_row(addend, at, part_stride, inside, parts: tl.constexpr):
    """The sum of a row of `parts` addends, in their order, in float32."""
    value = tl.load(addend + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, parts):
        other = tl.load(addend + at + part * part_stride, mask=inside, other=0.0)
        value += other.to(tl.float32)
    return value


@triton.jit
def residual_row(value, post_weight, post_gain, post_eps, residual, factor, total, width):
    """A row of the residual stream in float32: `value` normed with `post_weight`, plus the row
    `residual`, times `factor` (each unless None), rounded to the dtype of `total` unless None."""
    if post_weight is not None:
        value = value.to(post_weight.dtype.element_ty).to(tl.float32)  # rounded as a matmul would
        value = normed_row(value, post_gain, width, post_eps)
        value = value.to(post_weight.dtype.element_ty).to(tl.float32)
    if residual is not None:
        value += residual.to(tl.float32)
    if factor is not None:
        value = value.to(total.dtype.element_ty).to(tl.float32) * tl.load(factor).to(tl.float32)
    if total is not None:
        value = value.to(total.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def _row_by_shares(
    addend, residual, factor, post_weight, total, at, row, column, inside, width, channel, share,
    part_stride, parts: tl.constexpr, rank: tl.constexpr, ranks: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """The row whose columns the ranks add up in equal shares [block], and gather; in float32.

    It has the bits of `summed_over_ranks`, added to the residual stream as by `residual_row`
    unless its norm `post_weight` takes the whole row.
    """
    own = tl.arange(0, block)
    there = own < share
    dtype: tl.constexpr = total.dtype.element_ty
    bits: tl.constexpr = tl.int16 if dtype.primitive_bitwidth == 16 else tl.int32
    epoch = epoch_of(row, channel, ranks)
    for distance in tl.static_range(1, ranks):
        theirs = at + (rank + distance) % ranks * share + own
        part = summed_row(addend, theirs, part_stride, there, parts).to(dtype)
        part = part.to(bits, bitcast=True)
        send_share(part, row, own, there, share, epoch, channel, distance, rank, ranks)
    tl.debug_barrier()  # nothing is written after the waits
    mine = summed_row(addend, at + rank * share + own, part_stride, there, parts).to(dtype)
    before = None
    if residual is not None:
        before = tl.load(residual + row * width + rank * share + own, mask=there, other=0.0)
    value = sum_of_shares(mine, row, own, there, share, epoch, channel, rank, ranks)
    if post_weight is None:
        value = residual_row(value, None, None, 0.0, before, factor, total, width)
        made = value.to(dtype)
    else:
        made = value.to(post_weight.dtype.element_ty)
    send_sum(made.to(bits, bitcast=True), row, own, there, share, epoch, channel, rank, ranks)
    whole = receive_sum(row, column, inside, share, epoch, channel, rank, ranks, bits)
    count(row, epoch, channel, ranks)
    return whole.to(made.dtype, bitcast=True).to(tl.float32)


@triton.jit
def normed_row(value, gain, width, eps):
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    return value * scale * gain


@triton.jit
def _norm_kernel(
    addend, channel, share, post_weight, post_eps, residual, factor, weight, eps, out, scales,
    total, part_stride, row_stride, width, parts: tl.constexpr, rank: tl.constexpr,
    ranks: tl.constexpr, block: tl.constexpr, share_block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Programs (row). Computes `residual_row`, and keeps the row in registers.

    With a `channel` the sum of the addends, rounded to the dtype of `total`, is this rank's part of
    `summed_over_ranks`, or with a `share` of columns of `_row_by_shares`.

    Writes the row to `total` unless None. If there is a `weight`, writes the norm of the row to
    `out`: in the model's dtype or, with `scales`, quantized from that to e4m3.
    """
    launch_dependents(pdl)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    if weight is not None:
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    post_gain = None
    if post_weight is not None:
        post_gain = tl.load(post_weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(pdl)
    place = row * width + column
    before = None
    if residual is not None:
        before = tl.load(residual + place, mask=inside, other=0.0)
    if share is not None:
        value = _row_by_shares(
            addend, residual, factor, post_weight, total, row * row_stride, row, column, inside,
            width, channel, share, part_stride, parts, rank, ranks, share_block,
        )  # fmt: skip
    else:
        value = summed_row(addend, row * row_stride + column, part_stride, inside, parts)
        if channel is not None:
            mine = value.to(total.dtype.element_ty)
            value = summed_over_ranks(mine, row, column, inside, width, channel, rank, ranks)
    if share is None or post_weight is not None:
        value = residual_row(value, post_weight, post_gain, post_eps, before, factor, total, width)
    if total is not None:
        tl.store(total + place, value.to(total.dtype.element_ty), mask=inside)
    if weight is not None:  # an early return would still compile the rest
        normed = normed_row(value, gain, width, eps).to(weight.dtype.element_ty)
        if scales is None:
            tl.store(out + place, normed, mask=inside)
        else:
            rounded, by = _rounded(normed.to(tl.float32))
            tl.store(out + place, rounded, mask=inside)
            tl.store(scales + row, by)


@triton.jit
def _round_kernel(x, out, scales, row_stride, width, block: tl.constexpr, pdl: tl.constexpr):
    launch_dependents(pdl)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    wait_for_inputs(pdl)
    value = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    rounded, scale = _rounded(value)
    tl.store(out + row * width + column, rounded, mask=inside)
    tl.store(scales + row, scale)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _launch(ResidualSum.of(rows, None, None), Norm(weight, eps), MatmulRows(out, None), None)
    return out.view(x.shape)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows, total = normed_rows(x, residual, Norm(weight, eps))
    return rows.values, total


def normed_rows(
    addend: Addend, residual: Tensor | None, norm: Norm | None, float8: bool = False
) -> tuple[MatmulRows, Tensor]:
    """(norm of residual + addend, residual + addend), both [T, H]; addend [T, H] or
    [parts, T, H].

    With `float8` the norm is quantized like `round_rows` does it.
    """
    if norm is not None and norm.bias is not None:
        total = normed_rows(addend, residual, None)[1]
        x = F.layer_norm(total, norm.bias.shape, norm.weight, norm.bias, norm.eps)
        return round_rows(x) if float8 else MatmulRows(x, None), total
    stream = ResidualSum.of(addend, residual, norm)
    total = stream.total
    shape, device, summing = total.shape, total.device, total is not stream.values
    if norm is None:
        if summing:
            _launch(stream, None, MatmulRows(total, None), total)
        return round_rows(total) if float8 else MatmulRows(total, None), total
    plain = (
        None
        if float8
        else MatmulRows(empty_rows(shape[0], shape[1], norm.weight.dtype, device), None)
    )
    rows = plain or _float8_rows(shape, device)
    _launch(stream, norm, rows, total if summing else None)
    return rows, total


@dataclass(frozen=True)
class ResidualSum:
    """The tensors of the addition of an addend to the residual stream.

    Attributes:
        values: addends [T, H] or [parts, T, H].
        channel: receives the other ranks' parts of the sum; None: there are no other ranks' parts.
        total: [T, H], the output; `values` itself if there is nothing to add.
    """

    values: Tensor
    channel: Channel | None
    post_norm: PostNorm
    residual: Tensor | None
    total: Tensor

    @staticmethod
    def of(addend: Addend, residual: Tensor | None, norm: Norm | None) -> "ResidualSum":
        """The tensors for `addend` and `residual`; allocates `total` if there is a sum."""
        post_norm = addend.post_norm if isinstance(addend, PostNormAddend) else NO_POST_NORM
        output = addend.values if isinstance(addend, PostNormAddend) else addend
        channel = output.channel if isinstance(output, UnreducedSum) else None
        total = values = output.values if isinstance(output, UnreducedSum) else output
        if residual is not None or values.ndim == 3 or channel is not None:
            dtype = _dtype(output, residual, norm)
            total = empty_rows(values.shape[-2], values.shape[-1], dtype, values.device)
        assert channel is None or total.dtype == output.dtype, "the sum is rounded to its dtype"
        if residual is not None:
            residual = residual.contiguous()
        return ResidualSum(values, channel, post_norm, residual, total)


def _dtype(addend: SublayerOutput, residual: Tensor | None, norm: Norm | None) -> torch.dtype:
    if norm is not None:
        return norm.weight.dtype
    return addend.dtype if residual is None else residual.dtype


def _float8_rows(shape: torch.Size, device: torch.device) -> MatmulRows:
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    return MatmulRows(values, torch.empty(shape[0], dtype=torch.float32, device=device))


def round_rows(x: Tensor) -> MatmulRows:
    """Quantize x [T, K] to e4m3 with a scale for each row, like the reference backend."""
    assert x.stride(-1) == 1
    out, width = _float8_rows(x.shape, x.device), x.shape[1]
    if x.numel():
        block = next_power_of_2(width)
        _round_kernel[(len(x),)](
            x, out.values, out.scales, x.stride(0), width, block=block, num_warps=_warps(block),
            **launch.options(x.device),
        )  # fmt: skip
    return out


def _launch(stream: ResidualSum, norm: Norm | None, out: MatmulRows, total: Tensor | None) -> None:
    if not out.values.numel():
        return
    addend, channel, post_norm = stream.values, stream.channel, stream.post_norm
    assert addend.stride(-1) == 1
    rows, width = addend.shape[-2:]
    parts = addend.shape[0] if addend.ndim == 3 else 1
    part_stride = addend.stride(0) if parts > 1 else 0
    block = next_power_of_2(width)
    table, share, rank, ranks = None, None, 0, 1
    if channel is not None:
        table, share, rank, ranks = channel.table, channel.share, channel.rank, channel.size
    _norm_kernel[(rows,)](
        addend, table, share, *weight_of(post_norm.norm), stream.residual, post_norm.factor,
        *weight_of(norm), out.values, out.scales, total, part_stride, addend.stride(-2), width,
        parts=parts, rank=rank, ranks=ranks, block=block,
        share_block=next_power_of_2(share or 1), num_warps=_warps(block),
        **launch.options(addend.device),
    )  # fmt: skip


def weight_of(norm: Norm | None) -> tuple[Tensor | None, float]:
    """(weight, epsilon) as kernel arguments; (None, 0.0) without a norm."""
    return (None, 0.0) if norm is None else (norm.weight, norm.eps)


def _warps(block: int) -> int:
    """Number of warps of a program: 2 or 4 numbers for each thread. With more, the compiler saves
    registers by loading one addend after the other, each of which waits for the memory."""
    return 32 if block >= 2048 else max(1, block // 128)
