"""Sampling in C++ against plain torch, at every level of instructions that runs here.

Probabilities agree up to rounding, so choices may differ where two tokens are as good as equal:
tests of tokens use few enough numbers that this does not happen by chance.
"""
# ruff: noqa: E402  (without the module nothing else is imported)

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

cpp = pytest.importorskip("_slipstream_cpu")

from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.kernels.cpu.sampling import SAMPLING as CPP
from slipstream.kernels.reference import SAMPLING as PLAIN
from slipstream.kernels.reference import noise
from slipstream.kernels.reference.noise import NoiseKeys, Purpose
from slipstream.kernels.reference.processors import TRUNCATIONS, probabilities, process
from slipstream.kernels.sampling import SamplingOps
from slipstream.sampling.state import SamplingState, Uses
from slipstream.sampling.verification import needs_of, sample_draft
from tests.kernels.sampling_cases import (
    FULL,
    GREEDY,
    KINDS,
    LEAN,
    PROCESSED,
    SAMPLED,
    TRUNCATED,
    check_confidences,
    check_coupled,
    judge,
    make_batch,
    make_state,
    served_by,
)

pytestmark = pytest.mark.usefixtures("level")

CPU = torch.device("cpu")
VOCABULARIES = [1, 17, 33, 151, 1000, 4100]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = cpp.num_threads()
    cpp.set_num_threads(request.param)
    yield request.param
    cpp.set_num_threads(before)


# Noise


