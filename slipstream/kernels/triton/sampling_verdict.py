"""The kernels of verification after the scan: draw, accept and race; and the commit.

A race samples a token from weights: the largest weight / exponential random number wins. This is
equivalent to Gumbel-max (log weight + Gumbel noise) with the same uniform numbers, with one
logarithm instead of three.
"""
# ruff: noqa: SIM102  (of two nested ifs one is decided at compile time)

import triton
import triton.language as tl

from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs
from slipstream.kernels.triton.philox import ACCEPT, RESIDUAL, TARGET, ratio, token_noise, uniform
from slipstream.kernels.triton.sampling_scan import (
    BLOCK,
    COUPLED,
    NO_TOKEN,
    NUM_OUTPUT,
    SEED,
    STEPS,
    TEMPERATURE,
    VERIFICATION,
    choices,
    inverse_of,
    peaks_of,
    place_of,
    row_sums,
    tree_sum,
    weight_of,
)
from slipstream.kernels.triton.sampling_thresholds import (
    LARGEST,
    LOWEST_LOGIT,
    LOWEST_WEIGHT,
    TOTAL,
)


@triton.jit
def first_row_of(request, first_row, width, uniform_rows: tl.constexpr):
    return request * width if uniform_rows else tl.load(first_row + request).to(tl.int32)


@triton.jit
def probability_of(logit, largest, total, lowest_logit, lowest_weight, inverse):
    weight = weight_of(logit, largest, inverse)
    kept = (logit >= lowest_logit) & (weight >= lowest_weight)
    return tl.where(kept, weight * (1.0 / tl.maximum(total, 1.0)), 0.0)


@triton.jit
def row_facts(
    result, chunk_largest, chunk_sum, rows, chunks, inverse, truncated: tl.constexpr,
    block_s: tl.constexpr,
):  # fmt: skip
    """(largest, total, lowest logit, lowest weight) of rows [n], the inputs of `probability_of`."""
    if truncated:
        line = result + rows * 4
        largest, total = tl.load(line + LARGEST), tl.load(line + TOTAL)
        lowest_logit, lowest_weight = tl.load(line + LOWEST_LOGIT), tl.load(line + LOWEST_WEIGHT)
    else:
        largest, total = row_sums(chunk_largest, chunk_sum, rows, chunks, inverse, block_s)
        lowest_logit, lowest_weight = tl.full(rows.shape, float("-inf"), tl.float32), total * 0.0
    return largest, total, lowest_logit, lowest_weight


@triton.jit
def _store_last(
    last, last_facts, arrivals, request, here, rows, count, in_use, drafted, largest, total,
    lowest_logit, lowest_weight,
):  # fmt: skip
    """Store the source of a sampled request's last token: see `accept_kernel`."""
    line, facts = last + request * 3, last_facts + request * 4 + rows * 0
    tl.store(arrivals + request, 0)
    refused = tl.sum(tl.where(here & in_use, drafted + 1, 0)) - 1
    tl.store(line, tl.sum(tl.where(here, rows, 0)))
    tl.store(line + 1, count)
    tl.store(line + 2, tl.maximum(refused, -1).to(tl.int32))
    tl.store(facts + LARGEST, largest, mask=here)
    tl.store(facts + TOTAL, total, mask=here)
    tl.store(facts + LOWEST_LOGIT, lowest_logit, mask=here)
    tl.store(facts + LOWEST_WEIGHT, lowest_weight, mask=here)


@triton.jit
def draft_probability(
    draft_probs, draft_columns, request, index, token, asked, probs_stride, probs_place_stride,
    probs_width,
):  # fmt: skip
    """q of each token: 0 for tokens without a column in the draft."""
    column = token
    if draft_columns is not None:
        column = tl.load(draft_columns + token, mask=asked, other=NO_TOKEN)
    line = draft_probs + request.to(tl.int64) * probs_stride + index * probs_place_stride
    return tl.load(line + column, mask=asked & (column < probs_width), other=0.0)


@triton.jit
def is_certain_at(one_hot, certain, request, index, width, asked):
    """Whether draft tokens were not sampled."""
    sure = tl.load(one_hot + request) != 0
    if certain is not None:
        sure = sure | (tl.load(certain + request * (width - 1) + index, mask=asked, other=0) != 0)
    return sure


