"""Block verification (`reference/block_verification.py`): the weights of prefixes, and their
residual masses."""

import triton
import triton.language as tl

from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs
from slipstream.kernels.triton.sampling_scan import (
    BLOCK,
    TEMPERATURE,
    VERIFICATION,
    inverse_of,
    tree_sum,
)
from slipstream.kernels.triton.sampling_verdict import (
    draft_probability,
    first_row_of,
    is_certain_at,
    probability_of,
    row_facts,
)


@triton.jit
def _prefix_weights(p, q, width, column):
    """[K + 1], the weight of each prefix, given p and q of each draft token."""
    weights = tl.where(column == 0, 1.0, 0.0)
    weight = tl.sum(weights)
    for index in range(0, width - 1):
        reached = weight * tl.sum(tl.where(column == index, p, 0.0))
        bound = tl.sum(tl.where(column == index, q, 0.0))
        ratio = tl.where(reached < bound, reached / tl.where(bound > 0.0, bound, 1.0), 1.0)
        # A token of probability 0 is rejected.
        weight = tl.where(reached > 0.0, ratio, 0.0)
        weights = tl.where(column == index + 1, weight, weights)
    return weights


@triton.jit(do_not_specialize=["width"])
def weigh_kernel(
    source, chunk_largest, chunk_sum, result, prefixes, first_row, slots, draft_tokens,
    num_draft_tokens, one_hot, certain, draft_probs, draft_columns, all_ints, all_floats,
    ints_stride, floats_stride, source_stride, draft_stride, probs_stride, probs_place_stride,
    probs_width, width, vocab_size, chunks, uniform_rows: tl.constexpr, truncated: tl.constexpr,
    block_k: tl.constexpr, block_s: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Program (request): the weights of its prefixes and their masses, to prefixes [R, 2, K + 1].

    A mass is -1 if `mass_kernel` must compute it, and arbitrary if it does not matter for the
    prefix. Weights of requests without block verification are 1.
    """
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    request, column = tl.program_id(0), tl.arange(0, block_k)
    slot = tl.load(slots + request)
    is_block = tl.load(all_ints + slot * ints_stride + VERIFICATION) == BLOCK
    temperature = tl.load(all_floats + slot * floats_stride + TEMPERATURE)
    drafts = tl.load(num_draft_tokens + request).to(tl.int32)
    in_use = (column < drafts) & (column < width - 1)
    token = tl.load(draft_tokens + request * draft_stride + column, mask=in_use, other=-1)
    legal = in_use & (token >= 0) & (token < vocab_size)
    token = tl.where(legal, token, 0)
    rows = first_row_of(request, first_row, width, uniform_rows) + tl.minimum(column, drafts)
    place = rows.to(tl.int64) * source_stride + token
    logit = tl.load(source + place, mask=legal, other=float("-inf")).to(tl.float32)
    q = tl.full((block_k,), 1.0, tl.float32)
    summed = column < 0
    if draft_probs is not None:
        known = draft_probability(
            draft_probs, draft_columns, request, tl.minimum(column, width - 2), token, legal,
            probs_stride, probs_place_stride, probs_width,
        )  # fmt: skip
        summed = in_use & ~is_certain_at(one_hot, certain, request, column, width, in_use)
        q = tl.where(summed, known, 1.0)
    inverse = inverse_of(temperature)
    largest, total, lowest_logit, lowest_weight = row_facts(
        result, chunk_largest, chunk_sum, rows, chunks, inverse, truncated, block_s
    )
    p = probability_of(logit, largest, total, lowest_logit, lowest_weight, inverse)
    # NaN ends the draft: no token after it is accepted.
    is_sound = total == total
    p = tl.where(legal & is_sound, p, 0.0)
    weight = _prefix_weights(p, q, width, column)
    judged = is_block & (temperature > 0)
    mass = tl.where(summed & is_sound, -1.0, weight * (1.0 - p))
    is_open = judged & (column > 0) & (weight > 0.0) & (weight < 1.0)
    line = prefixes + request * 2 * width + column
    tl.store(line, tl.where(judged, weight, 1.0), mask=column < width)
    tl.store(line + width, tl.where(is_open, mass, 0.0), mask=column < width)


@triton.jit(do_not_specialize=["width"])
def mass_kernel(
    source, chunk_largest, chunk_sum, result, prefixes, masses, first_row, slots, draft_probs,
    draft_columns, all_floats, floats_stride, source_stride, probs_stride, probs_place_stride,
    probs_width, width, vocab_size, uniform_rows: tl.constexpr, truncated: tl.constexpr,
    block: tl.constexpr, block_s: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Programs (chunk, place - 1, request): the chunk's part of the mass of a prefix, to masses
    [R, K + 1, chunks], if that is not known yet."""
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    chunk, place, request = tl.program_id(0), tl.program_id(1) + 1, tl.program_id(2)
    chunks = tl.num_programs(0)
    line = prefixes + request * 2 * width + place
    if tl.load(line + width) >= 0.0:
        return
    row = first_row_of(request, first_row, width, uniform_rows) + place
    slot = tl.load(slots + request)
    inverse = inverse_of(tl.load(all_floats + slot * floats_stride + TEMPERATURE))
    token = chunk * block + tl.arange(0, block)
    inside = token < vocab_size
    logits = source + row.to(tl.int64) * source_stride
    logit = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    q = draft_probability(
        draft_probs, draft_columns, request, place, token, inside, probs_stride,
        probs_place_stride, probs_width,
    )  # fmt: skip
    largest, total, lowest_logit, lowest_weight = row_facts(
        result, chunk_largest, chunk_sum, row + tl.arange(0, 1), chunks, inverse, truncated,
        block_s,
    )  # fmt: skip
    p = probability_of(logit, largest, total, lowest_logit, lowest_weight, inverse)
    rest = tl.reshape(tl.maximum(p * tl.load(line) - q, 0.0), (1, block))
    cell = masses + (request * width + place) * chunks + chunk
    tl.store(cell + tl.arange(0, 1), tree_sum(rest))
