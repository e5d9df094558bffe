"""Logits processors and truncations against a row-by-row oracle in plain Python."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.kernels.reference import thresholds
from slipstream.kernels.reference.processors import probabilities, process
from slipstream.kernels.sampling import SampleRows, SamplingNeeds
from slipstream.sampling.logits import ban_words
from slipstream.sampling.state import SamplingState, Uses
from slipstream.sampling.verification import needs_of

VOCAB = 12
INF = math.inf


def make_request(
    prompt: Sequence[int],
    output: Sequence[int] = (),
    stop: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    seed: int = 0,
    **params: Any,
) -> Request:
    request = Request(
        request_id="request",
        token_ids=list(prompt),
        params=SamplingParams(**params),
        seed=seed,
        stop_token_ids=frozenset(stop),
        max_tokens=100,
        num_speculative_tokens=4,
        arrival=0,
        bad_words=tuple(map(tuple, bad_words)),
    )
    request.token_ids.extend(output)
    return request


def make_batch(
    requests: Sequence[Request], drafts: Sequence[Sequence[int]]
) -> tuple[SamplingState, SampleRows]:
    """The requests in slots that are not their batch indices, with one-hot drafts."""
    state = SamplingState(len(requests) + 2, VOCAB, "cpu")
    slots = [len(requests) - index for index in range(len(requests))]
    for slot, request in zip(slots, requests, strict=True):
        state.admit({slot: request})
    longest = max(map(len, drafts))
    # Garbage after a short draft must not count.
    padded = [[*draft, *[VOCAB - 1] * (longest - len(draft))] for draft in drafts]
    rows = SampleRows.build(
        torch.tensor(slots),
        torch.tensor([request.num_tokens for request in requests]),
        torch.tensor(padded, dtype=torch.int64).view(len(requests), longest),
        torch.tensor([len(draft) for draft in drafts]),
        torch.ones(len(requests), dtype=torch.bool),
        num_rows=sum(map(len, drafts)) + len(drafts),
    )
    return state, rows


def processed(logits: Tensor, rows: SampleRows, state: SamplingState) -> Tensor:
    uses = state.uses(rows.slots.tolist())
    if Uses.BAD_WORDS in uses:
        logits = ban_words(logits, rows, state)
    return process(logits, rows, state.tensors(), needs_of(uses))


def processed_row(logits: list[float], request: Request, draft: Sequence[int]) -> list[float]:
    """The expected result of `process` for the row after `draft`."""
    params = request.params
    output = [*request.output_token_ids, *draft]
    counts = Counter(output)
    seen = {*request.token_ids, *draft}
    out = []
    for token, value in enumerate(logits):
        if token in seen:
            factor = params.repetition_penalty
            value = value / factor if value > 0 else value * factor
        value -= params.frequency_penalty * counts[token]
        value -= params.presence_penalty * (counts[token] > 0)
        value += (params.logit_bias or {}).get(token, 0.0)
        allowed = params.allowed_token_ids
        banned = allowed is not None and token not in allowed
        banned |= token in request.stop_token_ids and len(output) < params.min_tokens
        context = [*request.token_ids, *draft]
        for *start, last in request.bad_words:
            banned |= last == token and context[len(context) - len(start) :] == start
        out.append(-INF if banned else value)
    return out


def check_process(requests: Sequence[Request], drafts: Sequence[Sequence[int]]) -> None:
    state, rows = make_batch(requests, drafts)
    generator = torch.Generator().manual_seed(3)
    raw = torch.randn(rows.num_rows, VOCAB, generator=generator) * 3
    before = raw.clone()
    got = processed(raw, rows, state)
    assert torch.equal(raw, before)
    row = 0
    for request, draft in zip(requests, drafts, strict=True):
        for offset in range(len(draft) + 1):
            expected = torch.tensor(processed_row(raw[row].tolist(), request, draft[:offset]))
            torch.testing.assert_close(got[row], expected, rtol=1e-5, atol=1e-5)
            row += 1
    assert row == rows.num_rows


PROCESSED: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": -0.4},
    "repetition": {"repetition_penalty": 1.7},
    "all penalties": {
        "presence_penalty": -0.5,
        "frequency_penalty": 0.9,
        "repetition_penalty": 0.6,
    },
    "bias": {"logit_bias": {0: -100.0, 5: 3.5}},
    "allowed": {"allowed_token_ids": [2, 3, 11]},
    "allowed and bias": {"allowed_token_ids": [2, 3], "logit_bias": {3: 2.0, 4: 50.0}},
    "min_tokens": {"min_tokens": 4, "stop": [0, 7]},
    "min_tokens, token 0 stays": {"min_tokens": 9, "stop": [7]},
    "min_tokens reached": {"min_tokens": 2, "stop": [0, 7]},
    "min_tokens, nothing stops": {"min_tokens": 3},
    "bad word": {"bad_words": [[4]]},
    "bad words": {"bad_words": [[1, 2], [2, 1, 2], [5, 5], [3, 1, 4, 6], [9, 9, 9, 9, 9, 9]]},
    "everything": {
        "presence_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {7: 4.0},
        "allowed_token_ids": [0, 1, 2, 7],
        "min_tokens": 4,
        "stop": [7],
        "bad_words": [[1, 2], [2, 1]],
    },
}
DRAFTS = ([], [1], [2, 1, 2], [5, 5, 1, 2], [4, 4, 4])


@pytest.mark.parametrize("name", PROCESSED)
@pytest.mark.parametrize("draft", DRAFTS)
def test_one_processor(name: str, draft: list[int]) -> None:
    for output in ([], [1, 5, 5]):
        request = make_request([3, 1, 1], output, **PROCESSED[name])
        check_process([request], [draft])


@pytest.mark.parametrize("seed", range(20))
def test_mixed_batches(seed: int) -> None:
    chance = random.Random(seed)
    requests, drafts = [], []
    for _ in range(chance.randint(2, 7)):
        name = chance.choice(list(PROCESSED))
        tokens = [chance.randrange(6) for _ in range(chance.randint(1, 9))]
        cut = chance.randint(1, len(tokens))
        requests.append(make_request(tokens[:cut], tokens[cut:], **PROCESSED[name]))
        drafts.append([chance.randrange(6) for _ in range(chance.randint(0, 4))])
    check_process(requests, drafts)


def test_nothing_to_do_returns_the_input() -> None:
    state, rows = make_batch([make_request([1], top_k=3, top_p=0.5)] * 2, [[1], []])
    logits = torch.zeros(rows.num_rows, VOCAB)
    assert processed(logits, rows, state) is logits
    assert state.output_counts is None
    assert state.bias is None


def test_rows_of_plain_requests_keep_their_bits() -> None:
    requests = [make_request([1]), make_request([1], [2], **PROCESSED["everything"])]
    state, rows = make_batch(requests, [[1, 2], [3]])
    logits = torch.randn(rows.num_rows, VOCAB)
    assert torch.equal(processed(logits, rows, state)[:3], logits[:3])


def test_illegal_draft_tokens_are_not_counted() -> None:
    request = make_request([1], [2], frequency_penalty=1.0)
    state, rows = make_batch([request], [[-1, VOCAB + 3, 4]])
    out = processed(torch.zeros(4, VOCAB), rows, state)
    assert torch.equal(out[2], out[0])
    assert (out[3] - out[0]).tolist() == [0.0] * 4 + [-1.0] + [0.0] * (VOCAB - 5)


def test_bad_words_beyond_the_vocabulary() -> None:
    state, rows = make_batch([make_request([1], bad_words=[[VOCAB], [1, 3]])], [[]])
    out = processed(torch.zeros(1, VOCAB), rows, state)
    assert out[0].tolist() == [0.0] * 3 + [-INF] + [0.0] * (VOCAB - 4)


def test_bad_words_longer_than_the_text_ban_nothing() -> None:
    state, rows = make_batch([make_request([1, 2], bad_words=[[3, 1, 2, 4], [1, 2, 5]])], [[]])
    out = processed(torch.zeros(1, VOCAB), rows, state)
    assert out[0].isneginf().nonzero().flatten().tolist() == [5]


def test_committed_tokens_equal_a_fresh_admission() -> None:
    params = PROCESSED["everything"]
    old = [make_request([3, 1], [1], **params), make_request([2], **params), make_request([4])]
    state, rows = make_batch(old, [[], [], []])
    given = torch.tensor([[2, 2, 1, -1], [5, 9, 9, 9], [6, 6, -1, -1]])
    counts = torch.tensor([3, 0, 2])
    state.commit(rows.slots, given, counts, state.uses(rows.slots.tolist()))
    new = []
    for request, tokens, count in zip(old, given.tolist(), counts.tolist(), strict=True):
        output = [*request.output_token_ids, *tokens[:count]]
        kept = PROCESSED["plain"] if request is old[2] else params
        new.append(make_request(request.token_ids[: request.num_prompt_tokens], output, **kept))
        new[-1].num_steps = int(count > 0)
    fresh, _ = make_batch(new, [[], [], []])
    for name in ("steps", "num_output_tokens", "num_prompt_tokens", "seeds", "stop_ids"):
        assert torch.equal(getattr(state, name), getattr(fresh, name)), name
    users = rows.slots[:2]
    assert state.output_counts is not None
    assert fresh.output_counts is not None
    assert torch.equal(state.output_counts[users], fresh.output_counts[users])
    assert state.output_counts[users[0], 2] == 2


def test_slots_that_were_never_used_change_nothing() -> None:
    state = SamplingState(2, VOCAB, "cpu")
    state.admit({0: make_request([1, 2], [3, 3], **PROCESSED["everything"])})
    slot = torch.tensor([1])
    rows = SampleRows.build(slot, slot, slot.view(1, 1), slot, slot > 0)
    logits = torch.randn(2, VOCAB)
    uses = state.uses([0]) - {Uses.BAD_WORDS}
    out = process(logits, rows, state.tensors(), needs_of(uses))
    assert torch.equal(out.view(torch.int32), logits.view(torch.int32))
    assert state.temperature[1] == 0
    ones = torch.ones(2)
    kept = (state.top_k[[1, 1]], state.top_p[[1, 1]], state.min_p[[1, 1]])
    torch.testing.assert_close(probabilities(logits, ones, *kept), logits.softmax(-1))


def test_a_slot_is_reused() -> None:
    state = SamplingState(2, VOCAB, "cpu")
    state.admit({1: make_request([1, 2], [3, 3], seed=-5, **PROCESSED["everything"])})
    assert Uses.PENALTIES in state.uses([0, 1])
    assert Uses.PENALTIES not in state.uses([0])
    assert state.uses([]) == frozenset()
    assert state.seeds[1] == -5
    state.admit({1: make_request([4], [5], presence_penalty=1.0, seed=(1 << 64) - 1)})
    assert state.seeds[1] == -1
    assert state.output_counts is not None
    assert state.prompt_mask is not None
    assert state.output_counts[1].tolist() == [0] * 5 + [1] + [0] * 6
    assert state.prompt_mask[1].nonzero().flatten().tolist() == [4]
    assert state.uses([0, 1]) == {Uses.SAMPLING, Uses.PENALTIES}
    assert state.stop_ids[1].tolist() == [-1] * 8


def test_leftovers_of_a_slot_change_nothing() -> None:
    """Processors run over all rows of a batch; what a slot held before must not show."""
    state = SamplingState(2, VOCAB, "cpu")
    state.admit({0: make_request([1, 2], [3, 3], **PROCESSED["everything"])})
    state.admit({0: make_request([1, 3], [2])})
    state.admit({1: make_request([1, 3], [2], **PROCESSED["everything"])})
    rows = SampleRows.build(
        torch.tensor([0, 1]), torch.tensor([3, 3]), torch.tensor([[3], [2]]),
        torch.tensor([1, 1]), torch.tensor([True, True]),
    )  # fmt: skip
    logits = torch.randn(4, VOCAB)
    logits[:2, 3] = -0.0
    uses = state.uses([0, 1]) - {Uses.BAD_WORDS}
    assert {Uses.PENALTIES, Uses.BIAS, Uses.MIN_TOKENS} <= uses
    out = process(logits, rows, state.tensors(), needs_of(uses))
    assert torch.equal(out[:2].view(torch.int32), logits[:2].view(torch.int32))
    assert not torch.equal(out[2:], logits[2:])


def test_stop_ids_grow() -> None:
    state = SamplingState(2, VOCAB, "cpu")
    before = state.stop_ids
    state.admit({0: make_request([1], stop=[3])})
    state.admit({1: make_request([1], stop=[5, 4, VOCAB + 1])})
    assert state.stop_ids.tolist() == [[3, *[-1] * 7], [4, 5, *[-1] * 6]]
    assert state.stop_ids is before
    state.admit({0: make_request([1], stop=range(1, 10))})
    assert state.stop_ids[0].tolist() == [*range(1, 10), *[-1] * 7]
    assert state.stop_ids[1].tolist() == [4, 5, *[-1] * 14]


def test_the_generation_rises_when_a_tensor_is_replaced() -> None:
    state = SamplingState(2, VOCAB, "cpu")
    generations = [state.generation]
    for params in (
        {"top_k": 3, "stop": [1]},
        {"presence_penalty": 1.0},
        {"presence_penalty": 1.0},
        {"logit_bias": {1: 1.0}},
        {"logit_bias": {2: 1.0}, "frequency_penalty": 1.0},
        {"stop": range(9)},
        {"stop": range(10)},
    ):
        names = ("ints", "floats", "stop_ids", "output_counts", "prompt_mask", "bias")
        before = [getattr(state, name) for name in names]
        state.admit({len(generations) % 2: make_request([1], **params)})
        replaced = any(a is not getattr(state, n) for a, n in zip(before, names, strict=True))
        assert replaced == (state.generation > generations[-1])
        generations.append(state.generation)
    assert generations == [0, 0, 1, 1, 2, 2, 3, 3]


def test_extreme_parameters_make_no_nan() -> None:
    extremes = {"temperature": 1e300, "repetition_penalty": 1e300, "min_tokens": 10**30}
    requests = [
        make_request([0, 1], max_tokens=None, top_k=10**30, **extremes),
        make_request([0, 1], temperature=1e-300, repetition_penalty=1e-300),
    ]
    state, rows = make_batch(requests, [[], []])
    raw = torch.tensor([[5.0, 0.0, -7.0, -INF] * 3] * 2)
    out = processed(raw, rows, state)
    probs = probabilities(out, *parameters(state, rows))
    torch.testing.assert_close(probs.sum(-1), torch.ones(2))
    assert torch.equal(probs == 0, torch.isinf(out) | (probs < 1e-30))


def test_a_batch_without_rows() -> None:
    state = SamplingState(2, VOCAB, "cpu")
    none = torch.zeros(0, dtype=torch.int64)
    rows = SampleRows.build(none, none, none.view(0, 2), none, none > 0, num_rows=0)
    logits = torch.zeros(0, VOCAB)
    assert processed(logits, rows, state) is logits
    assert probabilities(logits, *parameters(state, rows)).shape == (0, VOCAB)


def parameters(state: SamplingState, rows: SampleRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slots = rows.row_slots
    return state.temperature[slots], state.top_k[slots], state.top_p[slots], state.min_p[slots]


def test_layout() -> None:
    arguments = (
        torch.tensor([4, 0, 2]),
        torch.tensor([5, 6, 7]),
        torch.tensor([[1, 2], [0, 0], [3, 0]]),
        torch.tensor([2, 0, 1]),
        torch.ones(3, dtype=torch.bool),
    )
    rows = SampleRows.build(*arguments, num_rows=6)
    assert rows.request.tolist() == [0, 0, 0, 1, 2, 2]
    assert rows.offset.tolist() == [0, 1, 2, 0, 0, 1]
    assert rows.first_row.tolist() == [0, 3, 4]
    assert rows.row_slots.tolist() == [4, 4, 4, 0, 2, 2]
    assert rows.draft_rows().tolist() == [[0, 1], [3, 3], [4, 5]]
    assert rows.draft_mask().tolist() == [[True, True], [False, False], [True, False]]
    uniform = SampleRows.build(*arguments)
    assert uniform.request.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert uniform.offset.tolist() == [0, 1, 2] * 3
    assert uniform.first_row.tolist() == [0, 3, 6]
    assert uniform.draft_rows().tolist() == [[0, 1], [3, 3], [6, 7]]
    assert uniform.draft_mask().tolist() == rows.draft_mask().tolist()


# Temperature and truncation


def expected_probabilities(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> list[float]:
    """One row, in float64. Tokens of equal logits are ties."""
    largest = max(logits)
    weights = [math.exp((value - largest) / max(temperature, 1e-5)) for value in logits]
    kept = [weight > 0 and weight >= min_p for weight in weights]
    if 0 < top_k < len(logits):
        values = sorted((v for v, keep in zip(logits, kept, strict=True) if keep), reverse=True)
        threshold = values[min(top_k, len(values)) - 1]
        kept = [keep and v >= threshold for v, keep in zip(logits, kept, strict=True)]
    if top_p < 1:
        left = [(v, w) for v, w, keep in zip(logits, weights, kept, strict=True) if keep]
        total = sum(Fraction(w) for _, w in left)
        for threshold in sorted({v for v, _ in left}, reverse=True):
            if sum(Fraction(w) for v, w in left if v >= threshold) >= Fraction(top_p) * total:
                break
        kept = [keep and v >= threshold for v, keep in zip(logits, kept, strict=True)]
    total = sum(w for w, keep in zip(weights, kept, strict=True) if keep)
    return [w / total if keep else 0.0 for w, keep in zip(weights, kept, strict=True)]


def as_float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


# Coarse logits make ties; irregular thresholds keep sums off the boundaries.
LOGIT = st.one_of(st.integers(-6, 6).map(float), st.just(-INF))
ROW = st.tuples(
    st.lists(LOGIT, min_size=VOCAB, max_size=VOCAB).filter(lambda row: max(row) > -INF),
    st.sampled_from([0.3, 0.7, 1.0, 2.1]),
    st.sampled_from([0, -1, 1, 2, 3, 5, 11, 12, 40]),
    st.sampled_from([1.0, 0.937, 0.613, 0.41, 0.113, 1e-6]).map(as_float32),
    st.sampled_from([0.0, 0.0517, 0.31, 1.0]).map(as_float32),
)


@given(st.lists(ROW, min_size=1, max_size=4))
def test_probabilities(batch: list[tuple[list[float], float, int, float, float]]) -> None:
    logits = torch.tensor([row[0] for row in batch])
    temperature, top_p, min_p = (torch.tensor([row[i] for row in batch]) for i in (1, 3, 4))
    top_k = torch.tensor([row[2] for row in batch])
    before = logits.clone()
    got = probabilities(logits, temperature, top_k, top_p, min_p)
    assert got.dtype == torch.float32
    assert torch.equal(logits, before)
    expected = torch.tensor([expected_probabilities(*row) for row in batch])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-9)
    assert torch.equal(got == 0, expected == 0)
    # Order never matters: neither that of the tokens nor that of the rows.
    order = torch.randperm(VOCAB)
    moved = probabilities(logits[:, order], temperature, top_k, top_p, min_p)
    assert torch.equal(moved == 0, got[:, order] == 0)
    single = probabilities(logits[-1:], temperature[-1:], top_k[-1:], top_p[-1:], min_p[-1:])
    assert torch.equal(single == 0, got[-1:] == 0)


@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0, 30.0])
@pytest.mark.parametrize("share", [1e-6, 0.3, 0.9, 0.9999])
def test_both_searches_agree(spread: float, share: float) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(4, 5000, generator=generator) * spread
    logits[1] = logits[1].round()  # ties, some of them of 0 and -0
    weights = torch.exp(logits - logits.amax(-1, keepdim=True))
    for values, mass in ((weights, thresholds.mass_units), (logits, thresholds.count_ones)):
        masses = mass(values)
        wanted = (masses.sum(-1, keepdim=True).double() * share).ceil().to(torch.int64)
        by_bits = thresholds._search_bits(values, mass, wanted)
        by_order = thresholds._search_order(values, mass, wanted)
        assert torch.equal(by_bits, by_order)
        for count in (1, 40, 4000, 9000):
            by_largest = thresholds._search_largest(values, mass, wanted, count)
            enough = (masses * (values >= by_bits)).count_nonzero(-1).max() <= count
            assert by_largest is not None or not enough
            assert by_largest is None or torch.equal(by_bits, by_largest)
        # The definition: enough at the threshold, too little above it.
        assert ((masses * (values >= by_bits)).sum(-1, keepdim=True) >= wanted).all()
        assert ((masses * (values > by_bits)).sum(-1, keepdim=True) < wanted).all()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("vocab_size", [5, 1000, 2048, 2049, 7001])
def test_the_kth_largest(monkeypatch: pytest.MonkeyPatch, vocab_size: int, waits: bool) -> None:
    monkeypatch.setattr(thresholds, "reads_are_free", lambda device: waits)
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(40, vocab_size, generator=generator)
    logits[::2] = (logits[::2] * 2).round()
    logits[3, 2:] = -INF
    top_k = torch.randint(-1, vocab_size + 3, (40,), generator=generator)
    got = thresholds.kth_largest(logits, top_k).squeeze(-1)
    ordered = logits.sort(-1, descending=True).values
    for row, k in enumerate(top_k.tolist()):
        assert got[row] == (ordered[row, k - 1] if 0 < k < vocab_size else -INF)


@pytest.mark.parametrize("vocab_size", [VOCAB, 3000])
def test_looking_at_numbers_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, vocab_size: int
) -> None:
    generator = torch.Generator().manual_seed(2)
    for spread in (0.01, 1.0, 4.0):
        logits = torch.randn(6, vocab_size, generator=generator) * spread
        top_k, top_p = torch.tensor([0, 3, 200, 0, 50, 2900]), torch.full((6,), 0.9)
        top_p[:2] = 1.0
        arguments = (logits, torch.ones(6), top_k, top_p, torch.zeros(6))
        found = []
        for free in (True, False):
            monkeypatch.setattr(thresholds, "reads_are_free", lambda device, free=free: free)
            found.append(probabilities(*arguments))
        assert torch.equal(*found)


@pytest.mark.parametrize("vocab_size", [VOCAB, 3000])
def test_truncations_that_are_not_used_are_skipped_with_the_same_result(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, vocab_size, generator=generator)
    ones = torch.ones(4)
    given = {
        "top_k": torch.tensor([3, 0, 2, 5]),
        "top_p": torch.tensor([0.8, 1.0, 0.4, 0.3]),
        "min_p": torch.tensor([0.0, 0.01, 0.02, 0.3]),
    }
    neutral = {"top_k": torch.zeros(4).long(), "top_p": ones, "min_p": ones * 0}
    for count in range(4):
        for uses in itertools.combinations(given, count):
            chosen = {use: given[use] if use in uses else neutral[use] for use in given}
            needs = SamplingNeeds(**dict.fromkeys(uses, True))
            got = probabilities(logits, ones, *chosen.values(), needs)
            assert torch.equal(got, probabilities(logits, ones, *chosen.values()))
            # A row that keeps all has the bits that it has where nobody truncates.
            plain = probabilities(logits, ones, *neutral.values(), SamplingNeeds())
            if "min_p" not in uses:
                assert torch.equal(got[1], plain[1])


def test_ties_of_the_last_candidate_stay_together() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    one = torch.ones(1)
    got = probabilities(logits, one, torch.tensor([2]), one * 0.95, one * 0)
    assert (got > 0).tolist() == [[True] * 4 + [False]]


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-5])
def test_tiny_temperatures(temperature: float) -> None:
    logits = torch.tensor([[300.0, 299.0, -1e4, -INF], [-5.0, -5.0, -6.0, -3e38]])
    some = torch.full((2,), temperature)
    got = probabilities(logits, some, torch.tensor([0, 0]), torch.ones(2), torch.zeros(2))
    assert got.tolist() == [[1, 0, 0, 0], [0.5, 0.5, 0, 0]]


def test_no_legal_token_gives_zeros() -> None:
    logits = torch.full((2, 6), -INF)
    logits[1, 2] = 0.0
    half = torch.full((2,), 0.5)
    for top_k in (0, 2):
        got = probabilities(logits, half, torch.tensor([top_k] * 2), half, half)
        assert got.tolist() == [[0.0] * 6, [0, 0, 1, 0, 0, 0]]