@triton.jit
def _or_block_prefix(
    count, temperature, prefixes, masses, request, column, drafted, ints, positions, width, chunks,
    block_k: tl.constexpr, block_s: tl.constexpr,
):  # fmt: skip
    """The number of accepted tokens: `count`, or with block verification the longest prefix whose
    uniform number is below its bound, given the results of `sampling_blocks.py`."""
    length = tl.min(tl.where(drafted, block_k, column))
    line = prefixes + request * 2 * width + column
    weight = tl.load(line, mask=column < width, other=0.0)
    mass = tl.load(line + width, mask=column < width, other=0.0)
    if masses is not None:
        chunk = tl.arange(0, block_s)
        cell = (request * width + column)[:, None] * chunks + chunk[None, :]
        there = (mass < 0.0)[:, None] & (chunk < chunks)[None, :]
        summed = tree_sum(tl.load(masses + cell, mask=there, other=0.0))
        mass = tl.where(mass < 0.0, summed, mass)
    is_open = (column < length) & (weight > 0.0) & (weight < 1.0)
    bound = tl.where(is_open, mass / (mass + 1.0 - weight), weight)
    # Each prefix has the number of its last token.
    position = tl.load(positions + request) + column - 1
    chance = uniform(tl.load(ints + SEED), position, tl.load(ints + STEPS), ACCEPT)
    passed = (chance < bound) & (column > 0) & (column <= length)
    is_block = (tl.load(ints + VERIFICATION) == BLOCK) & (temperature > 0)
    return tl.where(is_block, tl.max(tl.where(passed, column, 0)), count)


@triton.jit
def _or_drawn(
    choice, temperature, scores, tokens, ints, rows, chunks, vocab_size, block_s: tl.constexpr
):  # fmt: skip
    """(choices, temperature): coupled requests are verified like greedy ones, with the sampled
    tokens instead of the argmax."""
    if scores is not None:
        is_coupled = tl.load(ints + VERIFICATION) == COUPLED
        drawn = choices(scores, tokens, rows, chunks, vocab_size, block_s)
        choice = tl.where(is_coupled & (temperature > 0), drawn, choice)
        temperature = tl.where(is_coupled, 0.0, temperature)
    return choice, temperature


