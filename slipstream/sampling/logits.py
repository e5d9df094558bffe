"""From raw logits to the target's distribution: processors, temperature and truncation."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.sampling.rows import SampleRows
from slipstream.sampling.state import SamplingState, Uses
from slipstream.sampling.thresholds import kth_largest, nucleus_threshold

# Below this a temperature is as good as greedy: a gap of 0.001 between logits becomes e^-100.
SMALLEST_TEMPERATURE = 1e-5
TRUNCATIONS = frozenset((Uses.TOP_K, Uses.TOP_P, Uses.MIN_P))


def process(
    logits: Tensor, rows: SampleRows, state: SamplingState, uses: frozenset[Uses]
) -> Tensor:
    """Apply every request's processors to every row, the row's drafted prefix considered.

    In this order: penalties, logit_bias and allowed_token_ids, min_tokens, bad_words; then what
    `rows.allowed` forbids. The rows of
    requests that use none of them keep their bits. Only bad_words look at the host's requests, and
    wait for the device.

    Args:
        logits: [N, V] float32, left as it is.
        rows: whose rows these are.
        state: of V tokens.
        uses: of the requests of `rows`.

    Returns:
        [N, V] float32; `logits` itself when nothing applies.
    """
    out = logits
    for use, processor in PROCESSORS:
        if use in uses:
            out = processor(out, rows, state)
    if rows.allowed is not None:
        out = _forbid(out, rows.allowed)
    return out


def probabilities(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uses: frozenset[Uses] = TRUNCATIONS,
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
        uses: truncations that are not among these keep everything in every row.

    Returns:
        [N, V] float32, each row a distribution.
    """
    # The largest logit becomes 0 before the division, so no temperature can overflow.
    largest = logits.amax(-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    scale = temperature.clamp_min(SMALLEST_TEMPERATURE).unsqueeze(-1)
    weights = (logits - largest).div_(scale).exp_()  # in [0, 1]; the largest is exactly 1
    if Uses.MIN_P in uses:
        weights.masked_fill_(weights < min_p.unsqueeze(-1), 0.0)
    if Uses.TOP_K in uses:
        # Of logits and not of weights: a large temperature rounds different logits to one weight.
        # It makes no difference that min_p came first: of two thresholds the higher one counts.
        weights.masked_fill_(logits < kth_largest(logits, top_k), 0.0)
    if Uses.TOP_P in uses:
        weights.masked_fill_(weights < nucleus_threshold(weights, top_p), 0.0)
    # The sum is at least 1, but for rows of zeros.
    return weights.div_(weights.sum(-1, keepdim=True).clamp_min_(1.0))


Processor = Callable[[Tensor, SampleRows, SamplingState], Tensor]
"""Logits [N, V], left as they are, to new ones."""


def _penalise(logits: Tensor, rows: SampleRows, state: SamplingState) -> Tensor:
    """Repetition over prompt and output (Keskar et al. 2019); presence, frequency over output."""
    assert state.output_counts is not None
    assert state.prompt_mask is not None
    slots = rows.row_slots
    counts = state.output_counts[slots]
    _count_drafted_prefix(counts, rows)
    seen = state.prompt_mask[slots] | (counts > 0)
    factor = state.repetition_penalty[slots].unsqueeze(-1)
    punished = torch.where(logits > 0, logits / factor, logits * factor)
    out = torch.where(seen, punished, logits)
    out -= state.frequency_penalty[slots].unsqueeze(-1) * counts
    out -= state.presence_penalty[slots].unsqueeze(-1) * (counts > 0)
    return out


def _count_drafted_prefix(counts: Tensor, rows: SampleRows) -> None:
    """Add to counts [N, V] int32 the draft tokens before each row."""
    drafted = rows.draft_tokens[rows.request]  # [N, K]
    column = torch.arange(rows.max_draft_tokens, device=drafted.device)
    before = column < rows.offset.unsqueeze(-1)
    legal = before & (drafted >= 0) & (drafted < counts.shape[-1])
    counts.scatter_add_(-1, torch.where(legal, drafted, 0), legal.to(counts.dtype))


def _add_bias(logits: Tensor, rows: SampleRows, state: SamplingState) -> Tensor:
    """logit_bias, and -inf outside allowed_token_ids."""
    assert state.bias is not None
    bias = state.bias[rows.row_slots]
    # Adding 0 would turn a -0 into a 0.
    return torch.where(bias == 0, logits, bias.add_(logits))


def _withhold_stops(logits: Tensor, rows: SampleRows, state: SamplingState) -> Tensor:
    """No stop token while there are fewer than min_tokens output tokens before the row's token."""
    slots = rows.row_slots
    early = state.num_output_tokens[slots] + rows.offset < state.min_tokens[slots]
    stop_ids = state.stop_ids[slots]  # [N, M]
    # Padding repeats the first id, so that no two places of a row write different values.
    stop_ids = torch.where(stop_ids >= 0, stop_ids, stop_ids[:, :1].clamp_min(0))
    withheld = early & (state.stop_ids[slots, 0] >= 0)
    kept = logits.gather(-1, stop_ids)
    return logits.scatter(-1, stop_ids, torch.where(withheld.unsqueeze(-1), -torch.inf, kept))


def _forbid(logits: Tensor, allowed: Tensor) -> Tensor:
    """allowed: [N, ceil(V / 32)] int32, a bit for each token."""
    token = torch.arange(logits.shape[-1], device=logits.device)
    return logits.masked_fill(_forbidden(allowed, token), -torch.inf)


def _forbidden(allowed: Tensor, token: Tensor) -> Tensor:
    """[N, n] bool, of tokens [n]."""
    return ((allowed[:, token // 32] >> (token % 32)) & 1) == 0


def allow_next(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    state: SamplingState,
    uses: frozenset[Uses],
    vocabulary: Tensor | None = None,
) -> Tensor:
    """A drafter's logits without what grammars forbid behind the known tokens.

    What they forbid behind a draft token is not known on the device. Where all that a drafter knows
    is forbidden its logits stay as they are, and the target will refuse the guess.

    Args:
        logits: [n, V], left as it is.
        slots, positions: [n] int64, of the tokens that these logits are for.
        uses: of the requests.
        vocabulary: [V], the token ids of the columns; None for those from 0 on.
    """
    if Uses.GRAMMAR not in uses:
        return logits
    assert state.allowed_next is not None
    if vocabulary is None:
        columns = min(logits.shape[-1], state.vocab_size)
        vocabulary = torch.arange(columns, device=logits.device)
    known = state.num_prompt_tokens[slots] + state.num_output_tokens[slots]
    forbidden = _forbidden(state.allowed_next[slots], vocabulary)
    forbidden &= (positions == known).unsqueeze(1) & ~forbidden.all(1, keepdim=True)
    forbidden = pad(forbidden, (0, logits.shape[-1] - len(vocabulary)))
    return logits.masked_fill(forbidden, -torch.inf)


def ban_words(logits: Tensor, rows: SampleRows, state: SamplingState) -> Tensor:
    """No bad word is completed, whether it began in the prompt, the output or the draft.

    Runs on the host: `Request.token_ids` must hold every committed token, and the draft tokens are
    waited for.
    """
    banned_rows: list[int] = []
    banned_tokens: list[int] = []
    slots, drafts = rows.slots.tolist(), rows.draft_tokens.tolist()
    places = zip(rows.request.tolist(), rows.offset.tolist(), strict=True)
    for row, (index, offset) in enumerate(places):
        if Uses.BAD_WORDS not in state.uses([slots[index]]):
            continue
        request = state.request(slots[index])
        reach = max(len(word) for word in request.bad_words)
        context = (*request.token_ids[-reach:], *drafts[index][:offset])
        for token in _completions(context, request.bad_words):
            if token < logits.shape[-1]:
                banned_rows.append(row)
                banned_tokens.append(token)
    cells = torch.tensor([banned_rows, banned_tokens], dtype=torch.int64, device=logits.device)
    return logits.index_put((cells[0], cells[1]), logits.new_tensor(-torch.inf))


def _completions(context: Sequence[int], words: Sequence[Sequence[int]]) -> Iterator[int]:
    """The tokens that would complete a word behind `context`."""
    for *start, last in words:
        if not start or tuple(context[-len(start) :]) == tuple(start):
            yield last


PROCESSORS: tuple[tuple[Uses, Processor], ...] = (
    (Uses.PENALTIES, _penalise),
    (Uses.BIAS, _add_bias),
    (Uses.MIN_TOKENS, _withhold_stops),
    (Uses.BAD_WORDS, ban_words),
)
