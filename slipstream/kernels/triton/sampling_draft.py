"""The kernels of drafting behind the scan: the distribution with its race, and the token."""

import triton
import triton.language as tl

from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs
from slipstream.kernels.triton.philox import DRAFT, token_noise
from slipstream.kernels.triton.sampling_scan import (
    SEED,
    STEPS,
    TEMPERATURE,
    choices,
    inverse_of,
)
from slipstream.kernels.triton.sampling_verdict import (
    chunk_tokens,
    chunk_winner,
    probability_of,
    row_facts,
    winner,
)


@triton.jit
def draft_race_kernel(
    logits, chunk_largest, chunk_sum, result, probs, scores, tokens, slots, positions, all_ints,
    all_floats, ints_stride, floats_stride, logits_stride, probs_stride, vocab_size, chunks,
    truncated: tl.constexpr, block: tl.constexpr, block_s: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Programs (chunk, request): writes the chunk's probabilities, and its winner [R, chunks]."""
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    chunk, request = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + request)
    temperature = tl.load(all_floats + slot * floats_stride + TEMPERATURE)
    counter, token = chunk_tokens(chunk, block)
    inside = token < vocab_size
    target = probs + request.to(tl.int64) * probs_stride + token
    if temperature == 0.0:
        tl.store(target, tl.zeros((block // 4, 4), tl.float32), mask=inside)
        return
    inverse = inverse_of(temperature)
    one = request + tl.zeros((1,), tl.int32)
    largest, total, lowest_logit, lowest_weight = row_facts(
        result, chunk_largest, chunk_sum, one, chunks, inverse, truncated, block_s
    )
    source = logits + request.to(tl.int64) * logits_stride + token
    logit = tl.load(source, mask=inside, other=float("-inf")).to(tl.float32)
    p = probability_of(
        logit, tl.sum(largest), tl.sum(total), tl.sum(lowest_logit), tl.sum(lowest_weight), inverse
    )
    tl.store(target, p, mask=inside)
    seed = tl.load(all_ints + slot * ints_stride + SEED)
    step = tl.load(all_ints + slot * ints_stride + STEPS)
    noise = token_noise(seed, tl.load(positions + request), step, DRAFT, counter)
    score, best = winner(p / noise, token, inside)
    tl.store(scores + request * chunks + chunk, score)
    tl.store(tokens + request * chunks + chunk, best)


@triton.jit
def draft_settle_kernel(
    chunk_largest, chunk_choice, scores, tokens, out, slots, all_floats, floats_stride, vocab_size,
    chunks, sampled: tl.constexpr, block_s: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Program (request): the draft token, the argmax for greedy requests."""
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    request = tl.program_id(0)
    one = request + tl.zeros((1,), tl.int32)
    token = tl.sum(choices(chunk_largest, chunk_choice, one, chunks, vocab_size, block_s))
    if sampled:
        slot = tl.load(slots + request)
        if tl.load(all_floats + slot * floats_stride + TEMPERATURE) > 0:
            cell = request * chunks
            _, token = chunk_winner(scores + cell, tokens + cell, chunks, block_s)
            token = tl.minimum(token, vocab_size - 1)
    tl.store(out + request, token.to(tl.int64))
