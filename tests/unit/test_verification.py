"""Verification: rules and edge cases. Distributions are tested in tests/lossless."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.sampling import verification
from slipstream.sampling.logits import probabilities
from slipstream.sampling.noise import NoiseKeys, Purpose, gumbel
from slipstream.sampling.rows import SampleRows
from slipstream.sampling.state import SamplingState
from slipstream.sampling.verification import Verdict, Verification, sample_draft, verify

VOCAB = 6
GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 1.0}


def make_state(params: Sequence[dict[str, Any]], vocab_size: int = VOCAB) -> SamplingState:
    state = SamplingState(len(params), vocab_size, "cpu")
    for slot, arguments in enumerate(params):
        request = Request(
            request_id=str(slot),
            token_ids=[0, 1, 2],
            params=SamplingParams(**arguments),
            seed=100 + slot,
            stop_token_ids=frozenset(),
            max_tokens=100,
            num_speculative_tokens=4,
            arrival=slot,
        )
        request.num_steps = slot + 1
        state.admit(slot, request)
    return state


def make_rows(
    drafts: Sequence[Sequence[int]],
    probs: Tensor | None = None,
    slots: Sequence[int] | None = None,
    one_hot: Sequence[bool] | None = None,
) -> SampleRows:
    longest = max(map(len, drafts))
    padded = [[*draft, *[0] * (longest - len(draft))] for draft in drafts]
    return SampleRows.build(
        range(len(drafts)) if slots is None else slots,
        [3] * len(drafts),
        torch.tensor(padded, dtype=torch.int64).view(len(drafts), longest),
        [len(draft) for draft in drafts],
        [probs is None] * len(drafts) if one_hot is None else one_hot,
        probs,
        "cpu",
    )


def certain(*tokens: int, vocab_size: int = VOCAB) -> Tensor:
    """Logits of a target that is sure of each row's token."""
    return torch.full((len(tokens), vocab_size), -50.0).scatter_(
        1, torch.tensor(tokens).unsqueeze(1), 50.0
    )


