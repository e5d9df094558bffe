"""The kernels of verification behind the scan: accept, race, settle; and the commit.

A race samples a token from weights: the largest weight / exponential number wins. That is the
choice of Gumbel-max, log weight + Gumbel noise, from the same uniform numbers, with one logarithm
instead of three.
"""
# ruff: noqa: SIM102  (of two nested ifs one is decided at compile time)

import triton
import triton.language as tl

from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs
from slipstream.kernels.triton.philox import ACCEPT, RESIDUAL, TARGET, token_noise, uniform
from slipstream.kernels.triton.sampling_scan import (
    NO_TOKEN,
    NUM_OUTPUT,
    SEED,
    STEPS,
    TEMPERATURE,
    choices,
    inverse_of,
    row_sums,
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
def column_of(vocabulary, token, count, steps: tl.constexpr):
    """Where the rising list holds `token`; `count` where it does not."""
    low = token * 0
    high = low + count
    for _ in tl.static_range(steps):
        middle = (low + high) // 2
        open_ = low < high
        value = tl.load(vocabulary + middle, mask=open_, other=0)
        less = open_ & (value < token)
        low, high = (
            tl.where(less, middle + 1, low),
            tl.where(open_ & (value >= token), middle, high),
        )
    value = tl.load(vocabulary + low, mask=low < count, other=-1)
    return tl.where(value == token, low, count)


@triton.jit
def probability_of(logit, largest, total, lowest_logit, lowest_weight, inverse):
    weight = weight_of(logit, largest, inverse)
    kept = (logit >= lowest_logit) & (weight >= lowest_weight)
    return tl.where(kept, weight / tl.maximum(total, 1.0), 0.0)


@triton.jit
def row_facts(
    result, chunk_largest, chunk_sum, rows, chunks, inverse, truncated: tl.constexpr,
    block_s: tl.constexpr,
):  # fmt: skip
    """(largest, total, lowest logit, lowest weight) of rows [n]: what `probability_of` needs."""
    if truncated:
        line = result + rows * 4
        largest, total = tl.load(line + LARGEST), tl.load(line + TOTAL)
        lowest_logit, lowest_weight = tl.load(line + LOWEST_LOGIT), tl.load(line + LOWEST_WEIGHT)
    else:
        largest, total = row_sums(chunk_largest, chunk_sum, rows, chunks, inverse, block_s)
        lowest_logit, lowest_weight = tl.full(rows.shape, float("-inf"), tl.float32), total * 0.0
    return largest, total, lowest_logit, lowest_weight


@triton.jit
def _draft_probability(
    draft_probs, vocabulary, request, index, token, asked, probs_stride, probs_place_stride,
    probs_width, steps: tl.constexpr,
):  # fmt: skip
    """q of each token: 0 where the draft does not know it."""
    column = token
    if vocabulary is not None:
        column = column_of(vocabulary, token, probs_width, steps)
    line = draft_probs + request.to(tl.int64) * probs_stride + index * probs_place_stride
    return tl.load(line + column, mask=asked & (column < probs_width), other=0.0)


@triton.jit(do_not_specialize=["width"])
def accept_kernel(
    source, chunk_largest, chunk_choice, chunk_sum, result, token_ids, num_tokens, num_accepted,
    last, last_facts, first_row, slots, positions, draft_tokens, num_draft_tokens, one_hot,
    draft_probs, vocabulary, all_ints, all_floats, ints_stride, floats_stride, source_stride,
    draft_stride, probs_stride, probs_place_stride, probs_width, width, vocab_size, chunks,
    rates: tl.constexpr, num_rates: tl.constexpr, uniform_rows: tl.constexpr,
    sampled: tl.constexpr, truncated: tl.constexpr, steps: tl.constexpr, block_k: tl.constexpr,
    block_s: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Program (request): how many draft tokens are accepted. Greedy requests are done with that.

    For sampled ones it leaves last [R, 3] (row of logits, offset, refused token or -1) and
    last_facts [R, 4] of that row.
    """
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    column = tl.arange(0, block_k)
    drafts = tl.load(num_draft_tokens + request).to(tl.int32)
    drafted = tl.load(
        draft_tokens + request * draft_stride + column, mask=column < width - 1, other=-1
    )
    in_use = (column < drafts) & (column < width - 1)
    rows = first_row_of(request, first_row, width, uniform_rows) + tl.minimum(column, drafts)
    # All loads before the first reduction, so that their latencies overlap.
    temperature = tl.load(all_floats + slot * floats_stride + TEMPERATURE)
    if sampled:
        by_chance = column < tl.where(temperature > 0, drafts, 0)
        legal = in_use & by_chance & (drafted >= 0) & (drafted < vocab_size)
        token = tl.where(legal, drafted, 0)
        place = rows.to(tl.int64) * source_stride + token
        logit = tl.load(source + place, mask=legal, other=float("-inf")).to(tl.float32)
        q = tl.full((block_k,), 1.0, tl.float32)
        if draft_probs is not None:
            is_one_hot = tl.load(one_hot + request) != 0
            probability = _draft_probability(
                draft_probs, vocabulary, request, tl.minimum(column, width - 2), token, legal,
                probs_stride, probs_place_stride, probs_width, steps,
            )  # fmt: skip
            q = tl.where(is_one_hot, 1.0, probability)
    if sampled or num_rates > 0:
        seed = tl.load(all_ints + slot * ints_stride + SEED)
        step = tl.load(all_ints + slot * ints_stride + STEPS)
        chance = uniform(seed, tl.load(positions + request) + column, step, ACCEPT)
    choice = choices(chunk_largest, chunk_choice, rows, chunks, vocab_size, block_s)
    accepted = in_use & (drafted == choice)
    if sampled:
        inverse = inverse_of(temperature)
        # Numbers without meaning for greedy requests, which do not look at them.
        largest, total, lowest_logit, lowest_weight = row_facts(
            result, chunk_largest, chunk_sum, rows, chunks, inverse, truncated, block_s
        )
        p = probability_of(logit, largest, total, lowest_logit, lowest_weight, inverse)
        # Strict, so that p = 0 is refused even where chance or q is 0.
        accepted = tl.where(temperature > 0, legal & (chance * q < p), accepted)
    if num_rates > 0:
        rate = tl.zeros((block_k,), tl.float32)
        for index in tl.static_range(num_rates):
            rate = tl.where(column == index, rates[index], rate)
        accepted = in_use & (chance < rate)
    count = tl.min(tl.where(accepted, block_k, column))
    here = column == count
    behind = tl.where(here, choice, -1).to(tl.int64)
    token_ids += request * width + column
    tl.store(token_ids, tl.where(column < count, drafted, behind), mask=column < width)
    tl.store(num_tokens + request, (count + 1).to(tl.int64))
    tl.store(num_accepted + request, count.to(tl.int64))
    if sampled:
        if temperature > 0:
            refused = tl.sum(tl.where(here & in_use, drafted + 1, 0)) - 1
            tl.store(last + request * 3, tl.sum(tl.where(here, rows, 0)))
            tl.store(last + request * 3 + 1, count)
            tl.store(last + request * 3 + 2, tl.maximum(refused, -1).to(tl.int32))
            line = last_facts + request * 4 + column * 0
            tl.store(line + LARGEST, largest, mask=here)
            tl.store(line + TOTAL, total, mask=here)
            tl.store(line + LOWEST_LOGIT, lowest_logit, mask=here)
            tl.store(line + LOWEST_WEIGHT, lowest_weight, mask=here)


@triton.jit
def winner(score, token, inside):
    """The largest score and the first token that has it."""
    best = tl.max(tl.where(inside, score, -1.0))
    return best, tl.min(tl.where(inside & (score == best), token, NO_TOKEN))


@triton.jit
def chunk_tokens(chunk, block: tl.constexpr):
    """(counters of noise [block / 4], tokens [block / 4, 4]) of a chunk."""
    counter = chunk * (block // 4) + tl.arange(0, block // 4)
    return counter, counter[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def race_kernel(
    source, last, last_facts, scores, tokens, slots, positions, one_hot, draft_probs, vocabulary,
    all_ints, all_floats, ints_stride, floats_stride, source_stride, probs_stride,
    probs_place_stride, probs_width, vocab_size, steps: tl.constexpr, block: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    """Programs (chunk, request): the chunk's winner among the tokens for the last place.

    Writes scores and tokens [R, 2, chunks]: of the target's distribution, and of what it has
    beyond the draft's where a token was refused.
    """
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    chunk, request = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + request)
    temperature = tl.load(all_floats + slot * floats_stride + TEMPERATURE)
    if temperature == 0.0:
        return
    row = tl.load(last + request * 3).to(tl.int64)
    place = tl.load(last + request * 3 + 1)
    refused = tl.load(last + request * 3 + 2)
    facts = last_facts + request * 4
    counter, token = chunk_tokens(chunk, block)
    inside = token < vocab_size
    logit = tl.load(source + row * source_stride + token, mask=inside, other=float("-inf"))
    p = probability_of(
        logit.to(tl.float32), tl.load(facts + LARGEST), tl.load(facts + TOTAL),
        tl.load(facts + LOWEST_LOGIT), tl.load(facts + LOWEST_WEIGHT), inverse_of(temperature),
    )  # fmt: skip
    seed = tl.load(all_ints + slot * ints_stride + SEED)
    step = tl.load(all_ints + slot * ints_stride + STEPS)
    purpose = tl.where(refused >= 0, RESIDUAL, TARGET)
    noise = token_noise(seed, tl.load(positions + request) + place, step, purpose, counter)
    cell = request * 2 * tl.num_programs(0) + chunk
    score, best = winner(p / noise, token, inside)
    tl.store(scores + cell, score)
    tl.store(tokens + cell, best)
    if refused >= 0:
        rest = p
        is_one_hot = tl.load(one_hot + request) != 0
        if is_one_hot:
            rest = tl.where(token == refused, 0.0, p)
        elif draft_probs is not None:
            q = _draft_probability(
                draft_probs, vocabulary, request, place, token, inside, probs_stride,
                probs_place_stride, probs_width, steps,
            )  # fmt: skip
            rest = tl.maximum(p - q, 0.0)
        score, best = winner(rest / noise, token, inside)
        tl.store(scores + cell + tl.num_programs(0), score)
        tl.store(tokens + cell + tl.num_programs(0), best)


@triton.jit
def chunk_winner(scores, tokens, chunks, block_s: tl.constexpr):
    chunk = tl.arange(0, block_s)
    score = tl.load(scores + chunk, mask=chunk < chunks, other=-1.0)
    token = tl.load(tokens + chunk, mask=chunk < chunks, other=NO_TOKEN)
    return winner(score, token, chunk < chunks)


@triton.jit(do_not_specialize=["width"])
def settle_kernel(
    scores, tokens, last, token_ids, slots, all_floats, floats_stride, width, vocab_size, chunks,
    block_s: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Program (request): the winner of the race takes the last place of a sampled request."""
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    if tl.load(all_floats + slot * floats_stride + TEMPERATURE) == 0.0:
        return
    place = tl.load(last + request * 3 + 1)
    cell = request * 2 * chunks
    _, token = chunk_winner(scores + cell, tokens + cell, chunks, block_s)
    if tl.load(last + request * 3 + 2) >= 0:
        # Where p and q are equal up to rounding nothing is left, and p is as good.
        score, rest = chunk_winner(scores + cell + chunks, tokens + cell + chunks, chunks, block_s)
        token = tl.where(score > 0, rest, token)
    token = tl.minimum(token, vocab_size - 1).to(tl.int64)
    tl.store(token_ids + request * width + place, token)


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
