"""Sampling in plain torch: accepts draft tokens, and samples the bonus or recovered token.

Speculative sampling (Leviathan et al. 2023; Chen et al. 2023): with p the target's distribution
and q the one that the draft token x was sampled from, x is accepted with probability
min(1, p(x) / q(x)); after the first refusal a token is sampled from max(p - q, 0), scaled to 1.
The output has exactly the distribution p. Plain decoding is the verification of an empty draft.
`block_verification.py` verifies the tokens of a draft jointly.

Coupled requests (`Verification.COUPLED`; Daliri et al. 2024, arXiv 2408.07978) always output the
target's own sample, with the noise of plain decoding at that position; a draft token is accepted if
it equals that sample. The drafter samples with the same noise, so both choose the same token with
probability at least (1 - d) / (1 + d), where d is the total variation distance of p and q.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.core.sampling_params import Verification
from slipstream.kernels.columns import ALL_COLUMNS, Columns
from slipstream.kernels.reference.block_verification import accepted_prefix, prefix_weights
from slipstream.kernels.reference.noise import NoiseKeys, Purpose, gumbel, uniform
from slipstream.kernels.reference.processors import probabilities, process
from slipstream.kernels.sampling import (
    INTS,
    PADDING,
    SampleRows,
    SamplingNeeds,
    SamplingOps,
    SamplingSlots,
)


def verify(
    logits: Tensor,
    rows: SampleRows,
    state: SamplingSlots,
    needs: SamplingNeeds,
    rates: Tensor | None,
    fp64: bool = False,
    columns: Columns = ALL_COLUMNS,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `VerifyOp`.

    Args:
        fp64: sample with 63-bit noise and float64 logarithms.
        columns: columns of the logits: all V tokens, or this rank's share.
    """
    raw, logits = logits, process(logits, rows, state, needs, columns)
    peaks = rows.peaks or columns.peaks(raw)
    largest, choice = peaks if logits is raw else columns.peaks(logits)
    is_sampled = state.float_column("temperature", rows.slots) > 0
    target = None
    if needs.sampling:
        target = _distribution(logits, rows.row_slots, state, needs, columns, largest)
    if target is not None and needs.coupled:
        is_coupled = is_sampled & _is_coupled(state, rows.slots)
        keys = _keys(state, rows.row_slots, rows.positions[rows.request] + rows.offset)
        drawn = _sample(target, keys, Purpose.TARGET, fp64, columns=columns)
        choice = torch.where(is_coupled[rows.request], drawn, choice)
        is_sampled &= ~is_coupled
    accepted = rows.draft_mask() & (rows.draft_tokens == choice[rows.draft_rows()])
    if target is not None:
        odds = p, q, legal = _odds(target, rows, columns)
        by_chance = legal & _is_accepted(_acceptance_noise(rows, state), p, q)
        accepted = torch.where(is_sampled.unsqueeze(-1), by_chance, accepted)
    if rates is not None:
        accepted = _accept_synthetic(rows, state, rates)
    num_accepted = _accepted_prefix(accepted)
    weight = None
    if target is not None and needs.block:
        is_block = is_sampled & (state.int_column("verification", rows.slots) == Verification.BLOCK)
        by_block, weight = _accept_block(target, odds, rows, state, columns)
        num_accepted = torch.where(is_block, by_block, num_accepted)
        weight = torch.where(is_block, weight, 1.0)
    last_token = choice[rows.first_row + num_accepted]
    if target is not None:
        drawn = _sample_last(target, rows, num_accepted, weight, state, fp64, columns)
        last_token = torch.where(is_sampled, drawn, last_token)
    token_ids = _token_ids(rows, num_accepted, last_token)
    return token_ids, num_accepted + 1, num_accepted, rows.by_request(peaks[0].squeeze(-1))