@triton.jit(do_not_specialize=["width"])
def accept_kernel(
    source, chunk_peak, chunk_largest, chunk_choice, chunk_sum, result, token_ids, num_tokens,
    num_accepted, peaks, last, last_facts, arrivals, prefixes, masses, drawn_scores, drawn_tokens,
    first_row, slots, positions, draft_tokens, num_draft_tokens, one_hot, certain, draft_probs,
    draft_columns, all_ints, all_floats, ints_stride, floats_stride, source_stride, draft_stride,
    probs_stride, probs_place_stride, probs_width, width, vocab_size, chunks, rates,
    uniform_rows: tl.constexpr, sampled: tl.constexpr, truncated: tl.constexpr,
    block_k: tl.constexpr, block_s: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Program (request): how many draft tokens are accepted, and peaks [R, K + 1]. This completes
    greedy requests, and coupled ones, which have drawn_scores and drawn_tokens [N, chunks].

    For others it stores last [R, 3] (row of logits, offset, rejected token or -1) and
    last_facts [R, 4] of that row, and sets arrivals [R] to 0.
    """
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    ints, column = all_ints + slot * ints_stride, tl.arange(0, block_k)
    drafts = tl.load(num_draft_tokens + request).to(tl.int32)
    draft_tokens += request * draft_stride + column
    drafted = tl.load(draft_tokens, mask=column < width - 1, other=-1)
    in_use = (column < drafts) & (column < width - 1)
    rows = first_row_of(request, first_row, width, uniform_rows) + tl.minimum(column, drafts)
    # All loads before the first reduction, so that their latencies overlap.
    peak = peaks_of(chunk_peak, rows, chunks, block_s)
    temperature = tl.load(all_floats + slot * floats_stride + TEMPERATURE)
    inverse = inverse_of(temperature)
    if sampled:
        by_chance = column < tl.where(temperature > 0, drafts, 0)
        legal = in_use & by_chance & (drafted >= 0) & (drafted < vocab_size)
        token = tl.where(legal, drafted, 0)
        place = rows.to(tl.int64) * source_stride + token
        logit = tl.load(source + place, mask=legal, other=float("-inf")).to(tl.float32)
        q = tl.full((block_k,), 1.0, tl.float32)
        if draft_probs is not None:
            probability = draft_probability(
                draft_probs, draft_columns, request, tl.minimum(column, width - 2), token, legal,
                probs_stride, probs_place_stride, probs_width,
            )  # fmt: skip
            is_certain = is_certain_at(one_hot, certain, request, column, width, legal)
            q = tl.where(is_certain, 1.0, probability)
    if sampled or rates is not None:
        seed, step = tl.load(ints + SEED), tl.load(ints + STEPS)
        chance = uniform(seed, tl.load(positions + request) + column, step, ACCEPT)
    choice = choices(chunk_largest, chunk_choice, rows, chunks, vocab_size, block_s)
    choice, temperature = _or_drawn(
        choice, temperature, drawn_scores, drawn_tokens, ints, rows, chunks, vocab_size, block_s
    )
    accepted = in_use & (drafted == choice)
    if sampled:
        # For greedy requests these numbers are arbitrary, and not used.
        largest, total, lowest_logit, lowest_weight = row_facts(
            result, chunk_largest, chunk_sum, rows, chunks, inverse, truncated, block_s
        )
        p = probability_of(logit, largest, total, lowest_logit, lowest_weight, inverse)
        # Strict, so that p = 0 is rejected even if chance or q is 0.
        accepted = tl.where(temperature > 0, legal & (chance * q < p), accepted)
    if rates is not None:
        rate = tl.load(rates + request * (width - 1) + column, mask=in_use, other=0.0)
        accepted = in_use & (chance < rate)
    count = tl.min(tl.where(accepted, block_k, column))
    if prefixes is not None:
        count = _or_block_prefix(
            count, temperature, prefixes, masses, request, column, in_use & (drafted >= 0), ints,
            positions, width, chunks, block_k, block_s,
        )  # fmt: skip
    here, cell, inside = column == count, request * width + column, column < width
    after_draft = tl.where(here, choice, -1).to(tl.int64)
    tl.store(token_ids + cell, tl.where(column < count, drafted, after_draft), mask=inside)
    tl.store(peaks + cell, tl.max(peak, axis=1), mask=inside)
    tl.store(num_tokens + request, (count + 1).to(tl.int64))
    tl.store(num_accepted + request, count.to(tl.int64))
    if sampled:
        if temperature > 0:
            _store_last(
                last, last_facts, arrivals, request, here, rows, count, in_use, drafted, largest,
                total, lowest_logit, lowest_weight,
            )  # fmt: skip


@triton.jit
def winner(score, token):
    """The largest score, none negative, and the first token that has it."""
    best = tl.max(score)
    return best, tl.min(tl.where(score == best, token, NO_TOKEN))


@triton.jit(do_not_specialize=["width"])
def draw_kernel(
    source, chunk_largest, chunk_sum, result, scores, tokens, request, offset, slots, positions,
    num_draft_tokens, all_ints, all_floats, ints_stride, floats_stride, source_stride, width,
    vocab_size, uniform_rows: tl.constexpr, truncated: tl.constexpr, block: tl.constexpr,
    block_s: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Programs (chunk, row): the chunk's winner in the target's race, [N, chunks], for rows of
    coupled requests; other rows are skipped."""
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    chunk, row, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    found, place = place_of(row, request, offset, width, uniform_rows)
    slot = tl.load(slots + found)
    ints = all_ints + slot * ints_stride
    temperature = tl.load(all_floats + slot * floats_stride + TEMPERATURE)
    if (temperature == 0.0) | (tl.load(ints + VERIFICATION) != COUPLED):
        return
    if place > tl.load(num_draft_tokens + found):
        return
    inverse = inverse_of(temperature)
    counter, token = chunk_tokens(chunk, block)
    inside = token < vocab_size  # others have the weight 0
    logit = tl.load(
        source + row.to(tl.int64) * source_stride + token, mask=inside, other=float("-inf")
    )
    largest, total, lowest_logit, lowest_weight = row_facts(
        result, chunk_largest, chunk_sum, row + tl.zeros((1,), tl.int32), chunks, inverse,
        truncated, block_s,
    )  # fmt: skip
    p = probability_of(
        logit.to(tl.float32), tl.sum(largest), tl.sum(total), tl.sum(lowest_logit),
        tl.sum(lowest_weight), inverse,
    )  # fmt: skip
    position = tl.load(positions + found) + place
    noise = token_noise(tl.load(ints + SEED), position, position * 0, TARGET, counter)
    score, best = winner(ratio(p, noise), token)
    tl.store(scores + row * chunks + chunk, score)
    tl.store(tokens + row * chunks + chunk, best)


@triton.jit
def is_last(arrivals):
    """Whether this is the last program of the row; then it can read what all of them wrote."""
    tl.debug_barrier()  # all threads have written
    return tl.atomic_add(arrivals, 1, sem="acq_rel") == tl.num_programs(0) - 1


@triton.jit
def chunk_winner(scores, tokens, chunks, vocab_size, block_s: tl.constexpr):
    """The winner of a row's chunks, whose scores other programs may just have written."""
    chunk = tl.arange(0, block_s)
    there = chunk < chunks
    score = tl.load(scores + chunk, mask=there, other=-1.0, cache_modifier=".cg")
    token = tl.load(tokens + chunk, mask=there, other=NO_TOKEN, cache_modifier=".cg")
    best, first = winner(score, token)
    return best, tl.minimum(first, vocab_size - 1)  # even of NaN


@triton.jit
def chunk_tokens(chunk, block: tl.constexpr):
    """(counters of noise [block / 4], tokens [block / 4, 4]) of a chunk."""
    counter = chunk * (block // 4) + tl.arange(0, block // 4)
    return counter, counter[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit(do_not_specialize=["width"])
def race_kernel(
    source, last, last_facts, arrivals, prefixes, scores, tokens, token_ids, slots, positions,
    one_hot, certain, draft_probs, draft_columns, all_ints, all_floats, ints_stride, floats_stride,
    source_stride, probs_stride, probs_place_stride, probs_width, width, vocab_size,
    coupled: tl.constexpr, block: tl.constexpr, block_s: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Programs (chunk, request): the chunk's winner for the last token of a request.

    Writes scores and tokens [R, 2, chunks], for the target's distribution, and for the residual if
    a token was rejected. The last program to arrive writes the token.
    """
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    chunk, request, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    slot = tl.load(slots + request)
    temperature = tl.load(all_floats + slot * floats_stride + TEMPERATURE)
    if temperature == 0.0:
        return
    if coupled:
        if tl.load(all_ints + slot * ints_stride + VERIFICATION) == COUPLED:
            return
    row = tl.load(last + request * 3).to(tl.int64)
    place = tl.load(last + request * 3 + 1)
    refused = tl.load(last + request * 3 + 2)
    facts = last_facts + request * 4
    counter, token = chunk_tokens(chunk, block)
    inside = token < vocab_size  # others have the weight 0
    logit = tl.load(source + row * source_stride + token, mask=inside, other=float("-inf"))
    p = probability_of(
        logit.to(tl.float32), tl.load(facts + LARGEST), tl.load(facts + TOTAL),
        tl.load(facts + LOWEST_LOGIT), tl.load(facts + LOWEST_WEIGHT), inverse_of(temperature),
    )  # fmt: skip
    seed = tl.load(all_ints + slot * ints_stride + SEED)
    step = tl.load(all_ints + slot * ints_stride + STEPS)
    purpose = tl.where(refused >= 0, RESIDUAL, TARGET)
    noise = token_noise(seed, tl.load(positions + request) + place, step, purpose, counter)
    scores += request * 2 * chunks
    tokens += request * 2 * chunks
    score, best = winner(ratio(p, noise), token)
    tl.store(scores + chunk, score)
    tl.store(tokens + chunk, best)
    if refused >= 0:
        rest = p
        if is_certain_at(one_hot, certain, request, place, width, place < width - 1):
            rest = tl.where(token == refused, 0.0, p)
        elif draft_probs is not None:
            q = draft_probability(
                draft_probs, draft_columns, request, place, token, inside, probs_stride,
                probs_place_stride, probs_width,
            )  # fmt: skip
            if prefixes is not None:
                rest = p * tl.load(prefixes + request * 2 * width + place)
            rest = tl.maximum(rest - q, 0.0)
        score, best = winner(ratio(rest, noise), token)
        tl.store(scores + chunks + chunk, score)
        tl.store(tokens + chunks + chunk, best)
    if is_last(arrivals + request):
        _, token_id = chunk_winner(scores, tokens, chunks, vocab_size, block_s)
        if refused >= 0:
            # If p and q are equal up to rounding, the residual is empty, and p is as good.
            score, rest_id = chunk_winner(
                scores + chunks, tokens + chunks, chunks, vocab_size, block_s
            )
            token_id = tl.where(score > 0, rest_id, token_id)
        tl.store(token_ids + request * width + place, token_id.to(tl.int64))


@triton.jit(do_not_specialize=["width"])
def commit_kernel(
    slots, token_ids, num_tokens, all_ints, ints_stride, output_counts, ids_stride, width,
    vocab_size, block_k: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Program (request): counts its step and its tokens."""
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    count = tl.load(num_tokens + request)
    # Padding may put one slot in a batch twice.
    tl.atomic_add(all_ints + slot * ints_stride + STEPS, (count > 0).to(tl.int64))
    tl.atomic_add(all_ints + slot * ints_stride + NUM_OUTPUT, count)
    if output_counts is not None:
        column = tl.arange(0, block_k)
        given = (column < count) & (column < width)
        token = tl.load(token_ids + request * ids_stride + column, mask=given, other=0)
        one = given.to(tl.int32)
        tl.atomic_add(output_counts + slot * vocab_size + token, one, mask=given)
