"""From raw logits to the target's distribution: processors, temperature and truncation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.sampling.rows import SampleRows
from slipstream.sampling.state import SamplingState, Uses

# Below this a temperature is as good as greedy: a gap of 0.001 between logits becomes e^-100.
SMALLEST_TEMPERATURE = 1e-5

# top_p counts probability in integers, so that sums are exact in any order and on any device:
# 2^43 units for the most probable token leave room for 2^20 tokens in an int64.
MASS_UNITS = 2.0**43
# The bits of a float in [0, 1] are below 2^30: two digits of a radix search.
DIGIT_BITS = 15
DIGITS = 1 << DIGIT_BITS


@dataclass(frozen=True)
class Truncation:
    """Which truncations any row of a batch needs, known on the host.

    Attributes:
        largest_top_k: of the rows that truncate by it; 0 when none does.
        every_top_k: whether all rows truncate by it.
        top_p, min_p: whether any row truncates by it.
    """

    largest_top_k: int
    every_top_k: bool
    top_p: bool
    min_p: bool

    @classmethod
    def of(cls, state: SamplingState, host_slots: Sequence[int]) -> "Truncation":
        """What the requests in these slots need."""
        return cls(
            largest_top_k=state.largest_top_k(host_slots),
            every_top_k=len(state.users(host_slots, Uses.TOP_K)) == len(host_slots),
            top_p=bool(state.users(host_slots, Uses.TOP_P)),
            min_p=bool(state.users(host_slots, Uses.MIN_P)),
        )

    @classmethod
    def found_in(cls, top_k: Tensor, top_p: Tensor, min_p: Tensor, vocab_size: int) -> "Truncation":
        """What these parameters need; waits for the device."""
        restricts = (top_k > 0) & (top_k < vocab_size)
        return cls(
            largest_top_k=int(torch.where(restricts, top_k, 0).amax()) if len(top_k) else 0,
            every_top_k=bool(restricts.all()),
            top_p=bool((top_p < 1).any()),
            min_p=bool((min_p > 0).any()),
        )


def process(logits: Tensor, rows: SampleRows, state: SamplingState) -> Tensor:
    """Apply every request's processors to every row, the row's drafted prefix considered.

    In this order: penalties, logit_bias and allowed_token_ids, min_tokens, bad_words. The rows of
    requests that use none of them keep their bits.

    Args:
        logits: [N, V] float32, left as it is.
        rows: whose rows these are.
        state: of V tokens.

    Returns:
        [N, V] float32; `logits` itself when nothing applies.
    """
    out = logits
    for use, processor in PROCESSORS:
        requests = state.users(rows.host_slots, use)
        if not requests:
            continue
        if out is logits:
            out = logits.clone()
        processor(out, rows, requests, state)
    return out


def probabilities(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    truncation: Truncation | None = None,
) -> Tensor:
    """The distribution that each row is sampled from.

    In this order: temperature; min_p keeps tokens of at least min_p times the largest
    probability; top_k keeps tokens not below the k-th largest; top_p keeps the smallest set,
    from the top, whose share of what is left reaches top_p. Each is a threshold: tokens of equal
    probability stay or go together. A row without a finite logit gives zeros.

    Args:
        logits: [N, V] float32; -inf gives exactly 0.
        temperature, top_p, min_p: [N] float32.
        top_k: [N] int64; V, 0 or less keeps all.
        truncation: what any row needs. Without it the parameters are looked at, which waits for
            the device.

    Returns:
        [N, V] float32, each row a distribution.
    """
    if truncation is None:
        truncation = Truncation.found_in(top_k, top_p, min_p, logits.shape[-1])
    # The largest logit becomes 0 before the division, so no temperature can overflow.
    largest = logits.amax(-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    scale = temperature.clamp_min(SMALLEST_TEMPERATURE).unsqueeze(-1)
    weights = (logits - largest).div_(scale).exp_()  # in [0, 1]; the largest is exactly 1
    if truncation.min_p:
        weights.masked_fill_(weights < min_p.unsqueeze(-1), 0.0)
    if truncation.largest_top_k:
        below = logits < _kth_largest(logits, top_k, truncation.largest_top_k)
        weights.masked_fill_(below, 0.0)
    if truncation.top_p:
        weights.masked_fill_(weights < _nucleus_threshold(weights, top_p, truncation), 0.0)
    # The sum is at least 1, but for rows of zeros.
    return weights.div_(weights.sum(-1, keepdim=True).clamp_min_(1.0))


def _kth_largest(logits: Tensor, top_k: Tensor, largest_top_k: int) -> Tensor:
    """[N, 1], the k-th largest logit of each row, -inf where the row keeps all.

    Logits and not weights: a large temperature rounds different logits to one weight. It makes
    no difference that min_p came first: of two thresholds the higher one counts.
    """
    values = torch.topk(logits, largest_top_k).values
    rank = (top_k - 1).clamp(0, largest_top_k - 1)
    restricts = (top_k > 0) & (top_k < logits.shape[-1])
    threshold = values.gather(-1, rank.unsqueeze(-1))
    return torch.where(restricts.unsqueeze(-1), threshold, -torch.inf)


def _nucleus_threshold(weights: Tensor, top_p: Tensor, truncation: Truncation) -> Tensor:
    """[N, 1], the largest threshold that keeps a share of at least top_p, 0 for top_p = 1.

    For weights [N, V] in [0, 1].
    """
    mass = (weights * MASS_UNITS).to(torch.int64)
    wanted = (mass.sum(-1, keepdim=True) * top_p.double().unsqueeze(-1)).ceil_().to(torch.int64)
    candidates = truncation.largest_top_k if truncation.every_top_k else weights.shape[-1]
    if candidates <= DIGITS:  # a histogram would be larger than what it counts
        threshold = _search_largest(weights, wanted, candidates)
    else:
        threshold = _search_bits(weights, mass, wanted)
    return torch.where(top_p.unsqueeze(-1) < 1, threshold, 0.0)


def _search_largest(weights: Tensor, wanted: Tensor, count: int) -> Tensor:
    """[N, 1], the largest weight such that those not below it have the mass `wanted` [N, 1].

    Right where no weight but ties of the last one stands behind the `count` largest.
    """
    largest = torch.topk(weights, count).values
    reached = (largest * MASS_UNITS).to(torch.int64).cumsum_(-1) >= wanted
    # Ties of the last one may be what reaches it: then none of these does.
    place = (~reached).sum(-1, keepdim=True).clamp_max_(count - 1)
    return largest.gather(-1, place)


def _search_bits(weights: Tensor, mass: Tensor, wanted: Tensor) -> Tensor:
    """What `_search_largest` finds, for any weights, by a radix search over their bits.

    Floats in [0, 1] are ordered as their bits are. The upper digit of the threshold is the
    largest one such that the tokens with that digit or a higher one have the mass `wanted`; then
    the same for the lower digit, among the tokens with that upper digit.
    """
    bits = weights.view(torch.int32)
    upper = bits >> DIGIT_BITS
    upper_digit, above = _search_digit(upper, mass, wanted)
    inside = upper == upper_digit
    lower = bits & (DIGITS - 1)
    lower_digit, _ = _search_digit(lower, torch.where(inside, mass, 0), wanted - above)
    found = (upper_digit << DIGIT_BITS) | lower_digit
    return found.to(torch.int32).view(torch.float32)


def _search_digit(digits: Tensor, mass: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The largest digit [N, 1] that reaches `wanted`, and the mass [N, 1] of the higher ones."""
    histogram = mass.new_zeros(mass.shape[0], DIGITS + 1)  # the last one stays empty
    histogram.scatter_add_(-1, digits.to(torch.int64), mass)
    at_least = histogram.flip(-1).cumsum(-1).flip(-1)  # falls as the digit grows
    digit = ((at_least >= wanted).sum(-1, keepdim=True) - 1).clamp_(0, DIGITS - 1)
    return digit, at_least.gather(-1, digit + 1)


