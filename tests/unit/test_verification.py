"""Verification: rules and edge cases. Distributions are tested in tests/lossless."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.kernels.reference import FP64_SAMPLING, SAMPLING, thresholds
from slipstream.kernels.reference import sampling as reference
from slipstream.kernels.reference.noise import NoiseKeys, Purpose, gumbel
from slipstream.kernels.reference.processors import probabilities, process
from slipstream.kernels.reference.sampling import _distribution
from slipstream.kernels.sampling import SampleRows
from slipstream.sampling.state import SamplingState, Uses
from slipstream.sampling.verification import (
    Verdict,
    needs_of,
    sample_draft,
    verify,
)

VOCAB = 6
GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 1.0}


def make_state(
    params: Sequence[dict[str, Any]], vocab_size: int = VOCAB, fp64: bool = False
) -> SamplingState:
    """Served by plain torch, which defines what is right: tests/kernels compare others with it."""
    state = SamplingState(len(params), vocab_size, "cpu", fp64)
    state.ops = FP64_SAMPLING if fp64 else SAMPLING
    for slot, arguments in enumerate(params):
        state.admit({slot: make_request(slot, arguments)})
    return state


def make_request(slot: int, params: dict[str, Any]) -> Request:
    request = Request(
        request_id=str(slot),
        token_ids=[0, 1, 2],
        params=SamplingParams(**params),
        seed=100 + slot,
        stop_token_ids=frozenset({2} if params.get("min_tokens") else ()),
        max_tokens=100,
        num_speculative_tokens=4,
        arrival=slot,
    )
    request.num_steps = slot + 1
    return request


def make_rows(
    drafts: Sequence[Sequence[int]],
    probs: Tensor | None = None,
    slots: Sequence[int] | None = None,
    one_hot: Sequence[bool] | None = None,
    uniform_rows: bool = False,
) -> SampleRows:
    longest = max(map(len, drafts))
    padded = [[*draft, *[0] * (longest - len(draft))] for draft in drafts]
    return SampleRows.build(
        torch.tensor(range(len(drafts)) if slots is None else slots),
        torch.full((len(drafts),), 3),
        torch.tensor(padded, dtype=torch.int64).view(len(drafts), longest),
        torch.tensor([len(draft) for draft in drafts]),
        torch.tensor([probs is None] * len(drafts) if one_hot is None else one_hot),
        probs,
        num_rows=None if uniform_rows else sum(map(len, drafts)) + len(drafts),
    )


def judge(
    logits: Tensor, rows: SampleRows, state: SamplingState, rates: Tensor | None = None
) -> Verdict:
    return verify(logits, rows, state, state.uses(rows.slots.tolist()), rates)


def certain(*tokens: int, vocab_size: int = VOCAB) -> Tensor:
    """Logits of a target that is sure of each row's token."""
    return torch.full((len(tokens), vocab_size), -50.0).scatter_(
        1, torch.tensor(tokens).unsqueeze(1), 50.0
    )


