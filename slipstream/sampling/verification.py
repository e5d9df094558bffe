"""Which draft tokens the target accepts, and the one token that it adds.

Speculative sampling (Leviathan et al. 2023; Chen et al. 2023): with p the target's distribution
and q the one that the draft token x was sampled from, x is accepted with probability
min(1, p(x) / q(x)); after the first refusal a token is sampled from max(p - q, 0), scaled to 1.
What leaves has exactly the distribution p. Plain decoding is the verification of an empty draft.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.kernels.sampling_table import Needs, sampling_ops_for
from slipstream.sampling.logits import allow_next, ban_words, probabilities, process
from slipstream.sampling.noise import NoiseKeys, Purpose, gumbel, uniform
from slipstream.sampling.rows import SampleRows
from slipstream.sampling.state import SamplingState, Uses

PADDING = -1


@dataclass(frozen=True, eq=False)
class Verdict:
    """What a step gave its requests.

    Attributes:
        token_ids: [R, K+1] int64: accepted draft tokens, then one bonus or recovered token,
            then -1.
        num_tokens: [R] int64, `num_accepted` + 1.
        num_accepted: [R] int64, accepted draft tokens.
        path: [R, W] int64, which of a request's rows gave each token, where drafts are trees; what
            stands behind `num_tokens` means nothing. None: its first rows, in their order.
    """

    token_ids: Tensor
    num_tokens: Tensor
    num_accepted: Tensor
    path: Tensor | None = None


@dataclass(frozen=True)
class Verification:
    """How drafts are judged.

    Attributes:
        use_fp64_gumbel: sample with 63-bit noise and float64 logarithms.
        synthetic_rates: for benchmarks only: the chance that each position is accepted when all
            before it were, whatever the target says (`synthetic.py`); None judges by the target.
    """

    use_fp64_gumbel: bool = False
    synthetic_rates: tuple[float, ...] | None = None


LOSSLESS = Verification()


def verify(
    logits: Tensor,
    rows: SampleRows,
    state: SamplingState,
    uses: frozenset[Uses],
    how: Verification = LOSSLESS,
) -> Verdict:
    """Judge every request's draft, greedy and sampled requests side by side.

    Greedy requests (temperature 0) accept while the draft token is the argmax. Nothing here
    changes the state: `SamplingState.commit` takes the verdict over. What a request gets does not
    depend on the others, nor on whether rows are ragged or uniform.

    Args:
        logits: [N, V] float32, the target's raw logits.
        rows: whose rows these are, and the drafts.
        state: parameters, seeds and step counters of the requests.
        uses: of these requests; with `Uses.BAD_WORDS` the host waits for the device, else never.
        how: exactly, unless a benchmark says otherwise.

    Returns:
        The verdict for the R requests of `rows`.
    """
    ops = sampling_ops_for(state.device)
    if ops is not None and not how.use_fp64_gumbel:
        if Uses.BAD_WORDS in uses:  # first instead of last: nothing undoes them
            logits = ban_words(logits, rows, state)
        rates = (how.synthetic_rates or ())[: rows.max_draft_tokens]
        found = ops.verify(logits, rows.judged(), state.tensors(), _needs(uses), rates)
        return Verdict(*found)
    logits = process(logits, rows, state, uses)
    choice = logits.argmax(-1)  # [N]
    accepted = rows.draft_mask() & (rows.draft_tokens == choice[rows.draft_rows()])
    is_sampled = state.temperature[rows.slots] > 0
    target = None
    if Uses.SAMPLING in uses:
        target = _distribution(logits, rows.row_slots, state, uses)
        by_chance = _accept(target, rows, state)
        accepted = torch.where(is_sampled.unsqueeze(-1), by_chance, accepted)
    if how.synthetic_rates is not None:
        accepted = _accept_synthetic(rows, state, how.synthetic_rates)
    num_accepted = _accepted_prefix(accepted)
    last_token = choice[rows.first_row + num_accepted]
    if target is not None:
        drawn = _sample_last(target, rows, num_accepted, state, how.use_fp64_gumbel)
        last_token = torch.where(is_sampled, drawn, last_token)
    return _verdict(rows, num_accepted, last_token)


def sample_draft(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    state: SamplingState,
    uses: frozenset[Uses],
    num_legal_tokens: int,
    greedy_only: bool = False,
    use_fp64_gumbel: bool = False,
    probs_out: Tensor | None = None,
    vocabulary: Tensor | None = None,
) -> Tensor:
    """Sample one draft token for each request.

    Requests with a temperature are sampled from their temperature, min_p, top_k and top_p (but
    without processors: the target corrects for those) with noise of their own; greedy ones take
    the argmax.

    Args:
        logits: [R, V] of the drafter, any float dtype.
        slots: [R] int64.
        positions: [R] int64, of the tokens to be drafted.
        uses: of these requests.
        num_legal_tokens: ids from here on are padding and are never drafted.
        greedy_only: the argmax for all requests.
        use_fp64_gumbel: sample with 63-bit noise and float64 logarithms.
        probs_out: [R, min(V, num_legal_tokens)] float32, of any row stride: receives the very
            numbers that the tokens were sampled from; zeros for greedy requests. It is given when
            any request is sampled, and only then.
        vocabulary: [V] int64, the token ids of the columns of `logits`; None for those from 0 on.

    Returns:
        [R] int64, columns.
    """
    logits = allow_next(logits, slots, positions, state, uses, vocabulary)
    is_plain = greedy_only or Uses.SAMPLING not in uses
    assert (probs_out is None) == is_plain, "probs_out belongs to batches that are sampled"
    ops = sampling_ops_for(state.device)
    if ops is not None and not use_fp64_gumbel:
        slot_tensors, needs = state.tensors(), _needs(uses)
        return ops.draft(logits, slots, positions, slot_tensors, needs, num_legal_tokens, probs_out)
    logits = logits[:, :num_legal_tokens].float()
    choice = logits.argmax(-1)
    if probs_out is None:
        return choice
    is_sampled = state.temperature[slots] > 0
    probs = _distribution(logits, slots, state, uses)
    keys = NoiseKeys(state.seeds[slots], positions, state.steps[slots])
    drawn = _sample(probs, keys, Purpose.DRAFT, use_fp64_gumbel)
    probs_out.copy_(torch.where(is_sampled.unsqueeze(-1), probs, 0.0))
    return torch.where(is_sampled, drawn, choice)


@cache
def _needs(uses: frozenset[Uses]) -> Needs:
    return Needs(
        sampling=Uses.SAMPLING in uses,
        top_k=Uses.TOP_K in uses,
        top_p=Uses.TOP_P in uses,
        min_p=Uses.MIN_P in uses,
        penalties=Uses.PENALTIES in uses,
        bias=Uses.BIAS in uses,
        min_tokens=Uses.MIN_TOKENS in uses,
    )


def _distribution(
    logits: Tensor, slots: Tensor, state: SamplingState, uses: frozenset[Uses]
) -> Tensor:
    """[n, V], what rows with these slots [n] are sampled from."""
    return probabilities(
        logits,
        state.temperature[slots],
        state.top_k[slots],
        state.top_p[slots],
        state.min_p[slots],
        uses,
    )


def _accept(target: Tensor, rows: SampleRows, state: SamplingState) -> Tensor:
    """[R, K] bool, whether each draft token, by itself, is accepted under target [N, V]."""
    u = _acceptance_noise(rows, state)
    drafted = rows.draft_tokens
    legal = rows.draft_mask() & (drafted >= 0) & (drafted < target.shape[-1])
    safe = torch.where(legal, drafted, 0)
    return legal & _is_accepted(u, target[rows.draft_rows(), safe], _draft_probability(rows, safe))


def _acceptance_noise(rows: SampleRows, state: SamplingState) -> Tensor:
    """[R, K] float32, a uniform number for every draft token."""
    column = torch.arange(rows.max_draft_tokens, device=rows.slots.device)
    keys = NoiseKeys(
        seeds=state.seeds[rows.slots].repeat_interleave(rows.max_draft_tokens),
        positions=(rows.positions.unsqueeze(-1) + column).view(-1),
        steps=state.steps[rows.slots].repeat_interleave(rows.max_draft_tokens),
    )
    return uniform(keys, Purpose.ACCEPT).view(rows.draft_tokens.shape)


def _accept_synthetic(rows: SampleRows, state: SamplingState, rates: tuple[float, ...]) -> Tensor:
    """[R, K] bool, drawn with the benchmark's rates."""
    noise = _acceptance_noise(rows, state)
    accepted = [column < rate for column, rate in zip(noise.unbind(-1), rates, strict=False)]
    return torch.stack(accepted, -1) & rows.draft_mask() if accepted else noise > 1