def draft(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    state: SamplingSlots,
    needs: SamplingNeeds,
    num_legal_tokens: int,
    probs_out: Tensor | None,
    confidence_out: Tensor | None,
    vocabulary: Tensor | None,
    fp64: bool = False,
    columns: Columns = ALL_COLUMNS,
) -> Tensor:
    """See `DraftOp`; `fp64` and `columns` as in `verify`."""
    logits = logits[:, :num_legal_tokens].float()
    largest, choice = columns.peaks(logits)
    if confidence_out is not None:
        confidence_out.copy_(columns.confidence(logits, largest))
    if probs_out is None:
        return choice
    is_sampled = state.float_column("temperature", slots) > 0
    probs = _distribution(logits, slots, state, needs, columns, largest)
    keys = _keys(state, slots, positions)
    drawn = _sample(probs, keys, Purpose.DRAFT, fp64, columns=columns)
    if needs.coupled:
        tokens = None
        if vocabulary is not None:
            tokens = columns.own(vocabulary, probs)[: probs.shape[-1]]
        alike = _sample(probs, keys, Purpose.TARGET, fp64, tokens, columns)
        drawn = torch.where(_is_coupled(state, slots), alike, drawn)
    probs_out.copy_(torch.where(is_sampled.unsqueeze(-1), probs, 0.0))
    return torch.where(is_sampled, drawn, choice)


def commit(slots: Tensor, token_ids: Tensor, num_tokens: Tensor, state: SamplingSlots) -> None:
    """See `RecordOutputOp`."""
    state.ints[:, INTS.index("steps")].index_add_(0, slots, (num_tokens > 0).to(torch.int64))
    state.ints[:, INTS.index("num_output_tokens")].index_add_(0, slots, num_tokens)
    counts = state.output_counts
    if counts is None:
        return
    column = torch.arange(token_ids.shape[1], device=token_ids.device)
    given = column < num_tokens.unsqueeze(-1)
    # A flat scatter_add counts a token that occurs twice in a row of `token_ids` twice.
    cells = slots.unsqueeze(-1) * counts.shape[1] + torch.where(given, token_ids, 0)
    counts.view(-1).scatter_add_(0, cells.view(-1), given.to(torch.int32).view(-1))


def _keys(state: SamplingSlots, slots: Tensor, positions: Tensor) -> NoiseKeys:
    seeds, steps = state.int_column("seeds", slots), state.int_column("steps", slots)
    return NoiseKeys(seeds, positions, steps)


def _is_coupled(state: SamplingSlots, slots: Tensor) -> Tensor:
    return state.int_column("verification", slots) == Verification.COUPLED


def _distribution(
    logits: Tensor,
    slots: Tensor,
    state: SamplingSlots,
    needs: SamplingNeeds,
    columns: Columns = ALL_COLUMNS,
    largest: Tensor | None = None,
) -> Tensor:
    """[n, v]: the distributions of rows with these slots [n]; `largest` as in `probabilities`."""
    return probabilities(
        logits,
        state.float_column("temperature", slots),
        state.int_column("top_k", slots),
        state.float_column("top_p", slots),
        state.float_column("min_p", slots),
        needs,
        columns,
        largest,
    )


def _odds(target: Tensor, rows: SampleRows, columns: Columns) -> tuple[Tensor, Tensor, Tensor]:
    """[R, K] each: p and q of the draft tokens, and whether there is a valid token."""
    drafted = rows.draft_tokens
    legal = rows.draft_mask() & (drafted >= 0)
    legal &= drafted < target.shape[-1] * columns.num_ranks
    safe = torch.where(legal, drafted, 0)
    return columns.at(target, rows.draft_rows(), safe), _draft_probability(rows, safe), legal


def _accept_block(
    target: Tensor,
    odds: tuple[Tensor, Tensor, Tensor],
    rows: SampleRows,
    state: SamplingSlots,
    columns: Columns,
) -> tuple[Tensor, Tensor]:
    """Block verification under target [N, v] with these `_odds`: how many tokens of each draft are
    accepted [R], and the weight of that prefix [R]."""
    p, q, legal = odds
    weights = prefix_weights(torch.where(legal, p, 0.0), q)
    lengths = _accepted_prefix(rows.draft_mask() & (rows.draft_tokens >= 0))
    masses = torch.zeros_like(weights)
    for place in range(1, rows.max_draft_tokens):
        row = target[rows.first_row + rows.num_draft_tokens.clamp_max(place)]
        weighted = row * weights[:, place : place + 1]
        beyond = _beyond_draft(weighted, rows, torch.full_like(lengths, place), columns)
        masses[:, place] = beyond.sum(-1)
    masses = columns.combined(masses)
    count = accepted_prefix(weights, masses, _acceptance_noise(rows, state), lengths)
    return count, weights.gather(-1, count.unsqueeze(-1)).squeeze(-1)


