"""What leaves the verifier has exactly the target's distribution, within a step and across steps.

Target and drafter are tables: logits of the next token given the last one. A loop like the
engine's drafts, verifies and commits for thousands of requests at once; the counts of what came
out are compared (chi-square) with the exact distribution, which an oracle in numpy works out from
the table and the sampling parameters. The same statistics must find verifiers that are broken.

Where there is a GPU all of it runs there, by the fused kernels; the broken verifiers are plain
torch everywhere.
"""

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from slipstream.core.request import Request, derive_seed
from slipstream.core.sampling_params import SamplingParams, Verification
from slipstream.kernels.reference import sampling as reference
from slipstream.kernels.reference.block_verification import accepted_prefix
from slipstream.kernels.reference.noise import Purpose, gumbel
from slipstream.kernels.sampling import SampleRows, SamplingOps
from slipstream.sampling import verification
from slipstream.sampling.state import SamplingState

VOCAB = 8
LENGTH = 3  # output tokens that are looked at
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_REQUESTS = 2048  # at once: to make them takes longer than another round
NUM_ROUNDS = 32  # with other seeds: 65,536 samples, in which every broken verifier is found
NUM_ROUNDS_IN_FULL = 100
FEW_ROUNDS = 4  # in which most of them are
PROMPT = (2, 5)
LEAST_EXPECTED = 5.0  # cells that expect less are taken together

Floats = npt.NDArray[np.float64]
Alter = Callable[[Tensor, Tensor], Tensor]


def tables() -> tuple[Tensor, Tensor]:
    """Distributions of target and drafter, [last token, next token] float32: similar, not equal."""
    generator = torch.Generator().manual_seed(17)
    target = torch.randn(VOCAB, VOCAB, generator=generator) * 1.2
    draft = target * 0.6 + torch.randn(VOCAB, VOCAB, generator=generator) * 0.7
    return target.to(DEVICE), draft.to(DEVICE)


TARGET, DRAFT = tables()
SOME_TOKENS = torch.tensor([0, 2, 3, 5, 7], device=DEVICE)


@dataclass(frozen=True)
class Case:
    """One way to sample and to draft."""

    num_draft_tokens: int
    params: dict[str, Any] = field(default_factory=dict)
    one_hot: bool = False
    ragged: bool = False  # a request's draft is as long as its number says, 0 to K
    uniform_rows: bool = False
    fp64: bool = False
    reduced: bool = False  # the drafter knows SOME_TOKENS alone
    # Where a chain ends: [R], before a token, by its distribution [R, Vq] and its column [R].
    stop: Callable[[Tensor, Tensor], Tensor] | None = None
    verification: Verification = Verification.REJECTION
    alter: Alter | None = None  # changes draft tokens behind the verifier's back
    ops: SamplingOps | None = None  # in place of those of the device

    def lengths(self) -> list[int]:
        k = self.num_draft_tokens
        return [index % (k + 1) if self.ragged else k for index in range(NUM_REQUESTS)]


# The exact distribution


