"""The pass over all logits: processors, argmax, and the sums for probabilities.

A row is split into chunks of a fixed size, with one program each, so that few rows use the whole
GPU, too. Kernels that need results of a row combine those of its chunks, always in the same order.

Weights are exp((logit - largest) / temperature): in [0, 1], the largest exactly 1. All kernels
compute them with `weight_of`, so that they have the same bits.
"""
# ruff: noqa: SIM102  (of two nested ifs one is decided at compile time)

import triton
import triton.language as tl

from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs

# Columns of `SamplingSlots`.
TEMPERATURE = tl.constexpr(0)
TOP_P = tl.constexpr(1)
MIN_P = tl.constexpr(2)
PRESENCE = tl.constexpr(3)
FREQUENCY = tl.constexpr(4)
REPETITION = tl.constexpr(5)
TOP_K = tl.constexpr(0)
SEED = tl.constexpr(1)
STEPS = tl.constexpr(2)
MIN_TOKENS = tl.constexpr(3)
NUM_OUTPUT = tl.constexpr(4)
VERIFICATION = tl.constexpr(6)
COUPLED = tl.constexpr(1)
BLOCK = tl.constexpr(2)

SMALLEST_TEMPERATURE = tl.constexpr(1e-5)  # as in sampling/logits.py
MOST_LEVELS = tl.constexpr(14)  # of a tree
NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def weight_of(logit, largest, inverse):
    """The weight of a logit; `largest` must be finite, and `inverse` is 1 / temperature."""
    return tl.exp((logit - largest) * inverse)


@triton.jit
def inverse_of(temperature):
    return 1.0 / tl.maximum(temperature, SMALLEST_TEMPERATURE)


