"""The thresholds of top_k, top_p and min_p: one program for each row that has some.

The scan has stored the largest logit of every group of tokens. These give a lower bound of the
threshold (k groups have k tokens that reach the k-th largest of their maxima; likewise for mass),
so only the few groups that reach it are read. If a distribution is too flat for that, the whole row
is read, which is slow and equally exact.

A bisection over the bits of values narrows [low, high] down to one value. Counts and masses are
integers, as in `reference/thresholds.py`, so the order of additions does not matter.
"""
# ruff: noqa: SIM102  (of two nested ifs one is decided at compile time)

import triton
import triton.language as tl

from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs
from slipstream.kernels.triton.philox import INTERPRETED
from slipstream.kernels.triton.sampling_scan import (
    MIN_P,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    inverse_of,
    place_of,
    row_sums,
    weight_of,
)

MASS_UNITS = tl.constexpr(float(1 << 43))
HIGHEST_KEY = tl.constexpr(0x7FFFFFFF)
LOWEST_KEY = tl.constexpr(-0x80000000)
TRIES = tl.constexpr(2)
# Columns of the result.
LARGEST = tl.constexpr(0)
TOTAL = tl.constexpr(1)
LOWEST_LOGIT = tl.constexpr(2)
LOWEST_WEIGHT = tl.constexpr(3)


@triton.jit
def key_of(value):
    """int32, ordered as the floats are (and -0 equal to 0)."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(weight):
    return (weight * MASS_UNITS).to(tl.int64)


@triton.jit
def _merge(found, above, below, more, other_above, other_below):
    return found + more, tl.minimum(above, other_above), tl.maximum(below, other_below)


@triton.jit
def _together(found, above, below):
    """The sum, the least and the greatest of three tensors [n, m], reduced together."""
    if INTERPRETED:  # the interpreter would process the elements of such a reduction one by one
        merged = tl.sum(found), tl.min(above), tl.max(below)
    else:
        merged = tl.reduce(tl.reduce((found, above, below), 1, _merge), 0, _merge)
    return merged


@triton.jit
def _middle(low, high, turn):
    """A key above low, at most high. The bound is often the answer: it is tried first."""
    half = (high.to(tl.int64) - low.to(tl.int64) + 1) // 2
    return (low.to(tl.int64) + tl.where(turn < TRIES, 1, half)).to(tl.int32)


@triton.jit
def _search_tile(key, there, mass, wanted, low, high):
    """The largest of the keys [n, m] such that those not below it have the mass `wanted`."""
    turn = 0
    while low < high:
        middle = _middle(low, high, turn)
        reaches = there & (key >= middle)
        found, above, below = _together(
            tl.where(reaches, mass, 0),
            tl.where(reaches, key, high),
            tl.where(there & (key < middle), key, low),
        )
        reached = found >= wanted
        low = tl.where(reached, above, low)
        high = tl.where(reached, high, tl.maximum(below, low))
        turn += 1
    return low


@triton.jit
def _read(
    source, selected, first, count, largest, inverse, lowest_logit, lowest_weight, vocab_size,
    group: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Logits and weights [tile, group] of selected groups; weight 0 below the lowest ones."""
    place = first + tl.arange(0, tile)
    number = tl.load(selected + place, mask=place < count, other=0)
    column = number[:, None] * group + tl.arange(0, group)[None, :]
    there = (place < count)[:, None] & (column < vocab_size)
    logit = tl.load(source + column, mask=there, other=float("-inf")).to(tl.float32)
    weight = weight_of(logit, largest, inverse)
    kept = there & (logit >= lowest_logit) & (weight >= lowest_weight)
    return logit, tl.where(kept, weight, 0.0), there


@triton.jit
def _keys(logit, weight, there, by_mass: tl.constexpr):
    """(key, mass) of each token: the search orders tokens by key and sums their masses."""
    if by_mass:
        key, mass = key_of(weight), mass_of(weight)
    else:
        key, mass = key_of(logit), there.to(tl.int64)
    return key, mass