def oracle(logits: Floats, params: SamplingParams, context: Sequence[int]) -> Floats:
    """[V], what a token after `context` (prompt and output) is sampled from."""
    logits = logits.copy()
    counts = Counter(context[len(PROMPT) :])
    for token in set(context):
        factor = params.repetition_penalty
        logits[token] *= 1 / factor if logits[token] > 0 else factor
    for token, count in counts.items():
        logits[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    p = np.exp((logits - logits.max()) / params.temperature)
    p[p < params.min_p] = 0  # here the largest is still 1
    if params.top_k > 0:
        p[p < np.sort(p)[-params.top_k]] = 0
    ordered = np.sort(p)[::-1]
    reached = np.cumsum(ordered) >= np.float64(np.float32(params.top_p)) * p.sum()
    if params.top_p < 1:
        p[p < ordered[np.argmax(reached)]] = 0
    return p / p.sum()


def exact_conditionals(params: SamplingParams, length: int) -> list[Floats]:
    """For n = 0..length: the distributions [V] * n + [V] of the next token after the first n."""
    found = []
    logits = TARGET.double().cpu().numpy()
    if not any(getattr(params, name) != neutral for name, neutral in NO_PENALTIES.items()):
        # Nothing but the last token counts.
        by_last = np.stack([oracle(row, params, PROMPT) for row in logits])
        found = [by_last[PROMPT[-1]], by_last]
        return found + [np.broadcast_to(by_last, [VOCAB] * (n + 1)) for n in range(2, length + 1)]
    for n in range(length + 1):
        table = np.zeros([VOCAB] * (n + 1))
        for prefix in product(range(VOCAB), repeat=n):
            context = (*PROMPT, *prefix)
            table[prefix] = oracle(logits[context[-1]], params, context)
        found.append(table)
    return found


# The loop


@dataclass(frozen=True)
class Emitted:
    """The tokens that were sampled.

    Attributes:
        tokens: [M, LENGTH] int64, the first output tokens.
        first_step: [M] int64, how many tokens the first step gave.
        after: [M, 1 + K + 1] int64: the tokens of the first step, and after them the one that the
            second step began with.
        accepted: how many first draft tokens were accepted, of `drafted`.
    """

    tokens: Tensor
    first_step: Tensor
    after: Tensor
    accepted: int
    drafted: int


def requests(
    params: dict[str, Any],
    fp64: bool = False,
    verification: Verification = Verification.REJECTION,
) -> SamplingState:
    state = SamplingState(NUM_REQUESTS, VOCAB, DEVICE, fp64)
    chosen = SamplingParams(**params)
    admitted: dict[int, Request] = {}
    for slot in range(NUM_REQUESTS):
        request = Request(str(slot), list(PROMPT), chosen, 0, frozenset(), 100, 3, slot)
        request.verification = verification
        admitted[slot] = request
    state.admit(admitted)
    return state


def restart(state: SamplingState, number: int) -> None:
    """Start all requests again, with other seeds."""
    state.seeds.copy_(seeds_of_round(number, len(state.seeds)))
    state.steps.zero_()
    state.num_output_tokens.zero_()
    if state.output_counts is not None:
        state.output_counts.zero_()


@cache
def seeds_of_round(number: int, count: int) -> Tensor:
    seeds = [derive_seed(number, 1 + slot) for slot in range(count)]
    return torch.tensor(np.array(seeds, dtype=np.uint64).view(np.int64))


def propose(
    case: Case, state: SamplingState, last: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draft tokens [R, K], their numbers [R] and their probabilities [R, K, Vq]."""
    slots = torch.arange(NUM_REQUESTS, device=DEVICE)
    lengths = torch.tensor(case.lengths(), device=DEVICE)
    tokens = slots.new_empty(NUM_REQUESTS, case.num_draft_tokens)
    table = DRAFT[:, SOME_TOKENS] if case.reduced else DRAFT
    width = table.shape[1]
    probs = None if case.one_hot else torch.empty(*tokens.shape, width, device=DEVICE)
    for index in range(case.num_draft_tokens):
        logits = table[tokens[:, index - 1] if index else last]
        picked = verification.sample_draft(
            logits,
            slots,
            positions + index,
            state,
            state.uses([0]),
            width,
            greedy_only=case.one_hot,
            probs_out=None if probs is None else probs[:, index],
            vocabulary=SOME_TOKENS if case.reduced else None,
        )
        if case.stop is not None:
            stopped = case.stop(logits.softmax(-1), picked)
            lengths = torch.where(stopped, lengths.clamp_max(index), lengths)
        picked = case.alter(picked, logits) if case.alter else picked
        tokens[:, index] = SOME_TOKENS[picked] if case.reduced else picked
    return tokens, lengths, probs


def step(case: Case, state: SamplingState, last: Tensor, positions: Tensor) -> verification.Verdict:
    drafted, lengths, probs = propose(case, state, last, positions)
    rows = SampleRows.build(
        torch.arange(NUM_REQUESTS, device=DEVICE),
        positions,
        drafted,
        lengths,
        torch.full((NUM_REQUESTS,), case.one_hot, device=DEVICE),
        probs,
        SOME_TOKENS if case.reduced and probs is not None else None,
        num_rows=None if case.uniform_rows else int(lengths.sum()) + NUM_REQUESTS,
    )
    inputs = torch.cat((last.unsqueeze(1), drafted), 1)[rows.request, rows.offset]
    uses = state.uses([0])  # all requests are alike
    verdict = verification.verify(TARGET[inputs], rows, state, uses)
    state.commit(rows.slots, verdict.token_ids, verdict.num_tokens, uses)
    return verdict


def run_round(case: Case, state: SamplingState) -> Emitted:
    slots = torch.arange(NUM_REQUESTS, device=DEVICE)
    width = case.num_draft_tokens + 1
    tokens = torch.full((NUM_REQUESTS, LENGTH + 2 * width), -1, device=DEVICE)
    length = torch.zeros(NUM_REQUESTS, dtype=torch.int64, device=DEVICE)
    last = torch.full((NUM_REQUESTS,), PROMPT[-1], device=DEVICE)
    verdicts: list[Any] = []
    while len(verdicts) < 2 or int(length.min()) < LENGTH:
        verdict = step(case, state, last, length + len(PROMPT))
        # A request far ahead of the slowest one writes in the last columns, which nobody reads.
        places = length.unsqueeze(1) + torch.arange(width, device=DEVICE)
        tokens.scatter_(1, places.clamp_max(tokens.shape[1] - 1), verdict.token_ids)
        last = verdict.token_ids[slots, verdict.num_tokens - 1]
        length += verdict.num_tokens
        verdicts.append(verdict)
    return Emitted(
        tokens=tokens[:, :LENGTH].cpu(),
        first_step=verdicts[0].num_tokens.cpu(),
        after=tokens[:, : width + 1].cpu(),
        accepted=int((verdicts[0].num_accepted > 0).sum()),
        drafted=sum(length > 0 for length in case.lengths()),
    )


def run(case: Case, num_rounds: int) -> Emitted:
    state = requests(case.params, case.fp64, case.verification)
    if case.ops is not None:
        state.ops = case.ops
    rounds = []
    for number in range(num_rounds):
        restart(state, number)
        rounds.append(run_round(case, state))
    return Emitted(
        tokens=torch.cat([emitted.tokens for emitted in rounds]),
        first_step=torch.cat([emitted.first_step for emitted in rounds]),
        after=torch.cat([emitted.after for emitted in rounds]),
        accepted=sum(emitted.accepted for emitted in rounds),
        drafted=sum(emitted.drafted for emitted in rounds),
    )


# The statistics


def chi_square(observed: Floats, expected: Floats) -> tuple[float, int]:
    """(statistic, degrees of freedom) of counts whose total was given."""
    assert observed.sum() == pytest.approx(expected.sum())
    # A token that has no probability came out: nothing else needs to be known.
    if observed[expected == 0].any():
        return float("inf"), 1
    observed, expected = observed[expected > 0], expected[expected > 0]
    small = expected < LEAST_EXPECTED
    if small.any():
        observed = np.append(observed[~small], observed[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    return float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1


def upper_tail(statistic: float, freedom: int) -> float:
    """The probability that a chi-square variable is at least so large."""
    half = torch.tensor([freedom, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1]))


def counts(tokens: Tensor) -> Floats:
    """[M, n] -> [V] * n, how often each n-tuple occurred."""
    n = tokens.shape[1]
    index = (tokens * VOCAB ** torch.arange(n - 1, -1, -1)).sum(-1)
    found = torch.bincount(index, minlength=VOCAB**n).double().numpy()
    return found.reshape([VOCAB] * n)


def joint_p_values(emitted: Emitted, conditionals: list[Floats]) -> Iterator[float]:
    """The first position alone, and pairs of consecutive positions."""
    first = conditionals[0]
    second = first[:, None] * conditionals[1]
    third = second[:, :, None] * conditionals[2]
    total = len(emitted.tokens)
    for tokens, expected in (
        (emitted.tokens[:, :1], first),
        (emitted.tokens[:, :2], second),
        (emitted.tokens[:, 1:3], third.sum(0)),
    ):
        statistic, freedom = chi_square(counts(tokens).ravel(), expected.ravel() * total)
        assert freedom > 0, "nothing is left to chance"
        yield upper_tail(statistic, freedom)


def across_p_value(emitted: Emitted, conditionals: list[Floats]) -> float:
    """The first token of step 2 given all tokens of step 1, and given how many these are.

    Given its past, each token has an exact distribution, so that counts by (tokens in step 1, its
    last token, the token after it) have exact expectations, whatever step 1 did.
    """
    statistic, freedom = 0.0, 0
    for count in emitted.first_step.unique().tolist():
        chosen = emitted.after[emitted.first_step == count][:, : count + 1]
        found = counts(chosen)
        expected = found.sum(-1, keepdims=True) * conditionals[count]
        earlier = tuple(range(found.ndim - 2))  # all but the pair across the border
        observed, expected = found.sum(earlier), expected.sum(earlier)
        for last in range(VOCAB):
            if observed[last].sum() < 50:
                continue
            part, degrees = chi_square(observed[last], expected[last])
            statistic, freedom = statistic + part, freedom + degrees
    return upper_tail(statistic, freedom)


def p_values(case: Case, num_rounds: int) -> tuple[list[float], Emitted]:
    emitted = run(case, num_rounds)
    params = SamplingParams(**case.params)
    conditionals = exact_conditionals(params, max(LENGTH - 1, case.num_draft_tokens + 1))
    values = [*joint_p_values(emitted, conditionals), across_p_value(emitted, conditionals)]
    return values, emitted


NO_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
PENALTIES = {"presence_penalty": 0.6, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
NUCLEUS = {"temperature": 0.7, "top_p": 0.9}
BIAS = {"logit_bias": {1: 1.5, 4: 1.0, 6: -100.0}}


def unsure(probs: Tensor, column: Tensor) -> Tensor:
    """A stop that depends on the distribution of the next token, the most that a stop may know."""
    return probs.amax(-1) < 0.3


BLOCK: dict[str, Any] = {"verification": Verification.BLOCK}
COUPLED: dict[str, Any] = {"verification": Verification.COUPLED}


def unlikely(probs: Tensor, column: Tensor) -> Tensor:
    """Looks at the token that it drops, which coupled drafts allow."""
    return probs.gather(1, column.unsqueeze(1)).squeeze(1) < 0.2


CASES = {
    "plain decoding": Case(0, NUCLEUS),
    "temperature 1, K=1": Case(1),
    "temperature 1, K=2": Case(2),
    "temperature 1, K=3": Case(3),
    "temperature 1, K=3, one-hot": Case(3, one_hot=True),
    "temperature 1, K=3, ragged, fp64": Case(3, ragged=True, fp64=True),
    "temperature 1, K=3, ragged drafts of uniform rows": Case(3, ragged=True, uniform_rows=True),
    "top_p, K=2": Case(2, NUCLEUS),
    "top_p, K=2, one-hot": Case(2, NUCLEUS, one_hot=True),
    "penalties, K=2": Case(2, PENALTIES),
    "penalties, K=2, one-hot, ragged": Case(2, PENALTIES, one_hot=True, ragged=True),
    "logit_bias, K=2": Case(2, BIAS),
    "logit_bias, K=1, one-hot": Case(1, BIAS, one_hot=True),
    "everything, K=2, ragged": Case(
        2, {**PENALTIES, **BIAS, "temperature": 1.4, "top_k": 6, "min_p": 0.02}, ragged=True
    ),
    "block, K=1": Case(1, **BLOCK),
    "block, K=3": Case(3, **BLOCK),
    "block, K=3, one-hot, ragged drafts of uniform rows": Case(
        3, one_hot=True, ragged=True, uniform_rows=True, **BLOCK
    ),
    "block, K=3, reduced, ragged": Case(3, reduced=True, ragged=True, **BLOCK),
    "block, K=5, stopped": Case(5, stop=unsure, **BLOCK),
    "block, K=2, penalties, top_p": Case(2, {**PENALTIES, **NUCLEUS}, **BLOCK),
    "coupled, K=3, ragged": Case(3, ragged=True, **COUPLED),
    "coupled, K=2, one-hot": Case(2, one_hot=True, **COUPLED),
    "coupled, K=2, reduced": Case(2, reduced=True, **COUPLED),
    "coupled, K=3, stopped by what is dropped": Case(3, stop=unlikely, **COUPLED),
    "coupled, K=2, penalties, top_p": Case(2, {**PENALTIES, **NUCLEUS}, **COUPLED),
}


def acceptance(case: Case) -> float:
    """The exact probability that a first draft token is accepted."""
    params = SamplingParams(**case.params)
    last = PROMPT[-1]
    p = oracle(TARGET[last].double().cpu().numpy(), params, PROMPT)
    draft = DRAFT[last].double().cpu().numpy()
    if case.reduced:
        draft[np.setdiff1d(np.arange(VOCAB), SOME_TOKENS.cpu().numpy())] = -np.inf
    if case.one_hot:
        return float(p[draft.argmax()])
    # The drafter applies temperature and truncation, but no processors.
    names = ("temperature", "top_k", "top_p", "min_p")
    truncated = SamplingParams(**{name: getattr(params, name) for name in names})
    q = oracle(draft, truncated, PROMPT)
    if case.verification is not Verification.COUPLED:
        return float(np.minimum(p, q).sum())
    # Of two races over the same numbers, token x wins both when its number is below those of all
    # others y times max(p(x) / p(y), q(x) / q(y)).
    both = [x for x in range(VOCAB) if p[x] > 0 and q[x] > 0]
    rate = float(sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in both))
    distance = 1 - np.minimum(p, q).sum()
    assert (1 - distance) / (1 + distance) - 1e-9 <= rate <= 1 - distance + 1e-9
    return rate


# Others have more draft tokens, and no less of anything else.
LESS_TRIED = (
    *("temperature 1, K=1", "temperature 1, K=2", "block, K=1"),
    *("top_p, K=2, one-hot", "logit_bias, K=1, one-hot"),
)


@pytest.mark.parametrize(
    "rounds", [NUM_ROUNDS, pytest.param(NUM_ROUNDS_IN_FULL, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(it, marks=pytest.mark.full) if it in LESS_TRIED else it for it in CASES],
)
def test_lossless(name: str, rounds: int) -> None:
    case = CASES[name]
    values, emitted = p_values(case, rounds)
    if emitted.drafted and case.stop is not unlikely:  # to refuse every draft would be lossless too
        rate = acceptance(case)
        error = (rate * (1 - rate) / emitted.drafted) ** 0.5
        assert emitted.accepted / emitted.drafted == pytest.approx(rate, abs=5 * error + 1e-9)
    assert min(values) > 0.001, values


@pytest.mark.full  # these kernels give the tokens of the reference (tests/kernels)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs every case by these kernels")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
def test_interpreted_kernels_on_a_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.kernels.triton import sampling as fused

    monkeypatch.setattr(fused, "TILES", fused.SamplingTiles(block=16, group=16))
    monkeypatch.setattr(sys.modules[__name__], "NUM_REQUESTS", 40)
    case = Case(1, ops=fused.SAMPLING)
    emitted = run(case, 1)
    first, second = exact_conditionals(SamplingParams(), 1)
    # Too few for pairs: each position by itself.
    for place, expected in enumerate((first, first @ second)):
        found = counts(emitted.tokens[:, place : place + 1])
        statistic, freedom = chi_square(found, expected * len(emitted.tokens))
        assert freedom > 1
        assert upper_tail(statistic, freedom) > 0.001
    assert 0 < emitted.accepted < emitted.drafted


# Verifiers that are broken


def accept_always(monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(reference, "_is_accepted", lambda u, p, q: torch.ones_like(p) > 0)
    return Case(1)


def share_noise(monkeypatch: pytest.MonkeyPatch) -> Case:
    """The residual is sampled with the noise that the draft token was sampled with."""

    def shared(keys: Any, purpose: Any, vocab_size: int, *how: Any) -> Tensor:
        if isinstance(purpose, Tensor):
            purpose = torch.where(purpose == Purpose.RESIDUAL, int(Purpose.DRAFT), purpose)
        return gumbel(keys, purpose, vocab_size, *how)

    monkeypatch.setattr(reference, "_is_accepted", lambda u, p, q: u <= p / q)
    monkeypatch.setattr(reference, "gumbel", shared)
    return Case(1)


def sample_target_after_refusal(monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(reference, "_residual", lambda target, *_: target)
    return Case(2)


def sample_target_after_one_hot_refusal(monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(reference, "_residual", lambda target, *_: target)
    return Case(2, one_hot=True)


def alter_the_draft(monkeypatch: pytest.MonkeyPatch) -> Case:
    """The tokens are not samples of the stored q."""
    return Case(2, alter=lambda tokens, logits: logits.argmax(-1))


def draft_at_another_temperature(monkeypatch: pytest.MonkeyPatch) -> Case:
    """The tokens are samples, of a distribution that is not quite the stored one."""
    generator = torch.Generator().manual_seed(0)

    def resample(tokens: Tensor, logits: Tensor) -> Tensor:
        weights = (logits / 0.8).softmax(-1).cpu()
        return torch.multinomial(weights, 1, generator=generator).squeeze(1).to(DEVICE)

    return Case(1, alter=resample)


def forget_the_drafted_prefix(monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(
        "slipstream.kernels.reference.processors._count_drafted_prefix", lambda *given: None
    )
    return Case(2, PENALTIES)


def forget_the_weight(monkeypatch: pytest.MonkeyPatch) -> Case:
    """Sample the token after the accepted prefix of a block as after a rejected token."""
    judge = reference._accept_block

    def unweighted(*args: Any) -> tuple[Tensor, Tensor]:
        count, weight = judge(*args)
        return count, torch.ones_like(weight)

    monkeypatch.setattr(reference, "_accept_block", unweighted)
    return Case(3, **BLOCK)


def judge_prefixes_by_weight(monkeypatch: pytest.MonkeyPatch) -> Case:
    """Verify each prefix of a block as if it were the whole block."""
    judge = accepted_prefix
    monkeypatch.setattr(
        reference, "accepted_prefix", lambda weights, masses, *rest: judge(weights, weights, *rest)
    )
    return Case(3, **BLOCK)


def forget_the_step(monkeypatch: pytest.MonkeyPatch) -> Case:
    """Numbers that refused longer prefixes of a block come again in the next step."""
    keys = reference._keys

    def without_step(*args: Any) -> Any:
        found = keys(*args)
        return replace(found, steps=torch.zeros_like(found.steps))

    monkeypatch.setattr(reference, "_keys", without_step)
    return Case(3, **BLOCK)


def stop_before_unlikely_tokens(monkeypatch: pytest.MonkeyPatch) -> Case:
    """A chain ends by the token that it drops, not only by the distribution of that."""
    return Case(3, stop=unlikely, **BLOCK)


def share_noise_between_places(monkeypatch: pytest.MonkeyPatch) -> Case:
    """Two places of a coupled request have the same numbers."""

    def shared(keys: Any, *rest: Any) -> Tensor:
        return gumbel(replace(keys, positions=keys.positions // 2), *rest)

    monkeypatch.setattr(reference, "gumbel", shared)
    return Case(2, **COUPLED)


@pytest.mark.parametrize(
    "broken",
    [
        accept_always,
        share_noise,
        sample_target_after_refusal,
        sample_target_after_one_hot_refusal,
        alter_the_draft,
        draft_at_another_temperature,
        forget_the_drafted_prefix,
        forget_the_weight,
        judge_prefixes_by_weight,
        forget_the_step,
        stop_before_unlikely_tokens,
        share_noise_between_places,
    ],
)
def test_broken_verifiers_are_found(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], Case]
) -> None:
    case = replace(broken(monkeypatch), ops=reference.SAMPLING)
    values, _ = p_values(case, FEW_ROUNDS)
    if min(values) >= 1e-6:
        values, _ = p_values(case, NUM_ROUNDS)
    assert min(values) < 1e-6, values