Processor = Callable[[Tensor, SampleRows, Sequence[int], SamplingState], None]
"""Changes the rows of some requests (batch indices) of logits [N, V] in place."""


def _penalise(
    logits: Tensor, rows: SampleRows, requests: Sequence[int], state: SamplingState
) -> None:
    """Repetition over prompt and output (Keskar et al. 2019); presence, frequency over output."""
    assert state.output_counts is not None
    assert state.prompt_mask is not None
    index = rows.rows_of(requests)
    slots = rows.row_slots[index]
    counts = state.output_counts[slots]
    _count_drafted_prefix(counts, rows, index)
    seen = state.prompt_mask[slots] | (counts > 0)
    values = logits[index]
    factor = state.repetition_penalty[slots].unsqueeze(-1)
    values = torch.where(seen, torch.where(values > 0, values / factor, values * factor), values)
    values -= state.frequency_penalty[slots].unsqueeze(-1) * counts
    values -= state.presence_penalty[slots].unsqueeze(-1) * (counts > 0)
    logits[index] = values


def _count_drafted_prefix(counts: Tensor, rows: SampleRows, index: Tensor) -> None:
    """Add to counts [n, V] int32 the draft tokens before each of the rows `index` [n]."""
    if rows.max_draft_tokens == 0:
        return
    drafted = rows.draft_tokens[rows.request[index]]  # [n, K]
    column = torch.arange(rows.max_draft_tokens, device=drafted.device)
    before = column < rows.offset[index].unsqueeze(-1)
    legal = before & (drafted >= 0) & (drafted < counts.shape[-1])
    counts.scatter_add_(-1, torch.where(legal, drafted, 0), legal.to(counts.dtype))