def fix_uniform(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    def constant(keys: NoiseKeys, purpose: Purpose) -> Tensor:
        assert purpose is Purpose.ACCEPT
        return torch.full(keys.seeds.shape, value)

    monkeypatch.setattr(reference, "uniform", constant)


def check_invariants(verdict: Verdict, rows: SampleRows) -> None:
    assert torch.equal(verdict.num_tokens, verdict.num_accepted + 1)
    assert (verdict.num_accepted <= rows.num_draft_tokens).all()
    for ids, count, draft in zip(
        verdict.token_ids.tolist(), verdict.num_tokens.tolist(), rows.draft_tokens.tolist(),
        strict=True,
    ):  # fmt: skip
        assert ids[: count - 1] == draft[: count - 1]
        assert ids[count - 1] >= 0
        assert ids[count:] == [-1] * (len(ids) - count)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize(
    ("draft", "target", "expected"),
    [
        ([], [4], [4]),
        ([3], [3, 5], [3, 5]),
        ([3], [2, 5], [2, -1]),
        ([3, 4, 5], [3, 4, 5, 0], [3, 4, 5, 0]),
        ([3, 4, 5], [3, 1, 5, 0], [3, 1, -1, -1]),
        ([3, 4, 5], [0, 4, 5, 0], [0, -1, -1, -1]),
        ([3, -1, -1], [3, 1, 5, 0], [3, 1, -1, -1]),
        ([3, VOCAB, 5], [3, 1, 5, 0], [3, 1, -1, -1]),
    ],
)
def test_a_sure_target(
    params: dict[str, Any], draft: list[int], target: list[int], expected: list[int]
) -> None:
    rows = make_rows([draft])
    verdict = judge(certain(*target), rows, make_state([params]))
    assert verdict.token_ids.tolist() == [expected]
    assert verdict.num_tokens.item() == sum(token >= 0 for token in expected)
    check_invariants(verdict, rows)


def test_greedy_uses_processed_logits() -> None:
    state = make_state([GREEDY | {"logit_bias": {4: 100.0}}, GREEDY | {"repetition_penalty": 9.0}])
    logits = torch.tensor([[0.0, 5, 0, 3, 0, 0]] * 4)
    verdict = judge(logits, make_rows([[4], [3]]), state)
    # The second request has seen 1 in its prompt; once 3 is drafted, nothing unseen is above 0.
    assert verdict.token_ids.tolist()[0] == [4, 4]
    assert verdict.token_ids.tolist()[1][0] == 3
    assert verdict.num_accepted.tolist() == [1, 1]


def test_ragged_batch_of_both_kinds_equals_single_requests() -> None:
    generator = torch.Generator().manual_seed(2)
    kinds = [SAMPLED, GREEDY, SAMPLED | {"top_k": 2}, GREEDY, SAMPLED | {"top_p": 0.7}]
    drafts = [[1, 2], [3], [], [4, 4, 4], [0, 5, 1]]
    state = make_state(kinds)
    probs = torch.rand(5, 3, VOCAB, generator=generator).softmax(-1)
    one_hot = [False, True, False, False, True]
    rows = make_rows(drafts, probs, one_hot=one_hot)
    logits = torch.randn(rows.num_rows, VOCAB, generator=generator)
    together = judge(logits, rows, state)
    check_invariants(together, rows)
    for index, draft in enumerate(drafts):
        width = len(draft)
        alone = judge(
            logits[rows.request == index],
            make_rows([draft], probs[index : index + 1, :width], [index], [one_hot[index]]),
            state,
        )
        assert together.num_accepted[index] == alone.num_accepted[0]
        assert torch.equal(together.token_ids[index, : width + 1], alone.token_ids[0])


def mixed_batch(
    seed: int, vocab_size: int
) -> tuple[SamplingState, list[list[int]], Tensor, list[bool], Tensor]:
    """(state, drafts, probs, one_hot, logits [R, K + 1, V]) with every kind of request."""
    generator = torch.Generator().manual_seed(seed)
    state = make_state(KINDS * 6, vocab_size)
    num = len(KINDS) * 6
    logits = torch.randn(num, 4, vocab_size, generator=generator) * 2
    # The drafts are what the target may well accept, of every length, and some end early.
    drafts = logits[:, :3].argmax(-1)
    drafts[torch.rand(num, 3, generator=generator) < 0.2] = 1
    drafts[torch.rand(num, 3, generator=generator) < 0.05] = -1
    lengths = torch.randint(4, (num,), generator=generator).tolist()
    probs = torch.rand(num, 3, vocab_size, generator=generator).softmax(-1)
    one_hot = (torch.rand(num, generator=generator) < 0.5).tolist()
    cut = [draft[:length] for draft, length in zip(drafts.tolist(), lengths, strict=True)]
    return state, cut, probs, one_hot, logits


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("vocab_size", [VOCAB, 3000])
def test_requests_side_by_side_equal_single_ones(seed: int, vocab_size: int) -> None:
    """Greedy, sampled, truncated and penalised requests, ragged and uniform, bit for bit."""
    state, drafts, probs, one_hot, logits = mixed_batch(seed, vocab_size)
    ragged = make_rows(drafts, probs, one_hot=one_hot)
    uniform_rows = make_rows(drafts, probs, one_hot=one_hot, uniform_rows=True)
    assert uniform_rows.num_rows == logits.shape[0] * 4 > ragged.num_rows
    by_layout = [
        judge(logits[ragged.request, ragged.offset], ragged, state),
        judge(logits.flatten(0, 1), uniform_rows, state),
    ]
    check_invariants(by_layout[0], ragged)
    for name in ("token_ids", "num_tokens", "num_accepted"):
        assert torch.equal(getattr(by_layout[0], name), getattr(by_layout[1], name))
    accepted = by_layout[0].num_accepted
    assert 0 < accepted.sum() < ragged.num_draft_tokens.sum()
    for index, draft in enumerate(drafts):
        alone = judge(
            logits[index, : len(draft) + 1],
            make_rows([draft], probs[index : index + 1, : len(draft)], [index], [one_hot[index]]),
            state,
        )
        together = by_layout[0].token_ids[index, : len(draft) + 1]
        assert torch.equal(together, alone.token_ids[0])
        assert accepted[index] == alone.num_accepted[0]


def test_the_distribution_of_a_row_does_not_depend_on_the_others() -> None:
    state, drafts, probs, one_hot, logits = mixed_batch(9, 3000)
    rows = make_rows(drafts, probs, one_hot=one_hot)
    raw = logits[rows.request, rows.offset]
    processed = process(raw, rows, state.tensors(), needs_of(frozenset(Uses)))
    together = _distribution(processed, rows.row_slots, state.tensors(), needs_of(frozenset(Uses)))
    for index, draft in enumerate(drafts):
        alone_rows = make_rows([draft], None, [index])
        uses = state.uses([index])
        mine = rows.request == index
        alone = process(raw[mine], alone_rows, state.tensors(), needs_of(uses))
        # Compare integers, since 0 and -0 differ.
        assert torch.equal(processed[mine].view(torch.int32), alone.view(torch.int32))
        if Uses.SAMPLING in uses:
            probs_alone = _distribution(
                alone, alone_rows.row_slots, state.tensors(), needs_of(uses)
            )
            assert torch.equal(together[mine], probs_alone)


def test_verify_changes_neither_logits_nor_drafts_nor_state() -> None:
    state = make_state([SAMPLED, GREEDY | {"presence_penalty": 1.0}])
    probs = torch.full((2, 2, VOCAB), 1 / VOCAB)
    rows = make_rows([[1, 2], [3, 4]], probs, one_hot=[False, True])
    logits = torch.randn(6, VOCAB)
    kept = [t.clone() for t in (logits, probs, rows.draft_tokens, state.steps, state.seeds)]
    first = judge(logits, rows, state)
    after = [logits, probs, rows.draft_tokens, state.steps, state.seeds]
    assert all(torch.equal(a, b) for a, b in zip(kept, after, strict=True))
    assert torch.equal(judge(logits, rows, state).token_ids, first.token_ids)


@pytest.mark.parametrize("one_hot", [True, False])
def test_zero_probability_is_never_accepted(monkeypatch: pytest.MonkeyPatch, one_hot: bool) -> None:
    fix_uniform(monkeypatch, 0.0)
    logits = torch.zeros(2, VOCAB)
    logits[:, 3] = -torch.inf
    probs = None if one_hot else torch.full((1, 1, VOCAB), 1 / VOCAB)
    verdict = judge(logits, make_rows([[3]], probs), make_state([SAMPLED]))
    assert verdict.num_accepted.item() == 0
    assert verdict.token_ids[0, 0] != 3


def test_acceptance_is_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(2, 4)  # p = 1/4
    probs = torch.tensor([[[0.5, 0.5, 0.0, 0.0]]])
    for u, accepted in ((0.5, 0), (0.5 - 2**-24, 1)):
        fix_uniform(monkeypatch, u)
        verdict = judge(logits, make_rows([[1]], probs), make_state([SAMPLED], 4))
        assert verdict.num_accepted.item() == accepted


def test_one_hot_draft_is_accepted_with_the_target_probability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.zeros(2, 4)
    for u, accepted in ((0.25, 0), (0.25 - 2**-24, 1)):
        fix_uniform(monkeypatch, u)
        verdict = judge(logits, make_rows([[1]]), make_state([SAMPLED], 4))
        assert verdict.num_accepted.item() == accepted


def test_a_refused_token_of_a_one_hot_draft_is_not_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fix_uniform(monkeypatch, 1 - 2**-24)
    state = make_state([SAMPLED] * 300, 4)
    verdict = judge(torch.zeros(600, 4), make_rows([[1]] * 300), state)
    assert verdict.num_accepted.sum() == 0
    assert sorted(verdict.token_ids[:, 0].unique().tolist()) == [0, 2, 3]


def test_the_residual_is_where_the_target_exceeds_the_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fix_uniform(monkeypatch, 1 - 2**-24)
    probs = torch.tensor([[[0.1, 0.4, 0.4, 0.1]]]).expand(200, 1, 4)
    verdict = judge(
        torch.zeros(400, 4), make_rows([[1]] * 200, probs), make_state([SAMPLED] * 200, 4)
    )
    assert verdict.num_accepted.sum() == 0
    assert sorted(verdict.token_ids[:, 0].unique().tolist()) == [0, 3]


def test_an_empty_residual_samples_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_is_accepted", lambda u, p, q: torch.zeros_like(p) > 0)
    logits = torch.zeros(400, 4)
    logits[:, 0] = -torch.inf
    state = make_state([SAMPLED] * 200, 4)
    probs = logits[:200].softmax(-1).unsqueeze(1)
    verdict = judge(logits, make_rows([[1]] * 200, probs), state)
    assert sorted(verdict.token_ids[:, 0].unique().tolist()) == [1, 2, 3]


@pytest.mark.parametrize("width", [3, 9])
def test_draft_vocabulary_of_another_width(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Only ids that both have count: q is 0 for missing ids, and further ones are cut off."""
    fix_uniform(monkeypatch, 1 - 2**-24)
    probs = torch.zeros(200, 1, width)
    probs[:, :, :2] = 0.5
    verdict = judge(
        torch.zeros(400, VOCAB), make_rows([[1]] * 200, probs), make_state([SAMPLED] * 200)
    )
    assert verdict.num_accepted.sum() == 0
    assert sorted(verdict.token_ids[:, 0].unique().tolist()) == [2, 3, 4, 5]
    # A draft token that q does not know can only be wrong bookkeeping; it must not crash.
    judge(torch.zeros(2, VOCAB), make_rows([[5]], probs[:1]), make_state([SAMPLED]))


def test_a_padded_draft_equals_a_shorter_one() -> None:
    generator = torch.Generator().manual_seed(8)
    state = make_state([SAMPLED] * 100)
    logits = torch.randn(300, VOCAB, generator=generator)
    drafted = torch.randint(VOCAB, (100,), generator=generator).tolist()
    short = make_rows([[token] for token in drafted])
    padded = make_rows([[token, -1] for token in drafted])
    first = logits.view(100, 3, VOCAB)[:, :2].reshape(200, VOCAB)
    expected = judge(first, short, state)
    got = judge(logits, padded, state)
    assert torch.equal(got.num_accepted, expected.num_accepted)
    assert torch.equal(got.token_ids[:, :2], expected.token_ids)


@pytest.mark.parametrize("fp64", [False, True])
def test_plain_sampling_is_the_target_noise(fp64: bool) -> None:
    """Without a draft: argmax(log p + noise), keyed by seed and position alone."""
    state = make_state([SAMPLED] * 50, fp64=fp64)
    logits = torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(1))
    got = judge(logits, make_rows([[]] * 50), state).token_ids[:, 0]
    keys = NoiseKeys(state.seeds, torch.full((50,), 3), torch.zeros(50, dtype=torch.int64))
    p = logits.softmax(-1).to(torch.float64 if fp64 else torch.float32)
    assert torch.equal(got, (p.log() + gumbel(keys, Purpose.TARGET, VOCAB, fp64)).argmax(-1))


def test_the_bonus_token_equals_the_plain_token(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_uniform(monkeypatch, 0.0)
    state = make_state([SAMPLED] * 50)
    logits = torch.randn(100, VOCAB, generator=torch.Generator().manual_seed(4))
    drafted = judge(logits, make_rows([[2]] * 50), state)
    assert (drafted.num_accepted == 1).all()
    plain = make_rows([[]] * 50)
    object.__setattr__(plain, "positions", plain.positions + 1)
    expected = judge(logits.view(50, 2, VOCAB)[:, 1], plain, state)
    assert torch.equal(drafted.token_ids[:, 1], expected.token_ids[:, 0])


def test_steps_change_acceptance_but_not_plain_tokens() -> None:
    state = make_state([SAMPLED] * 200)
    logits = torch.zeros(400, VOCAB)
    plain, drafted = make_rows([[]] * 200), make_rows([[1]] * 200)
    before = judge(logits[:200], plain, state), judge(logits, drafted, state)
    state.steps += 1
    after = judge(logits[:200], plain, state), judge(logits, drafted, state)
    assert torch.equal(before[0].token_ids, after[0].token_ids)
    assert not torch.equal(before[1].num_accepted, after[1].num_accepted)


KINDS: list[dict[str, Any]] = [
    GREEDY,
    {"top_k": 3, "top_p": 0.9},
    {"top_p": 0.9, "min_p": 0.1},
    {"presence_penalty": 1.0, "logit_bias": {3: 1.0}, "min_tokens": 2},
    GREEDY | {"frequency_penalty": 1.5, "repetition_penalty": 0.7},
    SAMPLED,
    {"allowed_token_ids": [0, 3, 5], "temperature": 0.6, "top_k": 2},
]
CHOICES = (KINDS, KINDS[:1], KINDS[1:2], KINDS[2:4], KINDS[5:6])


def take_a_step(
    state: SamplingState, vocab_size: int, rates: tuple[float, ...], one_row: bool
) -> Verdict:
    """Build, draft, verify, commit: all that a captured step does."""
    num, device = state.max_num_seqs, state.device
    uses = state.uses(range(num))
    slots = torch.arange(num, device=device)
    lengths = torch.where(slots == 0, 2, 1) - int(one_row)
    probs = torch.zeros(num, 2 - int(one_row), vocab_size, device=device)
    rows = SampleRows.build(
        slots,
        slots + 3,
        slots.unsqueeze(-1).expand(num, probs.shape[1]),
        lengths,
        slots > 2,
        probs if Uses.SAMPLING in uses else None,
        num_rows=2 * num + 1 - int(one_row) * num,
    )
    logits = torch.zeros(rows.num_rows, vocab_size, device=device)
    for index in range(rows.max_draft_tokens):
        out = probs[:, index, :5] if Uses.SAMPLING in uses else None
        sample_draft(logits[rows.first_row], slots, rows.positions, state, uses, 5, probs_out=out)
    forced = None
    if rates:
        forced = torch.cat([torch.full((num, 1), rate, device=device) for rate in rates], 1)
    verdict = verify(logits, rows, state, uses, forced)
    state.commit(slots, verdict.token_ids, verdict.num_tokens, uses)
    uniform_rows = SampleRows.build(
        slots, slots + 3, rows.draft_tokens, lengths, rows.one_hot, rows.draft_probs
    )
    return verify(
        torch.zeros(uniform_rows.num_rows, vocab_size, device=device), uniform_rows, state, uses
    )


HOWS = [((), False), ((), True), ((0.5, 0.2), False)]


@pytest.mark.parametrize(
    ("rates", "fp64", "vocab_size"),  # two ways to search for thresholds
    [
        pytest.param(*HOWS[0], 40_000, id="lossless"),
        pytest.param(*HOWS[1], VOCAB, id="fp64", marks=pytest.mark.full),
        pytest.param(*HOWS[2], VOCAB, id="synthetic"),
    ],
)
def test_nothing_waits_for_the_device(
    monkeypatch: pytest.MonkeyPatch, vocab_size: int, rates: tuple[float, ...], fp64: bool
) -> None:
    """Fake tensors have no values: whatever asks for one, or for a shape that needs one, fails."""
    monkeypatch.setattr(thresholds, "reads_are_free", lambda device: False)
    for turn, chosen in enumerate(CHOICES):
        one_row = turn % 2 == 1 - fp64
        state = make_state(chosen, vocab_size, fp64)
        with FakeTensorMode(allow_non_fake_inputs=True):
            verdict = take_a_step(state, vocab_size, rates, one_row)
        assert verdict.token_ids.shape == (len(chosen), 2 if one_row else 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("vocab_size", [VOCAB, 40_000])
@pytest.mark.parametrize(("rates", "fp64"), HOWS, ids=["lossless", "fp64", "synthetic"])
def test_nothing_waits_for_a_real_device(
    vocab_size: int, rates: tuple[float, ...], fp64: bool, fused: bool
) -> None:
    """Neither eager nor captured; and a graph does what an eager step does."""
    for chosen in CHOICES:
        requests = [make_request(slot, kind) for slot, kind in enumerate(chosen)]
        state = SamplingState(len(chosen), vocab_size, "cuda", fp64)
        if not fused:
            state.ops = FP64_SAMPLING if fp64 else SAMPLING

        def admit(state: SamplingState = state, requests: list[Request] = requests) -> None:
            for slot, request in enumerate(requests):
                state.admit({slot: request})

        for one_row in (False, True):
            admit()
            take_a_step(state, vocab_size, rates, one_row)  # compiles kernels
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                admit()
                eager = take_a_step(state, vocab_size, rates, one_row)
                after = state.ints.clone()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    captured = take_a_step(state, vocab_size, rates, one_row)
                admit()
                graph.replay()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert torch.equal(captured.token_ids, eager.token_ids)
            assert torch.equal(captured.num_accepted, eager.num_accepted)
            assert torch.equal(state.ints, after)


# Drafts


def draft(
    state: SamplingState, logits: Tensor, legal: int = VOCAB, greedy_only: bool = False
) -> tuple[Tensor, Tensor | None]:
    slots = torch.arange(len(logits))
    positions = torch.full((len(logits),), 3)
    uses = state.uses(slots.tolist())
    probs = None
    if Uses.SAMPLING in uses and not greedy_only:  # into a view of something wider, as in a step
        whole = torch.full((len(logits), 3, min(legal, logits.shape[1])), torch.nan)
        probs = whole[:, 1]
    tokens = sample_draft(
        logits, slots, positions, state, uses, legal, greedy_only=greedy_only, probs_out=probs
    )
    assert probs is None or whole[:, ::2].isnan().all()
    return tokens, probs


def test_greedy_drafts() -> None:
    logits = torch.randn(4, VOCAB)
    for kind, greedy_only in ((GREEDY, False), (SAMPLED, True)):
        tokens, probs = draft(make_state([kind] * 4), logits, greedy_only=greedy_only)
        assert torch.equal(tokens, logits.argmax(-1))
        assert probs is None


def test_a_drafts_probabilities_are_those_it_was_sampled_from() -> None:
    kinds = [{"temperature": 0.7, "top_k": 3}, {"top_p": 0.8, "min_p": 0.05}, SAMPLED] * 20
    state = make_state(kinds)
    logits = torch.randn(60, VOCAB, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    tokens, probs = draft(state, logits)
    assert probs is not None
    expected = probabilities(
        logits.float(), state.temperature, state.top_k, state.top_p, state.min_p
    )
    assert torch.equal(probs, expected)
    keys = NoiseKeys(state.seeds, torch.full((60,), 3), state.steps)
    assert torch.equal(tokens, (probs.log() + gumbel(keys, Purpose.DRAFT, VOCAB)).argmax(-1))


def test_mixed_drafts_equal_single_ones() -> None:
    state = make_state([SAMPLED, GREEDY, {"temperature": 2.0, "top_k": 2}])
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(6))
    tokens, probs = draft(state, logits)
    assert probs is not None
    for index in range(3):
        uses = state.uses([index])
        alone_probs = torch.zeros(1, VOCAB)
        alone = sample_draft(
            logits[index : index + 1],
            torch.tensor([index]),
            torch.tensor([3]),
            state,
            uses,
            VOCAB,
            probs_out=alone_probs if Uses.SAMPLING in uses else None,
        )
        assert tokens[index] == alone[0]
        assert torch.equal(probs[index], alone_probs[0])


def test_padding_is_never_drafted() -> None:
    logits = torch.zeros(50, VOCAB)
    logits[:, 4:] = 30.0
    for kind in (GREEDY, SAMPLED):
        tokens, probs = draft(make_state([kind] * 50), logits, legal=4)
        assert (tokens < 4).all()
        assert probs is None or probs.shape == (50, 4)