@triton.jit
def _search(
    source, selected, count, largest, inverse, lowest_logit, lowest_weight, vocab_size, wanted,
    low, high, by_mass: tl.constexpr, group: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """The largest logit that `wanted` tokens reach, or weight (`by_mass`) that so much mass does.

    As a key. Of the tokens of selected groups, and of the weights of those not below the lowest.
    """
    if count <= tile:
        logit, weight, there = _read(
            source, selected, 0, count, largest, inverse, lowest_logit, lowest_weight, vocab_size,
            group, tile,
        )  # fmt: skip
        key, mass = _keys(logit, weight, there, by_mass)
        low = _search_tile(key, there, mass, wanted, low, high)
    turn = 0
    while low < high:
        middle = _middle(low, high, turn)
        found = tl.zeros((tile, group), tl.int64)
        above = tl.zeros((tile, group), tl.int32) + high
        below = tl.zeros((tile, group), tl.int32) + low
        for first in range(0, count, tile):
            logit, weight, there = _read(
                source, selected, first, count, largest, inverse, lowest_logit, lowest_weight,
                vocab_size, group, tile,
            )  # fmt: skip
            key, mass = _keys(logit, weight, there, by_mass)
            reaches = there & (key >= middle)
            found += tl.where(reaches, mass, 0)
            above = tl.minimum(above, tl.where(reaches, key, high))
            below = tl.maximum(below, tl.where(there & (key < middle), key, low))
        found_mass, next_low, next_high = _together(found, above, below)
        reached = found_mass >= wanted
        low = tl.where(reached, next_low, low)
        high = tl.where(reached, high, tl.maximum(next_high, low))
        turn += 1
    return low


@triton.jit
def _kept_mass(
    source, selected, count, largest, inverse, lowest_logit, lowest_weight, vocab_size,
    group: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    mass = tl.zeros((tile, group), tl.int64)
    for first in range(0, count, tile):
        _, weight, _ = _read(
            source, selected, first, count, largest, inverse, lowest_logit, lowest_weight,
            vocab_size, group, tile,
        )  # fmt: skip
        mass += mass_of(weight)
    return tl.sum(mass).to(tl.float64)


@triton.jit
def _bounds(group_largest, there, groups, largest, total, inverse, top_k, top_p, min_p, vocab_size):
    """Lower bounds of the (logit, weight) of kept tokens, from only the maxima of groups."""
    lowest_logit, lowest_weight = tl.full((), float("-inf"), tl.float32), min_p
    key = key_of(group_largest)
    one = there.to(tl.int64)
    lowest = tl.min(tl.where(there, key, HIGHEST_KEY))
    highest = tl.max(tl.where(there, key, LOWEST_KEY))
    if top_k < vocab_size:
        if top_k <= groups:
            lowest_logit = value_of(_search_tile(key, there, one, top_k, lowest, highest))
    elif min_p == 0.0:  # else all that min_p leaves must be summed up
        mass = mass_of(tl.where(there, weight_of(group_largest, largest, inverse), 0.0))
        wanted = wanted_mass(total.to(tl.float64) * MASS_UNITS, top_p)
        if tl.sum(mass) >= wanted:
            lowest = _search_tile(key, there, mass, wanted, lowest, highest)
            lowest_weight = weight_of(value_of(lowest), largest, inverse)
    return lowest_logit, lowest_weight


@triton.jit
def wanted_mass(mass, top_p):
    return tl.ceil(mass * top_p.to(tl.float64)).to(tl.int64)


@triton.jit(do_not_specialize=["width"])
def thresholds_kernel(
    logits, group_largest, chunk_largest, chunk_sum, selected, result, request, offset, slots,
    num_draft_tokens, all_ints, all_floats, ints_stride, floats_stride, logits_stride, width,
    vocab_size, groups, chunks, uniform_rows: tl.constexpr, group: tl.constexpr,
    tile: tl.constexpr, block_g: tl.constexpr, block_s: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Program (row). Writes result [N, 4] of sampled requests: the largest logit, the sum of the
    weights that are kept, and the logit and the weight that kept tokens do not lie below.
    """
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    row = tl.program_id(0)
    found, place = place_of(row, request, offset, width, uniform_rows)
    if num_draft_tokens is not None:
        if place > tl.load(num_draft_tokens + found):
            return
    slot = tl.load(slots + found)
    ints, floats = all_ints + slot * ints_stride, all_floats + slot * floats_stride
    temperature = tl.load(floats + TEMPERATURE)
    if temperature == 0.0:
        return
    inverse = inverse_of(temperature)
    one = row + tl.zeros((1,), tl.int32)
    largests, totals = row_sums(chunk_largest, chunk_sum, one, chunks, inverse, block_s)
    largest, total = tl.sum(largests), tl.sum(totals)
    top_k = tl.load(ints + TOP_K)
    top_p = tl.load(floats + TOP_P)
    min_p = tl.load(floats + MIN_P)
    lowest_logit, lowest_weight = tl.full((), float("-inf"), tl.float32), min_p
    if (top_k < vocab_size) | (top_p < 1.0) | (min_p > 0.0):
        number = tl.arange(0, block_g)[None, :]
        own = selected + row * groups
        there = number < groups
        best = tl.load(group_largest + row * groups + number, mask=there, other=float("-inf"))
        least_logit, least_weight = _bounds(
            best, there, groups, largest, total, inverse, top_k, top_p, min_p, vocab_size
        )
        reaches = there & (best >= least_logit)
        reaches &= weight_of(best, largest, inverse) >= least_weight
        rank = tl.cumsum(reaches.to(tl.int32), axis=1) - 1
        tl.store(own + rank, number, mask=reaches)
        count = tl.sum(reaches.to(tl.int32))
        tl.debug_barrier()  # all of the program's threads read what they stored
        source = logits + row.to(tl.int64) * logits_stride
        high = key_of(largest)
        if top_k < vocab_size:
            low = key_of(least_logit)
            low = _search(
                source, own, count, largest, inverse, least_logit, min_p, vocab_size, top_k, low,
                high, False, group, tile,
            )  # fmt: skip
            lowest_logit = value_of(low)
        if top_p < 1.0:
            mass = total.to(tl.float64) * MASS_UNITS
            if (top_k < vocab_size) | (min_p > 0.0):
                mass = _kept_mass(
                    source, own, count, largest, inverse, lowest_logit, min_p, vocab_size, group,
                    tile,
                )  # fmt: skip
            wanted = wanted_mass(mass, top_p)
            low = key_of(least_weight)
            high = key_of(weight_of(largest, largest, inverse))
            low = _search(
                source, own, count, largest, inverse, lowest_logit, min_p, vocab_size, wanted, low,
                high, True, group, tile,
            )  # fmt: skip
            lowest_weight = value_of(low)
        mass = _kept_mass(
            source, own, count, largest, inverse, lowest_logit, lowest_weight, vocab_size, group,
            tile,
        )  # fmt: skip
        total = (mass / MASS_UNITS).to(tl.float32)
    tl.store(result + row * 4 + LARGEST, largest)
    tl.store(result + row * 4 + TOTAL, total)
    tl.store(result + row * 4 + LOWEST_LOGIT, lowest_logit)
    tl.store(result + row * 4 + LOWEST_WEIGHT, lowest_weight)
