"""Drafting by shares of the vocabulary against whole rows, with ranks that are threads."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.columns import ALL_COLUMNS, Columns
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.reference import REFERENCE, SAMPLING, with_columns
from slipstream.kernels.sampling import SampleRows
from slipstream.layers.embedding import LanguageModelHead, WholeRows
from slipstream.layers.parameters import WHOLE, Share
from slipstream.sampling.state import SamplingState, Uses
from slipstream.sampling.verification import sample_draft
from slipstream.speculative.drafter import Draft
from tests.kernels.sampling_cases import KINDS, judge, make_state
from tests.kernels.test_columns import CPU, Exchange

NUM, PLACES, WIDTH = 5, 3, 16
SLOTS = torch.tensor([4, 0, 1, 3, 2])
POSITIONS = torch.tensor([9, 30, 7, 12, 8])


def head_of(weight: Tensor, columns: Columns) -> LanguageModelHead:
    """This rank's share of a head."""
    share = WHOLE
    if columns.gather is not None:
        share = Share(columns.rank, columns.num_ranks, gather=columns.gather)
        weight = weight.chunk(columns.num_ranks)[columns.rank].contiguous()
    return LanguageModelHead(REFERENCE, DenseMatrix(weight), share)


class Drafting:
    """A target's logits, and a drafter that is often right."""

    def __init__(self, name: str, vocab_size: int, chosen: Tensor | None = None) -> None:
        generator = torch.Generator().manual_seed(vocab_size)
        self.kinds, self.vocab_size, self.chosen = KINDS[name], vocab_size, chosen
        self.weight = torch.randn(vocab_size, WIDTH, generator=generator)
        self.hidden = torch.randn(PLACES, NUM, WIDTH, generator=generator)
        logits = self.hidden @ self.weight.T
        logits += torch.randn(logits.shape, generator=generator)
        self.logits = torch.cat((logits, logits[:1])).transpose(0, 1).flatten(0, 1)  # [5 * 4, V]

    def state(self, columns: Columns) -> SamplingState:
        state = make_state(self.kinds, self.vocab_size, CPU)
        state.columns = columns
        state.ops = SAMPLING if columns.gather is None else with_columns(columns, SAMPLING)
        return state

    def draft(self, columns: Columns) -> Draft:
        """This rank's draft."""
        state, head = self.state(columns), head_of(self.weight, columns)
        head = head if self.chosen is None else head.over(self.chosen)
        uses, width = state.uses(range(NUM)), head.num_tokens
        shape = (NUM, PLACES, width // columns.num_ranks)
        probs = torch.empty(shape) if Uses.SAMPLING in uses else None
        tokens, confidences = torch.empty(NUM, PLACES, dtype=torch.int64), torch.empty(NUM, PLACES)
        for place in range(PLACES):
            out = torch.empty(NUM)
            picked = sample_draft(
                *(head(self.hidden[place]), SLOTS, POSITIONS + place, state, uses, width),
                probs_out=None if probs is None else probs[:, place],
                vocabulary=head.tokens,
                confidence_out=out,
                shares=columns.gather is not None,
            )
            tokens[:, place] = picked if head.tokens is None else head.tokens[picked]
            confidences[:, place] = out
        one_hot = state.temperature[SLOTS] == 0
        shares = columns.gather is not None
        lengths = torch.full((NUM,), PLACES)
        return Draft(
            tokens, lengths, one_hot, probs, head.tokens, confidences=confidences, shares=shares
        )

    def verdict(self, draft: Draft, columns: Columns) -> Any:
        """This rank's verdict on a draft."""
        chances = draft.chances(columns)
        rows = SampleRows.build(
            *(SLOTS, POSITIONS, draft.token_ids, draft.num_tokens, draft.one_hot),
            *(draft.probs, draft.vocabulary),
            certain=draft.certain_tokens(chances),
            draft_chances=chances if draft.shares else None,
        )
        share = self.logits.chunk(columns.num_ranks, -1)[columns.rank].contiguous()
        state = self.state(columns)
        return judge(state.ops, share, rows, state)


def joined(drafts: list[Draft]) -> Draft:
    """A draft with the probabilities of all ranks."""
    first = drafts[0]
    probs = None if first.probs is None else torch.cat([it.probs for it in drafts], -1)  # type: ignore[misc]
    return Draft(first.token_ids, first.num_tokens, first.one_hot, probs, first.vocabulary)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("num_ranks", "vocab_size"), [(2, 150), (3, 36)])
