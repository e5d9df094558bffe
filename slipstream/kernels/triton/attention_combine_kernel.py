"""Adds up what the programs of one request left of each split of its context (`short_kernel`)."""

import triton
import triton.language as tl

from slipstream.kernels.triton.attention_parts import LOG2_E, finite, power_of_two
from slipstream.kernels.triton.attention_short_kernels import seen_splits, with_sink
from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs


@triton.jit
def _parts_at(
    part, part_exponent, part_total, place, start, splits, column, head_dim: tl.constexpr,
    count: tl.constexpr,
):  # fmt: skip
    """(exponents, sums of weights, sums of weighted values [D]) of the splits start + [0, count)
    of a line, loaded without waiting; of those past the last, what adds nothing."""
    exponents, totals, values = (), (), ()
    for index in tl.static_range(count):
        split = start + index
        there = place + split
        known = split < splits
        exponent = tl.load(part_exponent + there, mask=known, other=float("-inf"))
        exponents += (exponent,)  # type: ignore[assignment]
        totals += (tl.load(part_total + there, mask=known, other=0.0),)  # type: ignore[assignment]
        inside = (column < head_dim) & (split + 0 * column < splits)
        loaded = tl.load(part + there * head_dim + column, mask=inside, other=0.0)
        values += (loaded,)  # type: ignore[assignment]
    return exponents, totals, values


@triton.jit
def _with_parts(total, mixed, exponent, exponents, totals, values, count: tl.constexpr):
    """The sums of weights and of weighted values with `count` parts added, in order."""
    for index in tl.static_range(count):
        moved = power_of_two(exponents[index] - finite(exponent))
        total += totals[index] * moved
        mixed += values[index] * moved
    return total, mixed


@triton.jit(do_not_specialize=["most_rows", "most_splits"])
def combine_kernel(
    part, part_exponent, part_total, out, query_start, context_lens, sinks, window, most_rows,
    most_splits, heads: tl.constexpr, head_dim: tl.constexpr, block_d: tl.constexpr,
    block_s: tl.constexpr, at_once: tl.constexpr, pdl: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Programs (lane, request): add up the partial sums of all splits, in order, into `out`.

    The lanes of a request take turns at its pairs of row and head. Splits that a row does not see
    contribute nothing.
    """
    launch_dependents(pdl)
    if not early:
        wait_for_inputs(pdl)
    request = tl.program_id(1)
    first = tl.load(query_start + request).to(tl.int32)
    rows = tl.load(query_start + request + 1).to(tl.int32) - first
    context = tl.load(context_lens + request).to(tl.int32)
    splits = tl.where(context > 0, seen_splits(context, rows, window)[1], 0)
    lines = tl.where(rows > most_rows, 0, rows * heads)
    wait_for_inputs(pdl)
    column = tl.arange(0, block_d)
    for own in range(tl.program_id(0), lines, tl.num_programs(0)):
        line = first.to(tl.int64) * heads + own
        place = ((request * most_rows).to(tl.int64) * heads + own) * most_splits
        exponents, totals, values = _parts_at(
            part, part_exponent, part_total, place, 0, splits, column, head_dim, at_once
        )
        exponent = exponents[0]
        for index in tl.static_range(1, at_once):
            exponent = tl.maximum(exponent, exponents[index])
        for start in range(at_once, splits, block_s):
            split = start + tl.arange(0, block_s)
            known = tl.load(part_exponent + place + split, mask=split < splits, other=float("-inf"))
            exponent = tl.maximum(exponent, tl.max(known, axis=0))
        total, mixed = tl.zeros((), tl.float32), tl.zeros((block_d,), tl.float32)
        total, mixed = _with_parts(total, mixed, exponent, exponents, totals, values, at_once)
        for start in range(at_once, splits, at_once):
            exponents, totals, values = _parts_at(
                part, part_exponent, part_total, place, start, splits, column, head_dim, at_once
            )
            total, mixed = _with_parts(total, mixed, exponent, exponents, totals, values, at_once)
        kept = tl.full((), 1.0, tl.float32)
        if sinks is not None:
            sink = tl.load(sinks + line % heads).to(tl.float32) * LOG2_E
            total, kept = with_sink(exponent, total, sink)
        result = mixed * kept / tl.where(total == 0.0, 1.0, total)
        target = out + line * head_dim + column
        tl.store(target, result.to(out.dtype.element_ty), mask=column < head_dim)