def fix_uniform(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    def constant(keys: NoiseKeys, purpose: Purpose) -> Tensor:
        assert purpose is Purpose.ACCEPT
        return torch.full(keys.seeds.shape, value)

    monkeypatch.setattr(verification, "uniform", constant)


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
    verdict = verify(certain(*target), rows, make_state([params]))
    assert verdict.token_ids.tolist() == [expected]
    assert verdict.num_tokens.item() == sum(token >= 0 for token in expected)
    check_invariants(verdict, rows)


def test_greedy_uses_processed_logits() -> None:
    state = make_state([GREEDY | {"logit_bias": {4: 100.0}}, GREEDY | {"repetition_penalty": 9.0}])
    logits = torch.tensor([[0.0, 5, 0, 3, 0, 0]] * 4)
    verdict = verify(logits, make_rows([[4], [3]]), state)
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
    together = verify(logits, rows, state)
    check_invariants(together, rows)
    for index, draft in enumerate(drafts):
        width = len(draft)
        alone = verify(
            logits[rows.rows_of([index])],
            make_rows([draft], probs[index : index + 1, :width], [index], [one_hot[index]]),
            state,
        )
        assert together.num_accepted[index] == alone.num_accepted[0]
        assert torch.equal(together.token_ids[index, : width + 1], alone.token_ids[0])


def test_verify_changes_neither_logits_nor_drafts_nor_state() -> None:
    state = make_state([SAMPLED, GREEDY | {"presence_penalty": 1.0}])
    probs = torch.full((2, 2, VOCAB), 1 / VOCAB)
    rows = make_rows([[1, 2], [3, 4]], probs, one_hot=[False, True])
    logits = torch.randn(6, VOCAB)
    kept = [t.clone() for t in (logits, probs, rows.draft_tokens, state.steps, state.seeds)]
    first = verify(logits, rows, state)
    after = [logits, probs, rows.draft_tokens, state.steps, state.seeds]
    assert all(torch.equal(a, b) for a, b in zip(kept, after, strict=True))
    assert torch.equal(verify(logits, rows, state).token_ids, first.token_ids)


@pytest.mark.parametrize("one_hot", [True, False])
def test_zero_probability_is_never_accepted(monkeypatch: pytest.MonkeyPatch, one_hot: bool) -> None:
    fix_uniform(monkeypatch, 0.0)
    logits = torch.zeros(2, VOCAB)
    logits[:, 3] = -torch.inf
    probs = None if one_hot else torch.full((1, 1, VOCAB), 1 / VOCAB)
    verdict = verify(logits, make_rows([[3]], probs), make_state([SAMPLED]))
    assert verdict.num_accepted.item() == 0
    assert verdict.token_ids[0, 0] != 3


def test_acceptance_is_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(2, 4)  # p = 1/4
    probs = torch.tensor([[[0.5, 0.5, 0.0, 0.0]]])
    for u, accepted in ((0.5, 0), (0.5 - 2**-24, 1)):
        fix_uniform(monkeypatch, u)
        verdict = verify(logits, make_rows([[1]], probs), make_state([SAMPLED], 4))
        assert verdict.num_accepted.item() == accepted


def test_one_hot_draft_is_accepted_with_the_target_probability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.zeros(2, 4)
    for u, accepted in ((0.25, 0), (0.25 - 2**-24, 1)):
        fix_uniform(monkeypatch, u)
        verdict = verify(logits, make_rows([[1]]), make_state([SAMPLED], 4))
        assert verdict.num_accepted.item() == accepted


def test_a_refused_token_of_a_one_hot_draft_is_not_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fix_uniform(monkeypatch, 1 - 2**-24)
    state = make_state([SAMPLED] * 300, 4)
    verdict = verify(torch.zeros(600, 4), make_rows([[1]] * 300), state)
    assert verdict.num_accepted.sum() == 0
    assert sorted(verdict.token_ids[:, 0].unique().tolist()) == [0, 2, 3]


def test_the_residual_is_where_the_target_exceeds_the_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fix_uniform(monkeypatch, 1 - 2**-24)
    probs = torch.tensor([[[0.1, 0.4, 0.4, 0.1]]]).expand(200, 1, 4)
    verdict = verify(
        torch.zeros(400, 4), make_rows([[1]] * 200, probs), make_state([SAMPLED] * 200, 4)
    )
    assert verdict.num_accepted.sum() == 0
    assert sorted(verdict.token_ids[:, 0].unique().tolist()) == [0, 3]


def test_an_empty_residual_samples_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_is_accepted", lambda u, p, q: torch.zeros_like(p) > 0)
    logits = torch.zeros(400, 4)
    logits[:, 0] = -torch.inf
    state = make_state([SAMPLED] * 200, 4)
    probs = logits[:200].softmax(-1).unsqueeze(1)
    verdict = verify(logits, make_rows([[1]] * 200, probs), state)
    assert sorted(verdict.token_ids[:, 0].unique().tolist()) == [1, 2, 3]


@pytest.mark.parametrize("width", [3, 9])
def test_draft_vocabulary_of_another_width(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Only ids that both know count: what is missing in q is 0 there, what is too much is cut."""
    fix_uniform(monkeypatch, 1 - 2**-24)
    probs = torch.zeros(200, 1, width)
    probs[:, :, :2] = 0.5
    verdict = verify(
        torch.zeros(400, VOCAB), make_rows([[1]] * 200, probs), make_state([SAMPLED] * 200)
    )
    assert verdict.num_accepted.sum() == 0
    assert sorted(verdict.token_ids[:, 0].unique().tolist()) == [2, 3, 4, 5]
    # A draft token that q does not know can only be wrong bookkeeping; it must not crash.
    verify(torch.zeros(2, VOCAB), make_rows([[5]], probs[:1]), make_state([SAMPLED]))


def test_a_padded_draft_equals_a_shorter_one() -> None:
    generator = torch.Generator().manual_seed(8)
    state = make_state([SAMPLED] * 100)
    logits = torch.randn(300, VOCAB, generator=generator)
    drafted = torch.randint(VOCAB, (100,), generator=generator).tolist()
    short = make_rows([[token] for token in drafted])
    padded = make_rows([[token, -1] for token in drafted])
    first = logits.view(100, 3, VOCAB)[:, :2].reshape(200, VOCAB)
    expected = verify(first, short, state)
    got = verify(logits, padded, state)
    assert torch.equal(got.num_accepted, expected.num_accepted)
    assert torch.equal(got.token_ids[:, :2], expected.token_ids)


@pytest.mark.parametrize("fp64", [False, True])
def test_plain_sampling_is_the_target_noise(fp64: bool) -> None:
    """Without a draft: argmax(log p + noise), keyed by seed and position alone."""
    state = make_state([SAMPLED] * 50)
    logits = torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(1))
    got = verify(logits, make_rows([[]] * 50), state, Verification(fp64)).token_ids[:, 0]
    keys = NoiseKeys(state.seeds, torch.full((50,), 3), torch.zeros(50, dtype=torch.int64))
    p = logits.softmax(-1).to(torch.float64 if fp64 else torch.float32)
    assert torch.equal(got, (p.log() + gumbel(keys, Purpose.TARGET, VOCAB, fp64)).argmax(-1))


def test_the_bonus_token_equals_the_plain_token(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_uniform(monkeypatch, 0.0)
    state = make_state([SAMPLED] * 50)
    logits = torch.randn(100, VOCAB, generator=torch.Generator().manual_seed(4))
    drafted = verify(logits, make_rows([[2]] * 50), state)
    assert (drafted.num_accepted == 1).all()
    plain = make_rows([[]] * 50)
    object.__setattr__(plain, "positions", plain.positions + 1)
    expected = verify(logits.view(50, 2, VOCAB)[:, 1], plain, state)
    assert torch.equal(drafted.token_ids[:, 1], expected.token_ids[:, 0])


def test_steps_change_acceptance_but_not_plain_tokens() -> None:
    state = make_state([SAMPLED] * 200)
    logits = torch.zeros(400, VOCAB)
    plain, drafted = make_rows([[]] * 200), make_rows([[1]] * 200)
    before = verify(logits[:200], plain, state), verify(logits, drafted, state)
    state.steps += 1
    after = verify(logits[:200], plain, state), verify(logits, drafted, state)
    assert torch.equal(before[0].token_ids, after[0].token_ids)
    assert not torch.equal(before[1].num_accepted, after[1].num_accepted)


@pytest.mark.parametrize("vocab_size", [VOCAB, 40_000])  # two ways to search for top_p
def test_nothing_waits_for_the_device(vocab_size: int) -> None:
    """Fake tensors have no values: whatever asks for one, or for a shape that needs one, fails."""
    kinds: list[dict[str, Any]] = [
        GREEDY,
        {"top_k": 3, "top_p": 0.9},
        {"top_p": 0.9, "min_p": 0.1},
        {"presence_penalty": 1.0, "logit_bias": {3: 1.0}, "min_tokens": 2},
    ]
    for chosen in (kinds, kinds[:1], kinds[1:2], kinds[2:]):
        state = make_state(chosen, vocab_size)
        probs = torch.zeros(len(chosen), 2, vocab_size)
        rows = make_rows([[1, 2], *[[3]] * (len(chosen) - 1)], probs)
        with FakeTensorMode(allow_non_fake_inputs=True):
            logits = torch.zeros(rows.num_rows, vocab_size)
            verdict = verify(logits, rows, state)
            state.commit(rows.slots, verdict.token_ids, verdict.num_tokens)
            sample_draft(
                logits[rows.first_row], rows.slots, rows.host_slots, rows.positions, state, 5
            )
        assert verdict.token_ids.shape == (len(chosen), 3)


# Drafts


def draft(
    state: SamplingState, logits: Tensor, legal: int = VOCAB, greedy_only: bool = False
) -> tuple[Tensor, Tensor | None]:
    slots = torch.arange(len(logits))
    positions = torch.full((len(logits),), 3)
    return sample_draft(
        logits, slots, slots.tolist(), positions, state, legal, greedy_only=greedy_only
    )


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
        slot = torch.tensor([index])
        alone, alone_probs = sample_draft(
            logits[index : index + 1], slot, [index], torch.tensor([3]), state, VOCAB
        )
        assert tokens[index] == alone[0]
        if alone_probs is None:
            assert not probs[index].any()
        else:
            assert torch.equal(probs[index], alone_probs[0])


def test_padding_is_never_drafted() -> None:
    logits = torch.zeros(50, VOCAB)
    logits[:, 4:] = 30.0
    for kind in (GREEDY, SAMPLED):
        tokens, probs = draft(make_state([kind] * 50), logits, legal=4)
        assert (tokens < 4).all()
        assert probs is None or probs.shape == (50, 4)