def _is_accepted(u: Tensor, p: Tensor, q: Tensor) -> Tensor:
    # Strict, so that p = 0 is refused even where u or q is 0.
    return u * q < p


def _draft_probability(rows: SampleRows, drafted: Tensor) -> Tensor:
    """[R, K] float32, the probability that each of `drafted` [R, K] had; 1 for one-hot drafts."""
    if rows.draft_probs is None or rows.max_draft_tokens == 0:
        return torch.ones_like(drafted, dtype=torch.float32)
    index = drafted
    if rows.draft_vocabulary is not None:
        index = torch.searchsorted(rows.draft_vocabulary, drafted)
    known = index < rows.draft_probs.shape[-1]
    index = torch.where(known, index, 0).unsqueeze(-1)
    probability = rows.draft_probs.gather(-1, index).squeeze(-1) * known
    return torch.where(_certain_places(rows), 1.0, probability)


def _certain_places(rows: SampleRows) -> Tensor:
    """[R, K] or [R, 1] bool, which draft tokens were not sampled."""
    one_hot = rows.one_hot.unsqueeze(-1)
    return one_hot if rows.certain is None else one_hot | rows.certain


def _sample_last(
    target: Tensor, rows: SampleRows, num_accepted: Tensor, state: SamplingState, fp64: bool
) -> Tensor:
    """[R] int64: the recovered token where a draft token was refused, elsewhere the bonus token.

    Only here, on one row a request, is there noise over the vocabulary.
    """
    target = target[rows.first_row + num_accepted]  # [R, V]
    refused = _refused_token(rows, num_accepted)
    is_refused = refused >= 0
    weights = target
    if rows.max_draft_tokens:
        certain = _certain_places(rows).expand(rows.draft_tokens.shape)
        place = num_accepted.clamp_max(rows.max_draft_tokens - 1)
        certain = certain.gather(-1, place.unsqueeze(-1)).squeeze(-1)
        draft = _last_draft_probs(rows, place, certain)
        one_hot_token = torch.where(certain, refused, PADDING)
        residual = _residual(target, draft, rows.draft_vocabulary, one_hot_token)
        # Where p and q are equal up to rounding nothing is left, and p is as good.
        usable = is_refused & (residual.sum(-1) > 0)
        weights = torch.where(usable.unsqueeze(-1), residual, target)
    keys = NoiseKeys(
        state.seeds[rows.slots], rows.positions + num_accepted, state.steps[rows.slots]
    )
    purpose = torch.where(is_refused, int(Purpose.RESIDUAL), int(Purpose.TARGET))
    return _sample(weights, keys, purpose, fp64)