def test_drafts_and_their_verdicts_are_those_of_whole_rows(
    name: str, num_ranks: int, vocab_size: int
) -> None:
    case = Drafting(name, vocab_size)
    expected = case.draft(ALL_COLUMNS)
    drafts = Exchange(num_ranks).run(case.draft)
    for found in drafts:
        assert torch.equal(found.token_ids, expected.token_ids)
        assert found.confidences is not None
        torch.testing.assert_close(found.confidences, expected.confidences)
    if expected.probs is not None:
        torch.testing.assert_close(joined(drafts).probs, expected.probs)
    verdict = case.verdict(expected, ALL_COLUMNS)
    assert sum(verdict[2])
    exchange = Exchange(num_ranks)
    assert exchange.run(lambda it: case.verdict(drafts[it.rank], it)) == [verdict] * num_ranks


# Unevenly over the ranks; none of the first rank's, none of the last one's.
CHOSEN = [
    torch.arange(0, 90, 2) ** 2 % 90,
    torch.arange(40, 90, 3),
    torch.tensor([0, 1, 29, 30, 44]),
]


@pytest.mark.parametrize("name", ["greedy", "full", "full block", "coupled"])
@pytest.mark.parametrize("chosen", CHOSEN, ids=["uneven", "not first", "not last"])
def test_chosen_tokens(name: str, chosen: Tensor) -> None:
    case = Drafting(name, 90, chosen.unique())
    assert case.chosen is not None
    drafts = Exchange(3).run(case.draft)
    whole, alone = joined(drafts), case.draft(ALL_COLUMNS)
    assert whole.vocabulary is not None
    assert bool((whole.vocabulary.diff() >= 0).all())
    assert torch.isin(whole.token_ids, case.chosen).all()
    if name == "greedy":
        assert torch.equal(whole.token_ids, alone.token_ids)
    if whole.probs is not None and alone.probs is not None:
        of_tokens = torch.zeros(NUM, PLACES, 90).index_add_(2, whole.vocabulary, whole.probs)
        torch.testing.assert_close(of_tokens[:, :, case.chosen], alone.probs)
    if name == "coupled":  # drawn with the noise of the tokens
        is_coupled = torch.tensor(["verification" in KINDS[name][4 - it] for it in SLOTS])
        assert torch.equal(whole.token_ids[is_coupled], alone.token_ids[is_coupled])
    verdict = case.verdict(whole, ALL_COLUMNS)
    exchange = Exchange(3)
    assert exchange.run(lambda it: case.verdict(drafts[it.rank], it)) == [verdict] * 3


def test_another_models_vocabulary_is_put_together() -> None:
    case = Drafting("greedy", 90)
    chosen = CHOSEN[0].unique()

    def logits(columns: Columns) -> Tensor:
        head = WholeRows(head_of(case.weight, columns))
        return torch.cat((head(case.hidden[0]), head.over(chosen)(case.hidden[0])), -1)

    head = head_of(case.weight, ALL_COLUMNS)
    expected = torch.cat((head(case.hidden[0]), head.over(chosen)(case.hidden[0])), -1)
    for found in Exchange(2).run(logits):
        torch.testing.assert_close(found, expected)


# Bytes that a rank gives of each row, with and without truncation, beside 4 for confidences.
BYTES = {"greedy": 8, "lean": 8 + 4 + 8, "coupled": 8 + 4 + 8 + 8 + 8 + 2 * 512}


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("vocab_size", [512, 8192])
def test_few_bytes_are_exchanged_however_large_the_vocabulary_is(
    name: str, vocab_size: int
) -> None:
    exchange = Exchange(2)
    case = Drafting(name, vocab_size)
    case.weight *= 3  # so that few tokens have nearly all of the mass
    drafts = exchange.run(case.draft)
    assert exchange.num_bytes == [(BYTES[name] + 4) * NUM * PLACES] * 2
    exchange = Exchange(2)
    exchange.run(lambda it: drafts[it.rank].chances(it))
    assert exchange.num_bytes == [0 if name == "greedy" else 4 * NUM * PLACES] * 2