def _add_bias(
    logits: Tensor, rows: SampleRows, requests: Sequence[int], state: SamplingState
) -> None:
    """logit_bias, and -inf outside allowed_token_ids."""
    assert state.bias is not None
    index = rows.rows_of(requests)
    logits.index_add_(0, index, state.bias[rows.row_slots[index]])


def _withhold_stops(
    logits: Tensor, rows: SampleRows, requests: Sequence[int], state: SamplingState
) -> None:
    """No stop token while there are fewer than min_tokens output tokens before the row's token."""
    index = rows.rows_of(requests)
    slots = rows.row_slots[index]
    early = state.num_output_tokens[slots] + rows.offset[index] < state.min_tokens[slots]
    stop_ids = state.stop_ids[slots]  # [n, M]
    # Padding repeats the first id, so that no two places of a row write different values.
    stop_ids = torch.where(stop_ids >= 0, stop_ids, stop_ids[:, :1].clamp_min(0))
    withheld = early & (state.stop_ids[slots, 0] >= 0)
    values = logits[index]
    kept = values.gather(-1, stop_ids)
    values.scatter_(-1, stop_ids, torch.where(withheld.unsqueeze(-1), -torch.inf, kept))
    logits[index] = values


def _ban_words(
    logits: Tensor, rows: SampleRows, requests: Sequence[int], state: SamplingState
) -> None:
    """No bad word is completed, whether it began in the prompt, the output or the draft.

    Runs on the host: `Request.token_ids` must hold every committed token, and the draft tokens of
    these requests are waited for.
    """
    first_rows = iter(rows.host_rows_of(requests))
    banned_rows: list[int] = []
    banned_tokens: list[int] = []
    drafts = rows.draft_tokens[torch.tensor(requests, device=logits.device)].tolist()
    for batch_index, draft in zip(requests, drafts, strict=True):
        request = state.request(rows.host_slots[batch_index])
        reach = max(len(word) for word in request.bad_words)
        for offset in range(rows.host_num_draft_tokens[batch_index] + 1):
            row = next(first_rows)
            context = (*request.token_ids[-reach:], *draft[:offset])
            for token in _completions(context, request.bad_words):
                if token < logits.shape[-1]:
                    banned_rows.append(row)
                    banned_tokens.append(token)
    cells = torch.tensor([banned_rows, banned_tokens], dtype=torch.int64, device=logits.device)
    logits[cells[0], cells[1]] = -torch.inf


def _completions(context: Sequence[int], words: Sequence[Sequence[int]]) -> Iterator[int]:
    """The tokens that would complete a word behind `context`."""
    for *start, last in words:
        if not start or tuple(context[-len(start) :]) == tuple(start):
            yield last


PROCESSORS: tuple[tuple[Uses, Processor], ...] = (
    (Uses.PENALTIES, _penalise),
    (Uses.BIAS, _add_bias),
    (Uses.MIN_TOKENS, _withhold_stops),
    (Uses.BAD_WORDS, _ban_words),
)