@pytest.mark.parametrize("purpose", list(Purpose))
def test_noise(purpose: Purpose) -> None:
    tokens = 4096
    for seed, position, step in (
        (0x0123456789ABCDEF, 0, 3), (-5, 6, 0), (1 << 62, (1 << 31) + 3, 1 << 31), (0, 77, 9),
    ):  # fmt: skip
        words = torch.empty(tokens, dtype=torch.int32)
        numbers = torch.empty(tokens)
        cpp.fill_noise(seed, position, step, int(purpose), words, numbers)
        keys = NoiseKeys(*(torch.tensor([number]) for number in (seed, position, step)))
        expected = noise._words(keys, purpose, torch.arange(tokens // 4))
        expected_words = torch.stack(expected, -1).flatten()
        assert torch.equal(words.long() & 0xFFFFFFFF, expected_words)
        u = noise._open_uniforms(expected).flatten()
        exact = -torch.log1p(-u.double())
        ulp = torch.nextafter(exact.float(), torch.tensor(torch.inf)) - exact.float()
        assert ((numbers.double() - exact).abs() <= 2 * ulp).all()


# Verification


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("most_drafts", [0, 1, 3, 8])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_verify(name: str, most_drafts: int, vocab_size: int) -> None:
    state = make_state(KINDS[name], vocab_size, CPU)
    accepted = 0
    for seed in range(2):
        for uniform_rows in (True, False):
            reduced = bool((seed + most_drafts + uniform_rows) % 2)
            logits, rows = make_batch(state, most_drafts, seed, reduced, uniform_rows)
            before = logits.clone()
            expected = judge(PLAIN, logits, rows, state)
            assert judge(CPP, logits, rows, state) == expected
            assert torch.equal(logits, before)
            accepted += sum(expected[2])
    assert accepted or not most_drafts


def test_bad_words_are_banned_first() -> None:
    state = make_state([SAMPLED, GREEDY], 37, CPU)
    for slot in range(2):
        params = replace(state.request(slot).params)
        request = Request("", [3, 4], params, 1, frozenset(), 9, 2, 0, bad_words=((4, 5), (6,)))
        state.admit({slot: request})
    logits, rows = make_batch(state, 1, 0, False, True)
    logits[:] = 0.0
    logits[:, 5], logits[:, 6] = 9.0, 8.0
    expected = judge(PLAIN, logits, rows, state)
    assert judge(CPP, logits, rows, state) == expected
    logits[:, 6] = torch.nan  # `judge` checks that the verdict shows it
    judge(CPP, logits, rows, state)


def test_processed_logits_equal_the_reference_to_the_bit() -> None:
    """The verdicts show it: the bits of equal logits decide which token is sampled."""
    for name in ("processed", "full"):
        for vocab_size in (151, 4100):
            state = make_state([kind | GREEDY for kind in KINDS[name]], vocab_size, CPU)
            for slot in range(5):
                logits, rows = make_batch(state, 3, slot, False, False)
                logits[0, 3] = -0.0
                uses = state.uses(range(5))
                processed = process(logits, rows, state.tensors(), needs_of(uses))
                drafted, _, accepted = judge(CPP, logits, rows, state)
                for index, tokens in enumerate(drafted):
                    row = int(rows.first_row[index]) + accepted[index]
                    assert tokens[accepted[index]] == int(processed[row].argmax())


def test_nodes_of_trees_may_be_deeper_than_their_drafts() -> None:
    """Rows of nodes judge nothing; without penalties they have no draft tokens either."""
    state = make_state([SAMPLED] * 3, 37, CPU)
    logits, rows = make_batch(state, 0, 0, False, True)
    row = torch.arange(3)
    rows = replace(rows, layout=(row, torch.tensor([0, 1, 4]), row))
    assert judge(CPP, logits, rows, state) == judge(PLAIN, logits, rows, state)


@pytest.mark.parametrize("kinds", [LEAN, TRUNCATED, FULL])
def test_all_but_one_token_may_be_masked(kinds: list[dict[str, Any]]) -> None:
    state = make_state(kinds, 300, CPU)
    logits, rows = make_batch(state, 0, 0, False, True)
    logits[:] = -torch.inf
    logits[:, 211] = -3.0
    assert judge(CPP, logits, rows, state)[0] == [[211]] * 5


def test_the_verdict_does_not_depend_on_threads(threads: int) -> None:
    state = make_state([*LEAN, *FULL], 9001, CPU)
    logits, rows = make_batch(state, 3, 1, False, True)
    tokens = judge(CPP, logits, rows, state)
    cpp.set_num_threads(1)
    assert judge(CPP, logits, rows, state) == tokens


@pytest.mark.parametrize("vocab_size", [37, 1000, 9001])
@pytest.mark.parametrize("reduced", [False, True])
def test_coupled_requests_get_the_tokens_of_plain_decoding(
    vocab_size: int, reduced: bool, threads: int
) -> None:
    check_coupled(CPP, PLAIN, vocab_size, reduced, CPU)


# Truncation


KINDS_OF_TRUNCATION: list[dict[str, Any]] = [
    {"top_k": 1}, {"top_k": 5}, {"top_k": 200}, {"top_p": 0.5}, {"top_p": 0.987},
    {"top_p": 1e-6}, {"min_p": 0.3}, {"min_p": 0.02, "top_p": 0.7}, {"top_k": 60, "top_p": 0.9},
    {"top_k": 7, "min_p": 0.2, "top_p": 0.45}, {}, {"top_p": 0.9, "temperature": 100.0},
    {"top_k": 1 << 40, "top_p": 1.0}, {"min_p": 1.0},
]  # fmt: skip


def state_of(kinds: list[dict[str, Any]], vocab_size: int) -> SamplingState:
    state = SamplingState(len(kinds), vocab_size, CPU)
    for slot, params in enumerate(kinds):
        request = Request("", [0], SamplingParams(**params), 1, frozenset(), 9, 4, 0)
        state.admit({slot: request})
    return state


def drafted(logits: Tensor, state: SamplingState, ops: SamplingOps) -> tuple[Tensor, Tensor]:
    slots = torch.arange(len(logits))
    out = torch.full_like(logits, torch.nan)
    needs = frozenset({Uses.SAMPLING, Uses.TOP_K, Uses.TOP_P, Uses.MIN_P})
    with served_by(ops, state):
        tokens = sample_draft(logits, slots, slots, state, needs, logits.shape[1], probs_out=out)
    return tokens, out


@pytest.mark.parametrize("vocab_size", [1, 17, 33, 151, 1000, 9000])
@pytest.mark.parametrize("spread", [0.05, 1.0, 20.0])
def test_thresholds(vocab_size: int, spread: float) -> None:
    """Flat and peaked rows, with ties: what is kept."""
    state = state_of(KINDS_OF_TRUNCATION, vocab_size)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(len(KINDS_OF_TRUNCATION), vocab_size, generator=generator) * spread
        if seed % 2 == 0:
            logits[::2] = (logits[::2] * 4).round() / 4
        expected = probabilities(
            logits, state.temperature, state.top_k, state.top_p, state.min_p, TRUNCATIONS
        )
        _, out = drafted(logits, state, CPP)
        # C++ has no numbers below the least normal one.
        out, expected = (torch.where(it < 1e-37, 0.0, it) for it in (out, expected))
        parted = (out > 0) != (expected > 0)
        if vocab_size > 1000:
            # Many tokens are equal, so rounding decides which is the last; few may differ.
            whole = torch.softmax(logits.double() / state.temperature.double().unsqueeze(1), -1)
            assert (whole * parted).sum(-1).max() < 5e-3
            assert parted.sum(-1).max() <= 2
        else:
            assert not parted.any()
        out = torch.where(parted, expected, out)
        torch.testing.assert_close(
            out, expected, rtol=5e-4 if vocab_size > 1000 else 2e-5, atol=1e-9
        )
        torch.testing.assert_close(out.sum(1), torch.ones(len(out)))


@pytest.mark.parametrize("kinds", [KINDS_OF_TRUNCATION])
def test_a_whole_vocabulary(kinds: list[dict[str, Any]], level: str) -> None:
    """A vocabulary of a real size: equal tokens and equal probabilities."""
    if level not in (cpp.levels()[0], cpp.levels()[-1]):
        pytest.skip("the lowest and the highest level stand for the others")
    state = state_of(kinds, 151_936)
    logits = torch.randn(len(kinds), 151_936, generator=torch.Generator().manual_seed(3)) * 3
    tokens, out = drafted(logits, state, CPP)
    expected_tokens, expected = drafted(logits, state, PLAIN)
    kept, expected_kept = (out > 0).sum(1), (expected > 0).sum(1)
    assert ((kept - expected_kept).abs() <= 1 + expected_kept // 1000).all()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(tokens, expected_tokens)


# Drafts and commits


@pytest.mark.parametrize("name", ["greedy", "lean", "truncated"])
@pytest.mark.parametrize(("vocab_size", "legal"), [(1, 1), (37, 30), (9000, 1 << 20)])
def test_confidences(name: str, vocab_size: int, legal: int, threads: int) -> None:
    check_confidences(CPP, name, vocab_size, legal, CPU)


@pytest.mark.parametrize("vocab_size", [1, 17, 33, 1000, 151_936])
def test_greedy_drafts(vocab_size: int, threads: int) -> None:
    state = make_state([GREEDY] * 9, vocab_size, CPU)
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(9, vocab_size, generator=generator) * 8).round()  # many ties
    slots = torch.arange(9)
    for count in range(1, 10):
        args = logits[:count], slots[:count], slots[:count], state, frozenset()
        with served_by(CPP, state):
            assert torch.equal(sample_draft(*args, vocab_size), logits[:count].argmax(-1))


def test_tensors_that_do_not_fit_are_refused() -> None:
    """C++ checks what it reads and writes, with and without `python -O`."""
    state = make_state(PROCESSED, 37, CPU)
    logits, rows = make_batch(state, 2, 0, False, True)
    tensors, needs, one = state.tensors(), needs_of(state.uses(range(5))), torch.tensor([1])
    for error, match, name, value in (
        (TypeError, "positions: dtype int32, not int64", "positions", rows.positions.int()),
        (ValueError, "one_hot: shape", "one_hot", rows.one_hot[1:]),
        (TypeError, "draft_probs: dtype float64", "draft_probs", torch.ones(5, 2, 37).double()),
        (ValueError, "draft_probs: shape", "draft_probs", torch.ones(5, 3, 37)),
        (ValueError, "allowed: shape", "allowed", torch.ones(15, 1, dtype=torch.int32)),
        (ValueError, "draft_vocabulary: shape", "draft_vocabulary", torch.arange(36)),
        (ValueError, "request: shape", "layout", (rows.slots, rows.slots, rows.slots)),
    ):
        with pytest.raises(error, match=match):
            CPP.verify(logits, replace(rows, **{name: value}), tensors, needs, None)
    with pytest.raises(ValueError, match="logits: not as many rows"):
        CPP.verify(logits[1:], rows, tensors, needs, None)
    with pytest.raises(ValueError, match="penalties need counts"):
        CPP.verify(logits, rows, state.tensors(history=False), needs, None)
    with pytest.raises(ValueError, match="bias"):
        CPP.verify(logits, rows, replace(tensors, bias=None), needs, None)
    with pytest.raises(TypeError, match="ints: dtype float32"):
        CPP.verify(logits, rows, replace(tensors, ints=tensors.floats), needs, None)
    with pytest.raises(ValueError, match="probs_out: shape"):
        CPP.draft(logits[:1], one, one, tensors, needs, 37, torch.empty(1, 36), None, None)
    with pytest.raises(ValueError, match="confidence_out: shape"):
        CPP.draft(logits[:1], one, one, tensors, needs, 37, None, torch.empty(2), None)
    with pytest.raises(TypeError, match="slots: dtype int32"):
        CPP.draft(logits[:1], one.int(), one, tensors, needs, 37, torch.empty(1, 37), None, None)
    with pytest.raises(ValueError, match="vocabulary: shape"):
        CPP.draft(logits[:1], one, one, tensors, needs, 37, torch.empty(1, 37), None, one)
    with pytest.raises(ValueError, match="no such slot"):
        CPP.commit(one + 9, one.view(1, 1), one, tensors)
    with pytest.raises(TypeError, match="num_tokens: dtype bool"):
        CPP.commit(one, one.view(1, 1), one > 0, tensors)
