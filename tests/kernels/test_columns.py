"""Verification by shares of the vocabulary against whole rows, with ranks that are threads."""

from collections.abc import Callable
from dataclasses import replace
from threading import Barrier, Thread
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from slipstream.kernels.columns import Columns
from slipstream.kernels.reference import FP64_SAMPLING, SAMPLING, thresholds, with_columns
from slipstream.kernels.reference.processors import probabilities
from slipstream.kernels.sampling import SampleRows, SamplingOps
from slipstream.sampling.logits import token_logprobs
from slipstream.sampling.state import SamplingState
from tests.kernels.sampling_cases import GREEDY, KINDS, SAMPLED, judge, make_batch, make_state

T = TypeVar("T")
CPU = torch.device("cpu")


class Exchange:
    """The exchanges between ranks, and the bytes that each rank has sent."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks, self.num_bytes = num_ranks, [0] * num_ranks
        self._barrier, self._given = Barrier(num_ranks), [torch.empty(0)] * num_ranks

    def columns(self, rank: int) -> Columns:
        def gather(mine: Tensor) -> Tensor:
            self.num_bytes[rank] += mine.numel() * mine.element_size()
            self._given[rank] = mine.clone()
            self._barrier.wait(60)
            joined = torch.cat(self._given, -1)
            self._barrier.wait(60)
            return joined

        return Columns(rank, self.num_ranks, gather)

    def run(self, call: Callable[[Columns], T]) -> list[T]:
        """The results of all ranks."""
        found: dict[int, T] = {}

        def work(rank: int) -> None:
            found[rank] = call(self.columns(rank))

        threads = [Thread(target=work, args=(rank,)) for rank in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        return [found[rank] for rank in range(self.num_ranks)]


def judge_shares(
    exchange: Exchange,
    logits: Tensor,
    rows: SampleRows,
    make: Callable[[], SamplingState],
    ops: SamplingOps = SAMPLING,
    rates: Tensor | None = None,
) -> list[Any]:
    """The verdict of every rank."""

    def verdict(columns: Columns) -> tuple[list[Any], ...]:
        state = make()
        state.columns = columns
        share = logits.chunk(exchange.num_ranks, -1)[columns.rank].contiguous()
        known = replace(rows, peaks=columns.peaks(share))
        return judge(with_columns(columns, ops), share, known, state, rates)

    return exchange.run(verdict)


@pytest.fixture(params=[True, False], ids=["host looks", "captured"])
def looks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the host may look at numbers, which on a GPU it may not."""
    monkeypatch.setattr(thresholds, "reads_are_free", lambda device: request.param)
    return bool(request.param)


@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("num_ranks", "vocab_size"), [(2, 150), (3, 36), (2, 9000)])
def test_the_verdict_is_that_of_whole_rows(name: str, num_ranks: int, vocab_size: int) -> None:
    accepted = 0
    for most_drafts in (0, 3):
        for reduced in (False, True):

            def make() -> SamplingState:
                return make_state(KINDS[name], vocab_size, CPU)

            state = make()
            logits, rows = make_batch(state, most_drafts, 7, reduced, not reduced)
            expected = judge(SAMPLING, logits, rows, state)
            assert judge_shares(Exchange(num_ranks), logits, rows, make) == [expected] * num_ranks
            accepted += sum(expected[2])
    assert accepted


def test_wide_noise_and_grammars_and_broken_rows() -> None:
    for ops in (SAMPLING, FP64_SAMPLING):
        state = make_state(KINDS["full"], 96, CPU)
        logits, rows = make_batch(state, 2, 3, False, True)
        generator = torch.Generator().manual_seed(1)
        words = torch.randint(-(1 << 31), 1 << 31, (rows.num_rows, 3), generator=generator)
        rows = SampleRows(**{**vars_of(rows), "allowed": words.to(torch.int32)})
        logits[0, 70] = torch.nan
        logits[1] = -torch.inf
        expected = judge(ops, logits, rows, state)
        found = judge_shares(
            Exchange(2), logits, rows, lambda: make_state(KINDS["full"], 96, CPU), ops
        )
        assert found[0] == found[1]
        # Any token is right for broken rows, whose requests the engine ends.
        broken = set(rows.request[:2].tolist())
        for part, other in zip(expected, found[0], strict=True):
            for index, (one, two) in enumerate(zip(part, other, strict=True)):
                assert one == two or index in broken