def _refused_token(rows: SampleRows, num_accepted: Tensor) -> Tensor:
    """[R] int64, the first draft token that was not accepted; -1 where there was none."""
    drafted = torch.where(rows.draft_mask(), rows.draft_tokens, PADDING)
    return pad(drafted, (0, 1), value=PADDING).gather(-1, num_accepted.unsqueeze(-1)).squeeze(-1)


def _last_draft_probs(rows: SampleRows, place: Tensor, certain: Tensor) -> Tensor | None:
    """[R, Vq], what the draft token in this place was sampled from; zeros for certain ones."""
    if rows.draft_probs is None:
        return None
    batch = torch.arange(rows.num_requests, device=place.device)
    return rows.draft_probs[batch, place].masked_fill_(certain.unsqueeze(-1), 0.0)


def _residual(
    target: Tensor, draft: Tensor | None, vocabulary: Tensor | None, one_hot_token: Tensor
) -> Tensor:
    """max(p - q, 0), not scaled, [R, V].

    Args:
        target: [R, V], p.
        draft: [R, Vq], q of sampled drafts, or None; where it has no column q is 0.
        vocabulary: [Vq], the token ids of its columns; None for those from 0 on.
        one_hot_token: [R] int64, the token of one-hot drafts, -1 for others.
    """
    residual = target.clone()
    if draft is not None and vocabulary is not None:
        residual.index_add_(-1, vocabulary, draft, alpha=-1).clamp_min_(0.0)
    elif draft is not None:
        width = min(draft.shape[-1], target.shape[-1])
        residual[:, :width] -= draft[:, :width]
        residual.clamp_min_(0.0)
    removed = (one_hot_token >= 0) & (one_hot_token < target.shape[-1])
    index = torch.where(removed, one_hot_token, 0).unsqueeze(-1)
    kept = residual.gather(-1, index).masked_fill_(removed.unsqueeze(-1), 0.0)
    return residual.scatter_(-1, index, kept)


def _sample(
    weights: Tensor, keys: NoiseKeys, purpose: Purpose | Tensor, fp64: bool = False
) -> Tensor:
    """[n] int64, a token for each row of weights [n, V] (Gumbel-max); never one of weight 0."""
    noise = gumbel(keys, purpose, weights.shape[-1], fp64)
    return noise.add_(weights.to(noise.dtype).log()).argmax(-1)


def _accepted_prefix(accepted: Tensor) -> Tensor:
    """[R] int64, how many leading True there are in each row of [R, K]."""
    return accepted.to(torch.int64).cumprod(-1).sum(-1)


def _verdict(rows: SampleRows, num_accepted: Tensor, last_token: Tensor) -> Verdict:
    column = torch.arange(rows.max_draft_tokens + 1, device=num_accepted.device)
    count = num_accepted.unsqueeze(-1)
    drafted = pad(rows.draft_tokens, (0, 1), value=PADDING)
    behind = torch.where(column == count, last_token.unsqueeze(-1), PADDING)
    return Verdict(
        token_ids=torch.where(column < count, drafted, behind),
        num_tokens=num_accepted + 1,
        num_accepted=num_accepted,
    )
