"""From raw logits to the target's distribution: processors, temperature and truncation."""

import torch
from torch import Tensor

from slipstream.kernels.columns import ALL_COLUMNS, Columns
from slipstream.kernels.reference.thresholds import kth_largest, nucleus_threshold
from slipstream.kernels.sampling import SampleRows, SamplingNeeds, SamplingSlots

# Smaller temperatures act like greedy: a gap of 0.001 between logits becomes e^-100.
SMALLEST_TEMPERATURE = 1e-5
TRUNCATIONS = SamplingNeeds(top_k=True, top_p=True, min_p=True)


def process(
    logits: Tensor,
    rows: SampleRows,
    state: SamplingSlots,
    needs: SamplingNeeds,
    columns: Columns = ALL_COLUMNS,
) -> Tensor:
    """Apply each request's processors to its rows; drafted tokens before a row count as output.

    The order is: penalties, logit_bias and allowed_token_ids, min_tokens, then the grammar's mask
    (`rows.allowed`). Rows of requests without any of these keep their bits.

    Args:
        logits: [N, v] float32, not changed.
        state: the state of the requests, for all V tokens.
        columns: columns of the logits: all V tokens, or this rank's share.

    Returns:
        [N, v] float32; `logits` itself when nothing applies.
    """
    out = logits
    if needs.penalties:
        out = _penalise(out, rows, state, columns)
    if needs.bias:
        out = _add_bias(out, rows, state, columns)
    if needs.min_tokens:
        out = _withhold_stops(out, rows, state, columns)
    if rows.allowed is not None:
        out = out.masked_fill(is_forbidden(rows.allowed, columns.tokens(out)), -torch.inf)
    return out


def probabilities(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    needs: SamplingNeeds = TRUNCATIONS,
    columns: Columns = ALL_COLUMNS,
    largest: Tensor | None = None,
) -> Tensor:
    """The distribution that each row is sampled from.

    The order is: temperature; min_p keeps tokens of at least min_p times the largest
    probability; top_k keeps tokens not below the k-th largest; top_p keeps the smallest set of the
    most probable tokens whose share of the remaining probability is at least top_p. Each is a
    threshold, so tokens of equal probability are kept or dropped together. A row without a finite
    logit gives zeros.

    Args:
        logits: [N, v] float32; -inf gives exactly 0.
        temperature, top_p, min_p: [N] float32.
        top_k: [N] int64; V, 0 or less keeps all.
        needs: which truncations are computed; the others must keep everything in every row.
        columns: columns of the logits: all V tokens, or this rank's share.
        largest: [N, 1], the largest logit of each row; None: it is computed.

    Returns:
        [N, v] float32: a distribution in each row, or its share of one if columns are split.
    """
    # The largest logit becomes 0 before the division, so no temperature can overflow.
    largest = columns.largest(logits) if largest is None else largest
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    scale = temperature.clamp_min(SMALLEST_TEMPERATURE).unsqueeze(-1)
    weights = (logits - largest).div_(scale).exp_()  # in [0, 1]; the largest is exactly 1
    if needs.min_p:
        weights.masked_fill_(weights < min_p.unsqueeze(-1), 0.0)
    if needs.top_k:
        # Taken from logits, not weights: at a large temperature, different logits may have weights
        # that round to the same number.
        # The order of top_k and min_p makes no difference: the higher threshold counts.
        weights.masked_fill_(logits < kth_largest(logits, top_k, columns), 0.0)
    if needs.top_p:
        weights.masked_fill_(weights < nucleus_threshold(weights, top_p, columns), 0.0)
    # The sum is at least 1, except for rows of zeros.
    return weights.div_(columns.total(weights).clamp_min_(1.0))


def _penalise(logits: Tensor, rows: SampleRows, state: SamplingSlots, columns: Columns) -> Tensor:
    """Repetition penalty over prompt and output (Keskar et al. 2019); presence and frequency
    penalties over the output."""
    assert state.output_counts is not None
    assert state.prompt_mask is not None
    slots = rows.row_slots
    counts = columns.own(state.output_counts, logits)[slots]
    _count_drafted_prefix(counts, rows, columns)
    seen = columns.own(state.prompt_mask, logits)[slots] | (counts > 0)
    factor = state.float_column("repetition_penalty", slots).unsqueeze(-1)
    punished = torch.where(logits > 0, logits / factor, logits * factor)
    out = torch.where(seen, punished, logits)
    out -= state.float_column("frequency_penalty", slots).unsqueeze(-1) * counts
    out -= state.float_column("presence_penalty", slots).unsqueeze(-1) * (counts > 0)
    return out


def _count_drafted_prefix(counts: Tensor, rows: SampleRows, columns: Columns) -> None:
    """Add the draft tokens before each row to counts [N, v] int32."""
    drafted = rows.draft_tokens[rows.request]  # [N, K]
    place = torch.arange(rows.max_draft_tokens, device=drafted.device)
    column, legal = columns.places(drafted, counts)
    legal &= place < rows.offset.unsqueeze(-1)
    counts.scatter_add_(-1, column, legal.to(counts.dtype))


def _add_bias(logits: Tensor, rows: SampleRows, state: SamplingSlots, columns: Columns) -> Tensor:
    """Add logit_bias, and -inf outside allowed_token_ids."""
    assert state.bias is not None
    bias = columns.own(state.bias, logits)[rows.row_slots]
    # adding 0 would turn -0 into 0
    return torch.where(bias == 0, logits, bias.add_(logits))


def _withhold_stops(
    logits: Tensor, rows: SampleRows, state: SamplingSlots, columns: Columns
) -> Tensor:
    """Forbid stop tokens in rows with fewer than min_tokens output tokens before them."""
    slots = rows.row_slots
    num_output = state.int_column("num_output_tokens", slots) + rows.offset
    early = num_output < state.int_column("min_tokens", slots)
    place, legal = columns.places(state.stop_ids[slots], logits)  # [N, M]; padding has no column
    legal &= early.unsqueeze(-1)
    withheld = torch.zeros_like(logits, dtype=torch.int32).scatter_add_(-1, place, legal.int())
    return logits.masked_fill(withheld > 0, -torch.inf)


def is_forbidden(allowed: Tensor, token: Tensor) -> Tensor:
    """[N, n] bool: whether tokens [n] are absent from the bit mask allowed [N, ceil(V / 32)]."""
    return ((allowed[:, token // 32] >> (token % 32)) & 1) == 0