def test_the_peaks_of_shares_are_those_of_whole_rows() -> None:
    """Bit for bit, the first among equals, also for rows without finite numbers."""
    rows = torch.randn(7, 30, generator=torch.Generator().manual_seed(2))
    rows[1, 3] = rows[1, 17] = rows[1, 18] = 9.0
    rows[2, 25] = rows[2, 29] = torch.nan
    rows[3, 2], rows[3, 28] = torch.inf, torch.nan
    rows[4] = -torch.inf
    rows[5, 12], rows[6] = torch.inf, 0.0
    for kind in (torch.float32, torch.float64):
        whole = rows.to(kind)
        largest, tokens = Columns().peaks(whole)
        exchange = Exchange(3)
        for found in exchange.run(
            lambda it, whole=whole: it.peaks(whole.chunk(3, -1)[it.rank])  # type: ignore[misc]
        ):
            torch.testing.assert_close(found[0], largest, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(found[1], tokens)
        assert exchange.num_bytes == [7 * 2 * kind.itemsize] * 3


def vars_of(rows: SampleRows) -> dict[str, Any]:
    """The fields of rows."""
    return {name: getattr(rows, name) for name in SampleRows.__dataclass_fields__}


def test_rates_and_bad_words() -> None:
    words = [SAMPLED | {"bad_words": ["x"]}, GREEDY | {"bad_words": ["x"]}]

    def make() -> SamplingState:
        state = make_state(words, 64, CPU)
        for slot, tokens in enumerate(((40,), (9, 3))):
            state.request(slot).bad_words = (tokens, (50,))
        return state

    state = make()
    logits, rows = make_batch(state, 3, 3, False, True)
    logits[:, 40] += 4
    logits[:, 50] += 4
    rates = torch.full((2, 3), 0.6)
    for chances in (None, rates):
        expected = judge(SAMPLING, logits, rows, state, chances)
        assert judge_shares(Exchange(2), logits, rows, make, rates=chances) == [expected] * 2
    assert 50 not in expected[0][0]


# Bytes that a rank gives: for a row of logits, and for a request with K draft tokens.
BYTES: dict[str, tuple[int, int]] = {
    "greedy": (8, 0),
    "lean": (8 + 4, 4 * 3 + 12),
    "coupled": (8 + 8 + 4 + 8 + 8 + 2 * 512, 4 * 3 + 12),
    "block": (8 + 4, 4 * 3 + 4 * 4 + 12),
    "full": (8 + 8 + 4 + 8 + 2 * 512, 4 * 3 + 12),
}


@pytest.mark.parametrize("name", BYTES)
def test_few_bytes_are_exchanged_however_large_the_vocabulary_is(name: str) -> None:
    row, request = BYTES[name]
    for vocab_size in (512, 8192):

        def make(vocab_size: int = vocab_size) -> SamplingState:
            return make_state(KINDS[name], vocab_size, CPU)

        logits, rows = make_batch(make(), 3, 5, False, True)
        logits = logits * 3  # so that few tokens have nearly all of the mass
        exchange = Exchange(2)
        judge_shares(exchange, logits, rows, make)
        assert exchange.num_bytes == [row * rows.num_rows + request * rows.num_requests] * 2


def test_a_histogram_takes_the_place_of_candidates_that_lack_the_mass() -> None:
    flat = torch.zeros(1, 20_000)
    share, keep_all = torch.tensor([0.9]), torch.tensor([0])
    one, none = torch.ones(1), torch.zeros(1)
    exchange = Exchange(2)

    def distribution(columns: Columns) -> Tensor:
        logits = flat.chunk(2, -1)[columns.rank] + columns.tokens(flat[:, :10_000]) * 1e-5
        return probabilities(logits, one, keep_all, share, none, columns=columns)

    found = torch.cat(exchange.run(distribution), -1)
    expected = (torch.arange(20_000) * 1e-5).unsqueeze(0)
    torch.testing.assert_close(found, probabilities(expected, one, keep_all, share, none))
    assert exchange.num_bytes == [4 + 512 + 8 + 512 + 4 * 8 * 257 + 4] * 2


@pytest.mark.parametrize("normalised", [True, False])
def test_logprobs(normalised: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 40, generator=generator) * 4
    tokens = torch.tensor([0, 39, 7, 20, 19])
    expected = token_logprobs(logits, tokens, 6, normalised)
    exchange = Exchange(2)
    for found in exchange.run(
        lambda columns: token_logprobs(
            logits.chunk(2, -1)[columns.rank], tokens, 6, normalised, columns
        )
    ):
        assert torch.equal(found.top_ids, expected.top_ids)
        assert torch.equal(found.ranks, expected.ranks)
        torch.testing.assert_close(found.logprobs, expected.logprobs)
        torch.testing.assert_close(found.top_logprobs, expected.top_logprobs)
    assert exchange.num_bytes == [5 * (4 + 4 + 4 + 6 * 12 + 8)] * 2