@triton.jit
def finite(largest):
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def tree_sum(value):
    """Sum over columns, [n, C] -> [n], C a power of two. It adds neighbours first, so that the bits
    do not depend on the layout."""
    rows: tl.constexpr = value.shape[0]
    for _ in tl.static_range(MOST_LEVELS):
        if value.shape[1] > 1:
            value = tl.sum(tl.reshape(value, (rows, value.shape[1] // 2, 2)), axis=2)
    return tl.reshape(value, (rows,))


@triton.jit
def place_of(row, request, offset, width, uniform_rows: tl.constexpr):
    """(request, offset) of a row of logits."""
    if uniform_rows:
        found, place = row // width, row % width
    else:
        found, place = tl.load(request + row).to(tl.int32), tl.load(offset + row).to(tl.int32)
    return found, place


@triton.jit
def _penalise(
    logit, column, inside, slot, found, place, floats, output_counts, prompt_mask, draft_tokens,
    draft_stride, vocab_size,
):  # fmt: skip
    presence = tl.load(floats + PRESENCE)
    frequency = tl.load(floats + FREQUENCY)
    repetition = tl.load(floats + REPETITION)
    if (presence != 0.0) | (frequency != 0.0) | (repetition != 1.0):
        count = tl.load(output_counts + slot * vocab_size + column, mask=inside, other=0)
        for index in range(0, place):
            drafted = tl.load(draft_tokens + found * draft_stride + index)
            count += (column == drafted).to(tl.int32)
        known = tl.load(prompt_mask + slot * vocab_size + column, mask=inside, other=0)
        punished = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
        logit = tl.where((known != 0) | (count > 0), punished, logit)
        logit -= frequency * count.to(tl.float32)
        logit -= tl.where(count > 0, presence, 0.0)
    return logit


@triton.jit
def _withhold_stops(logit, column, slot, place, ints, stop_ids, num_stop_ids):
    if tl.load(ints + NUM_OUTPUT) + place < tl.load(ints + MIN_TOKENS):
        for index in range(0, num_stop_ids):
            stop = tl.load(stop_ids + slot * num_stop_ids + index)
            logit = tl.where(column == stop, float("-inf"), logit)
    return logit


@triton.jit
def _process(
    logit, column, inside, row, found, place, slot, ints, floats, processed, stop_ids,
    num_stop_ids, output_counts, prompt_mask, bias, allowed, allowed_stride, draft_tokens,
    draft_stride, vocab_size,
):  # fmt: skip
    """The processors of `reference/processors.py` for a chunk of a row, with the same bits."""
    if output_counts is not None:
        logit = _penalise(
            logit, column, inside, slot, found, place, floats, output_counts, prompt_mask,
            draft_tokens, draft_stride, vocab_size,
        )  # fmt: skip
    if bias is not None:
        added = tl.load(bias + slot * vocab_size + column, mask=inside, other=0.0)
        logit = tl.where(added == 0.0, logit, logit + added)
    if stop_ids is not None:
        logit = _withhold_stops(logit, column, slot, place, ints, stop_ids, num_stop_ids)
    if allowed is not None:
        word = tl.load(allowed + row * allowed_stride + column // 32, mask=inside, other=-1)
        logit = tl.where(((word >> (column % 32)) & 1) != 0, logit, float("-inf"))
    if processed is not None:
        target = processed + row.to(tl.int64) * vocab_size + column
        tl.store(target, logit, mask=inside)
    return logit


@triton.jit(do_not_specialize=["width"])
def scan_kernel(
    logits, processed, chunk_peak, chunk_largest, chunk_choice, chunk_sum, chunk_mass,
    group_largest, arrivals, request, offset, slots, num_draft_tokens, draft_tokens, draft_stride,
    all_ints, all_floats, ints_stride, floats_stride, stop_ids, num_stop_ids, output_counts,
    prompt_mask, bias, allowed, logits_stride, allowed_stride, width, vocab_size, groups,
    uniform_rows: tl.constexpr, sampled: tl.constexpr, block: tl.constexpr, group: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    """Programs (chunk, row). Steps whose arguments are None are skipped.

    Writes, for each chunk of `block` tokens: the largest logit before processing, or +inf if one is
    NaN (chunk_peak); its largest logit, the smallest token id that has it, and (`sampled`) the sum
    of weights relative to that logit, [N, chunks], and that sum at temperature 1 (chunk_mass); for
    each `group` of tokens its largest logit, [N, groups]; and the processed logits [N, V]. Rows
    after a request's draft are skipped. Sets arrivals [N] to 0.
    """
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    chunk, row = tl.program_id(0), tl.program_id(1)
    found, place = place_of(row, request, offset, width, uniform_rows)
    if num_draft_tokens is not None:
        if place > tl.load(num_draft_tokens + found):
            return
    if arrivals is not None:
        if chunk == 0:
            tl.store(arrivals + row, 0)
    slot = tl.load(slots + found)
    ints, floats = all_ints + slot * ints_stride, all_floats + slot * floats_stride
    column = chunk * block + tl.arange(0, block)
    inside = column < vocab_size
    source = logits + row.to(tl.int64) * logits_stride + column
    logit = tl.load(source, mask=inside, other=float("-inf")).to(tl.float32)
    cell = row * tl.num_programs(0) + chunk
    if chunk_peak is not None:
        # A maximum hides NaN.
        tl.store(chunk_peak + cell, tl.max(tl.where(logit == logit, logit, float("inf")), axis=0))
    logit = _process(
        logit, column, inside, row, found, place, slot, ints, floats, processed, stop_ids,
        num_stop_ids, output_counts, prompt_mask, bias, allowed, allowed_stride, draft_tokens,
        draft_stride, vocab_size,
    )  # fmt: skip
    largest = tl.max(logit, axis=0)
    choice = tl.min(tl.where((logit == largest) & inside, column, NO_TOKEN), axis=0)
    tl.store(chunk_largest + cell, largest)
    tl.store(chunk_choice + cell, choice)
    if chunk_mass is not None:
        mass = weight_of(logit, finite(largest), 1.0)
        mass = tl.reshape(tl.where(inside, mass, 0.0), (1, block))
        tl.store(chunk_mass + cell + tl.arange(0, 1), tree_sum(mass))
    if sampled:
        temperature = tl.load(floats + TEMPERATURE)
        if temperature > 0:
            weight = weight_of(logit, finite(largest), inverse_of(temperature))
            weight = tl.reshape(tl.where(inside, weight, 0.0), (1, block))
            tl.store(chunk_sum + cell + tl.arange(0, 1), tree_sum(weight))
            if group_largest is not None:
                best = tl.max(tl.reshape(logit, (block // group, group)), axis=1)
                number = chunk * (block // group) + tl.arange(0, block // group)
                tl.store(group_largest + row * groups + number, best, mask=number < groups)


@triton.jit
def peaks_of(chunk_peak, rows, chunks, block_s: tl.constexpr):
    """[n, chunks], the peaks of the chunks of rows [n]."""
    chunk = tl.arange(0, block_s)
    cell = rows[:, None] * chunks + chunk[None, :]
    return tl.load(chunk_peak + cell, mask=(chunk < chunks)[None, :], other=float("-inf"))


@triton.jit
def choices(chunk_largest, chunk_choice, rows, chunks, vocab_size, block_s: tl.constexpr):
    """The argmax of rows [n]; among equals the first."""
    chunk = tl.arange(0, block_s)
    cell = rows[:, None] * chunks + chunk[None, :]
    there = (chunk < chunks)[None, :]
    largest = tl.load(chunk_largest + cell, mask=there, other=float("-inf"))
    choice = tl.load(chunk_choice + cell, mask=there, other=NO_TOKEN)
    best = tl.max(largest, axis=1)
    first = tl.min(tl.where(largest == best[:, None], choice, NO_TOKEN), axis=1)
    return tl.minimum(first, vocab_size - 1)  # even of a row of NaN


@triton.jit
def row_sums(chunk_largest, chunk_sum, rows, chunks, inverse, block_s: tl.constexpr):
    """For rows [n]: the largest logit (0 where there is none above -inf) and the sum of weights."""
    chunk = tl.arange(0, block_s)
    cell = rows[:, None] * chunks + chunk[None, :]
    there = (chunk < chunks)[None, :]
    part = tl.load(chunk_largest + cell, mask=there, other=float("-inf"))
    total = tl.load(chunk_sum + cell, mask=there, other=0.0)
    largest = finite(tl.max(part, axis=1))
    return largest, tree_sum(total * weight_of(part, largest[:, None], inverse))


@triton.jit
def store_confidence(out, chunk_largest, chunk_mass, row, chunks, block_s: tl.constexpr):
    """The largest probability of a row at temperature 1."""
    one = row + tl.zeros((1,), tl.int32)
    _, total = row_sums(chunk_largest, chunk_mass, one, chunks, 1.0, block_s)
    tl.store(out + one, 1.0 / tl.maximum(total, 1.0))
