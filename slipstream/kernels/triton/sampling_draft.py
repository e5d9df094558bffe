"""The kernels of drafting after the scan: the argmax, or the distribution with its race."""
# ruff: noqa: SIM102  (of two nested ifs one is decided at compile time)

import triton
import triton.language as tl

from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs
from slipstream.kernels.triton.philox import DRAFT, TARGET, listed_noise, ratio, token_noise
from slipstream.kernels.triton.sampling_scan import (
    COUPLED,
    SEED,
    STEPS,
    TEMPERATURE,
    VERIFICATION,
    choices,
    inverse_of,
    store_confidence,
)
from slipstream.kernels.triton.sampling_verdict import (
    chunk_tokens,
    chunk_winner,
    is_last,
    probability_of,
    row_facts,
    winner,
)


@triton.jit
def _choice(chunk_largest, chunk_choice, request, chunks, vocab_size, block_s: tl.constexpr):
    one = request + tl.zeros((1,), tl.int32)
    return tl.sum(choices(chunk_largest, chunk_choice, one, chunks, vocab_size, block_s))


@triton.jit
def draft_race_kernel(
    logits, chunk_largest, chunk_choice, chunk_sum, chunk_mass, result, arrivals, scores, tokens,
    probs, confidences, out, slots, positions, vocabulary, all_ints, all_floats, ints_stride,
    floats_stride, logits_stride, probs_stride, vocab_size, truncated: tl.constexpr,
    coupled: tl.constexpr, block: tl.constexpr, block_s: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Programs (chunk, request): writes the chunk's probabilities, and its winner [R, chunks].

    The last program to arrive writes the token, the first chunk's the confidence.
    """
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    chunk, request, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    if confidences is not None:
        if chunk == 0:
            store_confidence(confidences, chunk_largest, chunk_mass, request, chunks, block_s)
    slot = tl.load(slots + request)
    temperature = tl.load(all_floats + slot * floats_stride + TEMPERATURE)
    counter, token = chunk_tokens(chunk, block)
    inside = token < vocab_size  # others have the weight 0
    target = probs + request.to(tl.int64) * probs_stride + token
    if temperature == 0.0:
        tl.store(target, tl.zeros((block // 4, 4), tl.float32), mask=inside)
        if chunk == 0:
            choice = _choice(chunk_largest, chunk_choice, request, chunks, vocab_size, block_s)
            tl.store(out + request, choice.to(tl.int64))
        return
    inverse = inverse_of(temperature)
    one = request + tl.zeros((1,), tl.int32)
    source = logits + request.to(tl.int64) * logits_stride + token
    logit = tl.load(source, mask=inside, other=float("-inf")).to(tl.float32)
    largest, total, lowest_logit, lowest_weight = row_facts(
        result, chunk_largest, chunk_sum, one, chunks, inverse, truncated, block_s
    )
    p = probability_of(
        logit, tl.sum(largest), tl.sum(total), tl.sum(lowest_logit), tl.sum(lowest_weight), inverse
    )
    tl.store(target, p, mask=inside)
    seed = tl.load(all_ints + slot * ints_stride + SEED)
    step = tl.load(all_ints + slot * ints_stride + STEPS)
    position = tl.load(positions + request)
    alike = False
    if coupled:
        alike = tl.load(all_ints + slot * ints_stride + VERIFICATION) == COUPLED
    if alike:
        if vocabulary is None:
            noise = token_noise(seed, position, step, TARGET, counter)
        else:
            target_token = tl.load(vocabulary + token, mask=inside, other=0)
            noise = listed_noise(seed, position, step, TARGET, target_token)
    else:
        noise = token_noise(seed, position, step, DRAFT, counter)
    score, best = winner(ratio(p, noise), token)
    scores += request * chunks
    tokens += request * chunks
    tl.store(scores + chunk, score)
    tl.store(tokens + chunk, best)
    if is_last(arrivals + request):
        _, token_id = chunk_winner(scores, tokens, chunks, vocab_size, block_s)
        tl.store(out + request, token_id.to(tl.int64))


@triton.jit
def draft_choice_kernel(
    chunk_largest, chunk_choice, chunk_mass, confidences, out, vocab_size, chunks,
    block_s: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Program (request): the argmax, and its probability at temperature 1."""
    launch_dependents(pdl)
    wait_for_inputs(pdl)
    request = tl.program_id(0)
    if confidences is not None:
        store_confidence(confidences, chunk_largest, chunk_mass, request, chunks, block_s)
    choice = _choice(chunk_largest, chunk_choice, request, chunks, vocab_size, block_s)
    tl.store(out + request, choice.to(tl.int64))
