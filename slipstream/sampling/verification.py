"""Which draft tokens the target accepts, and the one token that it adds.

Speculative sampling (Leviathan et al. 2023; Chen et al. 2023): with p the target's distribution
and q the one that the draft token x was sampled from, x is accepted with probability
min(1, p(x) / q(x)); after the first refusal a token is sampled from max(p - q, 0), scaled to 1.
What leaves has exactly the distribution p. Plain decoding is the verification of an empty draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.sampling.logits import Truncation, probabilities, process
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
    """

    token_ids: Tensor
    num_tokens: Tensor
    num_accepted: Tensor


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
    logits: Tensor, rows: SampleRows, state: SamplingState, how: Verification = LOSSLESS
) -> Verdict:
    """Judge every request's draft, greedy and sampled requests side by side.

    Greedy requests (temperature 0) accept while the draft token is the argmax. Nothing here
    changes the state: `SamplingState.commit` takes the verdict over.

    Args:
        logits: [N, V] float32, the target's raw logits.
        rows: whose rows these are, and the drafts.
        state: parameters, seeds and step counters of the requests.
        how: exactly, unless a benchmark says otherwise.

    Returns:
        The verdict for the R requests of `rows`.
    """
    logits = process(logits, rows, state)
    sampled = state.users(rows.host_slots, Uses.SAMPLING)
    if not sampled:
        return _verify_greedy(logits, rows, state, how)
    if len(sampled) == rows.num_requests:
        return _verify_sampled(logits, rows, state, how)
    greedy = sorted(set(range(rows.num_requests)) - set(sampled))
    return _interleave(
        _verify_greedy(logits[rows.rows_of(greedy)], rows.select(greedy), state, how),
        _verify_sampled(logits[rows.rows_of(sampled)], rows.select(sampled), state, how),
        torch.tensor(greedy + sampled, dtype=torch.int64, device=logits.device),
    )


def sample_draft(
    logits: Tensor,
    slots: Tensor,
    host_slots: Sequence[int],
    positions: Tensor,
    state: SamplingState,
    num_legal_tokens: int,
    greedy_only: bool = False,
    use_fp64_gumbel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Sample one draft token for each request.

    Requests with a temperature are sampled from their temperature, min_p, top_k and top_p (but
    without processors: the target corrects for those) with noise of their own; greedy ones take
    the argmax.

    Args:
        logits: [R, V] of the drafter, any float dtype.
        slots: [R] int64, and the same on the host.
        positions: [R] int64, of the tokens to be drafted.
        num_legal_tokens: ids from here on are padding and are never drafted.
        greedy_only: the argmax for all requests.
        use_fp64_gumbel: sample with 63-bit noise and float64 logarithms.
        use_fp64_gumbel: as in `verify`.

    Returns:
        tokens: [R] int64.
        probs: [R, min(V, num_legal_tokens)] float32, the very numbers that the tokens were sampled
            from; zeros for greedy requests, None when all are.
    """
    logits = logits[:, :num_legal_tokens].float()
    sampled = [] if greedy_only else state.users(host_slots, Uses.SAMPLING)
    if not sampled:
        return logits.argmax(-1), None
    if len(sampled) == len(host_slots):
        return _sample_draft(logits, slots, host_slots, positions, state, use_fp64_gumbel)
    index = torch.tensor(sampled, dtype=torch.int64, device=logits.device)
    tokens, probs = logits.argmax(-1), torch.zeros_like(logits)
    tokens[index], probs[index] = _sample_draft(
        logits[index],
        slots[index],
        [host_slots[i] for i in sampled],
        positions[index],
        state,
        use_fp64_gumbel,
    )
    return tokens, probs


def _sample_draft(
    logits: Tensor,
    slots: Tensor,
    host_slots: Sequence[int],
    positions: Tensor,
    state: SamplingState,
    fp64: bool,
) -> tuple[Tensor, Tensor]:
    probs = _distribution(logits, slots, host_slots, state)
    keys = NoiseKeys(state.seeds[slots], positions, state.steps[slots])
    return _sample(probs, keys, Purpose.DRAFT, fp64), probs


def _verify_greedy(
    logits: Tensor, rows: SampleRows, state: SamplingState, how: Verification
) -> Verdict:
    choice = logits.argmax(-1)  # [N]
    if how.synthetic_rates is None:
        accepted = (rows.draft_tokens == choice[rows.draft_rows()]) & rows.draft_mask()
    else:
        accepted = _accept_synthetic(rows, state, how.synthetic_rates)
    num_accepted = _accepted_prefix(accepted)
    return _verdict(rows, num_accepted, choice[rows.first_row + num_accepted])


def _verify_sampled(
    logits: Tensor, rows: SampleRows, state: SamplingState, how: Verification
) -> Verdict:
    target = _distribution(logits, rows.row_slots, rows.host_slots, state)
    accepted = _accept(target, rows, state)
    if how.synthetic_rates is not None:
        accepted = _accept_synthetic(rows, state, how.synthetic_rates)
    num_accepted = _accepted_prefix(accepted)
    last_token = _sample_last(target, rows, num_accepted, state, how.use_fp64_gumbel)
    return _verdict(rows, num_accepted, last_token)


def _distribution(
    logits: Tensor, slots: Tensor, host_slots: Sequence[int], state: SamplingState
) -> Tensor:
    """[n, V], what rows with these slots [n], which all occur in `host_slots`, are sampled from."""
    return probabilities(
        logits,
        state.temperature[slots],
        state.top_k[slots],
        state.top_p[slots],
        state.min_p[slots],
        Truncation.of(state, host_slots),
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
    chances = torch.tensor(rates, device=rows.slots.device)[: rows.max_draft_tokens]
    return (_acceptance_noise(rows, state) < chances) & rows.draft_mask()


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
    return torch.where(rows.one_hot.unsqueeze(-1), 1.0, probability)


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
        draft = _last_draft_probs(rows, num_accepted)
        one_hot_token = torch.where(rows.one_hot, refused, PADDING)
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


def _last_draft_probs(rows: SampleRows, num_accepted: Tensor) -> Tensor | None:
    """[R, Vq], what the first refused draft token was sampled from; zeros for one-hot drafts."""
    if rows.draft_probs is None:
        return None
    batch = torch.arange(rows.num_requests, device=num_accepted.device)
    place = num_accepted.clamp_max(rows.max_draft_tokens - 1)
    return rows.draft_probs[batch, place].masked_fill_(rows.one_hot.unsqueeze(-1), 0.0)


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


def _interleave(first: Verdict, second: Verdict, places: Tensor) -> Verdict:
    """Both verdicts as one; `places` [R] holds the batch index of each of their rows."""

    def merge(a: Tensor, b: Tensor) -> Tensor:
        both = torch.cat((a, b))
        return torch.empty_like(both).index_copy_(0, places, both)

    return Verdict(
        token_ids=merge(first.token_ids, second.token_ids),
        num_tokens=merge(first.num_tokens, second.num_tokens),
        num_accepted=merge(first.num_accepted, second.num_accepted),
    )