def _acceptance_noise(rows: SampleRows, state: SamplingSlots) -> Tensor:
    """[R, K] float32: a uniform number for each draft token."""
    column = torch.arange(rows.max_draft_tokens, device=rows.slots.device)
    slots = rows.slots.repeat_interleave(rows.max_draft_tokens)
    keys = _keys(state, slots, (rows.positions.unsqueeze(-1) + column).view(-1))
    return uniform(keys, Purpose.ACCEPT).view(rows.draft_tokens.shape)


def _accept_synthetic(rows: SampleRows, state: SamplingSlots, rates: Tensor) -> Tensor:
    """[R, K] bool: accepted at random with the benchmark's rates."""
    return (_acceptance_noise(rows, state) < rates) & rows.draft_mask()


def _is_accepted(u: Tensor, p: Tensor, q: Tensor) -> Tensor:
    # Strict, so that p = 0 is refused even where u or q is 0.
    return u * q < p


def _draft_probability(rows: SampleRows, drafted: Tensor) -> Tensor:
    """[R, K] float32: q of each of `drafted` [R, K]; 1 for one-hot drafts."""
    if rows.draft_probs is None or rows.max_draft_tokens == 0:
        return torch.ones_like(drafted, dtype=torch.float32)
    if rows.draft_chances is not None:
        return torch.where(_certain_places(rows), 1.0, rows.draft_chances)
    index = drafted
    if rows.draft_vocabulary is not None:
        index = torch.searchsorted(rows.draft_vocabulary, drafted)
    known = index < rows.draft_probs.shape[-1]
    index = torch.where(known, index, 0).unsqueeze(-1)
    probability = rows.draft_probs.gather(-1, index).squeeze(-1) * known
    return torch.where(_certain_places(rows), 1.0, probability)


def _certain_places(rows: SampleRows) -> Tensor:
    """[R, K] or [R, 1] bool: which draft tokens were not sampled (one-hot)."""
    one_hot = rows.one_hot.unsqueeze(-1)
    return one_hot if rows.certain is None else one_hot | rows.certain


def _sample_last(
    target: Tensor,
    rows: SampleRows,
    num_accepted: Tensor,
    weight: Tensor | None,
    state: SamplingSlots,
    fp64: bool,
    columns: Columns,
) -> Tensor:
    """[R] int64: the recovered token if a draft token was refused, else the bonus token.

    This is the only place with noise over the vocabulary, for one row per request.

    Args:
        weight: [R], weights of the accepted prefixes in block verification; None: all 1.
    """
    target = target[rows.first_row + num_accepted]  # [R, v]
    refused = _refused_token(rows, num_accepted)
    is_refused = refused >= 0
    weights = target
    if rows.max_draft_tokens:
        place = num_accepted.clamp_max(rows.max_draft_tokens - 1)
        weighted = target if weight is None else target * weight.unsqueeze(-1)
        residual = _beyond_draft(weighted, rows, place, columns)
        # If p and q are equal up to rounding, the residual is empty, and p is as good.
        usable = is_refused.unsqueeze(-1) & (columns.total(residual) > 0)
        weights = torch.where(usable, residual, target)
    keys = _keys(state, rows.slots, rows.positions + num_accepted)
    purpose = torch.where(is_refused, int(Purpose.RESIDUAL), int(Purpose.TARGET))
    return _sample(weights, keys, purpose, fp64, columns=columns)


def _beyond_draft(target: Tensor, rows: SampleRows, place: Tensor, columns: Columns) -> Tensor:
    """[R, v]: max(p - q, 0) of the target's distribution p [R, v] and the distribution q of the
    draft token at `place` [R]."""
    at = place.unsqueeze(-1)
    certain = _certain_places(rows).expand(rows.draft_tokens.shape).gather(-1, at).squeeze(-1)
    token = rows.draft_tokens.gather(-1, at).squeeze(-1)
    one_hot_token = torch.where(certain, token, PADDING)
    draft, vocabulary = _last_draft_probs(rows, place, certain), rows.draft_vocabulary
    if draft is not None and rows.draft_chances is not None:
        vocabulary = None if vocabulary is None else columns.own(vocabulary, draft)
    elif draft is not None and vocabulary is None:
        draft = columns.own(draft, target)
    return _residual(target, draft, vocabulary, one_hot_token, columns)


