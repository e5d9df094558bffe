"""The last kernel of latent attention for requests of few rows; `latent.py` launches it.

It adds up the partial sums of `latent_kernels.py`, in the order of the splits, and projects them to
the values of the heads. Weights are the first operand of the tensor cores, rows the second.
"""

import triton
import triton.language as tl

from slipstream.kernels.triton.attention_parts import finite, power_of_two, split_of_each
from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs


@triton.jit
def request_of(query_start, requests, row, block_r: tl.constexpr):
    """[L]: the requests that rows [L] belong to."""
    number = tl.arange(0, block_r)
    ends = tl.load(query_start + number + 1, mask=number < requests - 1, other=1 << 40)
    return tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), axis=1)


@triton.jit
def _parts_at(
    part, part_exponent, part_total, place, start, splits, column, rank: tl.constexpr,
    count: tl.constexpr,
):  # fmt: skip
    """(exponents [M], sums of weights [M], sums of weighted latents [M, C]) of the splits
    start + [0, count) of lines, loaded without waiting; of those past the last, what adds nothing.
    """
    exponents, totals, values = (), (), ()
    for index in tl.static_range(count):
        known = start + index < splits
        there = place + start + index
        exponent = tl.load(part_exponent + there, mask=known, other=float("-inf"))
        exponents += (exponent,)  # type: ignore[assignment]
        totals += (tl.load(part_total + there, mask=known, other=0.0),)  # type: ignore[assignment]
        loaded = known[:, None] & (column < rank)[None, :]
        at = part + there[:, None] * rank + column[None, :]
        values += (tl.load(at, mask=loaded, other=0.0),)  # type: ignore[assignment]
    return exponents, totals, values


@triton.jit
def _with_parts(total, mixed, exponent, exponents, totals, values, count: tl.constexpr):
    """The sums of weights and of weighted latents with `count` parts added, in order."""
    for index in tl.static_range(count):
        moved = power_of_two(exponents[index] - finite(exponent))
        total += totals[index] * moved
        mixed += values[index] * moved[:, None]
    return total, mixed


@triton.jit
def _repeated(value, lines: tl.constexpr):
    """[M, C] -> [lines, C]: row m is row m % M."""
    if value.shape[0] != lines:
        times: tl.constexpr = lines // value.shape[0]
        copies = tl.broadcast_to(value[None, :, :], (times, value.shape[0], value.shape[1]))
        value = tl.reshape(copies, (lines, value.shape[1]))
    return value


@triton.jit(do_not_specialize=["num_rows"])
def values_kernel(
    part, part_exponent, part_total, weights, out, query_start, context_lens, head_stride, requests,
    num_rows, most_rows, most_parts, heads: tl.constexpr, rank: tl.constexpr,
    value_dim: tl.constexpr, lines: tl.constexpr, block_m: tl.constexpr, block_v: tl.constexpr,
    block_c: tl.constexpr, block_r: tl.constexpr, block_s: tl.constexpr, at_once: tl.constexpr,
    pdl: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Programs (tile of a value, head, tile of `lines` rows): add up the parts, and project the
    sums with the values' weights [H, V, R]: out [T, H V].

    Rows of requests with more than `most_rows` rows are skipped. Products have block_m columns.
    """
    launch_dependents(pdl)
    head = tl.program_id(1)
    number, column = tl.program_id(0) * block_v + tl.arange(0, block_v), tl.arange(0, block_c)
    at = weights + head.to(tl.int64) * head_stride + number[:, None] * rank + column[None, :]
    weighed = (number < value_dim)[:, None] & (column < rank)[None, :]
    weight = tl.load(at, mask=weighed, other=0.0)
    if not early:
        wait_for_inputs(pdl)
    begin = tl.program_id(2) * lines
    row = begin + tl.arange(0, lines)
    inside = row < num_rows
    request = request_of(query_start, requests, row, block_r)
    begins = tl.load(query_start + request, mask=inside, other=0)
    ends = tl.load(query_start + request + 1, mask=inside, other=0)
    context = tl.load(context_lens + request, mask=inside, other=0).to(tl.int32)
    inside &= ends - begins <= most_rows
    splits = tl.minimum(split_of_each(tl.maximum(context, 1) - 1) + 1, most_parts)
    splits = tl.where(inside & (context > 0), splits, 0)
    wait_for_inputs(pdl)
    most = tl.max(splits, axis=0)
    place = ((request * most_rows + row - begins) * heads + head) * most_parts
    exponents, totals, values = _parts_at(
        part, part_exponent, part_total, place, 0, splits, column, rank, at_once
    )
    exponent = exponents[0]
    for index in tl.static_range(1, at_once):
        exponent = tl.maximum(exponent, exponents[index])
    for start in range(at_once, most, block_s):
        split = start + tl.arange(0, block_s)
        inside_splits = split[None, :] < splits[:, None]
        of_splits = tl.load(
            part_exponent + place[:, None] + split[None, :], mask=inside_splits, other=float("-inf")
        )
        exponent = tl.maximum(exponent, tl.max(of_splits, axis=1))
    total = tl.zeros((lines,), tl.float32)
    mixed = tl.zeros((lines, block_c), tl.float32)
    total, mixed = _with_parts(total, mixed, exponent, exponents, totals, values, at_once)
    for start in range(at_once, most, at_once):
        exponents, totals, values = _parts_at(
            part, part_exponent, part_total, place, start, splits, column, rank, at_once
        )
        total, mixed = _with_parts(total, mixed, exponent, exponents, totals, values, at_once)
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    x = _repeated(mixed.to(weight.dtype), block_m)
    sums = tl.dot(weight, tl.trans(x), input_precision="ieee")
    place = tl.arange(0, block_m)
    target = out + (begin + place).to(tl.int64) * (heads * value_dim) + head * value_dim
    known = tl.reshape(_repeated(inside[:, None], block_m), (block_m,)) & (place < lines)
    stored = known[None, :] & (number < value_dim)[:, None]
    tl.store(target[None, :] + number[:, None], sums.to(out.dtype.element_ty), mask=stored)