def _refused_token(rows: SampleRows, num_accepted: Tensor) -> Tensor:
    """[R] int64: the first draft token that was refused; -1 if none was."""
    drafted = torch.where(rows.draft_mask(), rows.draft_tokens, PADDING)
    return pad(drafted, (0, 1), value=PADDING).gather(-1, num_accepted.unsqueeze(-1)).squeeze(-1)


def _last_draft_probs(rows: SampleRows, place: Tensor, certain: Tensor) -> Tensor | None:
    """[R, Vq]: the distribution of the draft token at this place; zeros if it was not sampled."""
    if rows.draft_probs is None:
        return None
    batch = torch.arange(rows.num_requests, device=place.device)
    return rows.draft_probs[batch, place].masked_fill_(certain.unsqueeze(-1), 0.0)


def _residual(
    target: Tensor,
    draft: Tensor | None,
    vocabulary: Tensor | None,
    one_hot_token: Tensor,
    columns: Columns,
) -> Tensor:
    """The residual max(p - q, 0), not normalised, [R, v].

    Args:
        target: [R, v], p.
        draft: [R, Vq], q of sampled drafts, or None; tokens without a column have q = 0. Without
            a vocabulary its columns are those of the target.
        vocabulary: [Vq], token ids of its columns; None: 0 to Vq - 1.
        one_hot_token: [R] int64, the token of one-hot drafts; -1 for others.
    """
    residual = target.clone()
    if draft is not None and vocabulary is not None:
        places, is_own = columns.places(vocabulary, target)
        draft = draft.masked_fill(~is_own, 0.0)
        residual.index_add_(-1, places, draft, alpha=-1).clamp_min_(0.0)
    elif draft is not None:
        width = min(draft.shape[-1], target.shape[-1])
        residual[:, :width] -= draft[:, :width]
        residual.clamp_min_(0.0)
    place, removed = columns.places(one_hot_token.unsqueeze(-1), target)
    kept = residual.gather(-1, place).masked_fill_(removed, 0.0)
    return residual.scatter_(-1, place, kept)


def _sample(
    weights: Tensor,
    keys: NoiseKeys,
    purpose: Purpose | Tensor,
    fp64: bool = False,
    tokens: Tensor | None = None,
    columns: Columns = ALL_COLUMNS,
) -> Tensor:
    """[n] int64: sample a token from each row of weights [n, v] (Gumbel-max); never of weight 0.
    `tokens` [v] are the token ids for the noise, if they differ from the column numbers."""
    if tokens is None and columns.gather is not None:
        tokens = columns.tokens(weights)
    noise = gumbel(keys, purpose, weights.shape[-1], fp64, tokens)
    return columns.best(noise.add_(weights.to(noise.dtype).log()))


def _accepted_prefix(accepted: Tensor) -> Tensor:
    """[R] int64: the number of leading True in each row of [R, K]."""
    return accepted.to(torch.int64).cumprod(-1).sum(-1)


def _token_ids(rows: SampleRows, num_accepted: Tensor, last_token: Tensor) -> Tensor:
    """[R, K + 1]: accepted draft tokens, then `last_token` [R], then padding."""
    column = torch.arange(rows.max_draft_tokens + 1, device=num_accepted.device)
    count = num_accepted.unsqueeze(-1)
    drafted = pad(rows.draft_tokens, (0, 1), value=PADDING)
    rest = torch.where(column == count, last_token.unsqueeze(-1), PADDING)
    return torch.where(column < count, drafted, rest)


SAMPLING = SamplingOps(verify=verify, draft=draft, commit=commit)
FP64_SAMPLING = SamplingOps(partial(verify, fp64=True), partial(draft, fp64=True), commit)


def with_columns(columns: Columns, ops: SamplingOps) -> SamplingOps:
    """Replace verification and drafting of `ops` by versions for a rank's columns."""
    fp64 = ops is FP64_SAMPLING
    return replace(
        ops,
        verify=partial(verify, fp64=fp64, columns=columns),
        draft_shares=partial(draft, fp64=fp64, columns=columns),
    )
