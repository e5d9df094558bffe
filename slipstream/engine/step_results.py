"""Inputs of a step as numbers; its results as one tensor, which is copied to the host at once."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.core.batch import (
    NUM_BINS,
    Batch,
    Committed,
    ScheduledRequest,
    StepReport,
    StepTimes,
    Trim,
)
from slipstream.kernels.devices import Download, send, upload
from slipstream.kernels.preparation import PreparationOps
from slipstream.runner.device_batch import Guesses, PackedBatch
from slipstream.runner.model_runner import Forward, ModelRunner
from slipstream.runner.prefix_groups import PrefixGroups
from slipstream.runner.rows import PromptRows, prompt_rows
from slipstream.sampling.state import SamplingState, Uses
from slipstream.sampling.verification import Verdict
from slipstream.speculative.drafter import Draft, Needs


def pack(
    batch: Batch,
    guesses: Guesses | None,
    sampling: SamplingState,
    needs: Needs,
    groups: PrefixGroups | None,
) -> PackedBatch:
    """The batch as numbers.

    Args:
        guesses: see `Drafter.prepare`.
        needs: what the drafter reads of the target's pass.
        groups: finds the requests whose shared blocks are read once; None: none are.
    """
    items = batch.requests
    drafts = [item.num_draft_tokens for item in items]
    if guesses is not None:
        guessed = zip(guesses, drafts, strict=True)
        drafts = [most if guess is None else len(guess) for guess, most in guessed]
    slots = [item.request.slot for item in items]
    uses = sampling.uses(slots)
    width = max(drafts, default=0)
    if Uses.GRAMMAR in uses:  # grammars may add draft tokens where the drafter has none
        width = max(item.num_draft_tokens for item in items)
    trims = [item.trim for item in items]
    if guesses is not None or Uses.GRAMMAR in uses:  # such tokens have no confidences
        pairs = zip(drafts, trims, strict=True)
        drafts = [most if it is None else min(most, it.num_rows) for most, it in pairs]
        trims = []
    stops = [item.stops for item in items]
    again = [int(needs.features and item.admitted and item.start > 0) for item in items]
    prompts: Sequence[PromptRows | None] = ()
    if any([item.request.spans for item in items]):
        prompts = [
            prompt_rows(item.request.spans, item.start - less, item.start + item.num_new_tokens)
            for item, less in zip(items, again, strict=True)
        ]
    return PackedBatch(
        slots=slots,
        num_new_tokens=[item.num_new_tokens for item in items],
        num_draft_tokens=drafts,
        at_end=[item.reaches_end for item in items],
        width=width,
        uses=uses,
        guesses=guesses,
        rereads=again if any(again) else None,
        reads_all=needs.hidden or any(item.reads_prompt for item in items),
        stops=stops if any(stops) else (),
        trims=trims if any(trims) else (),
        saved=[item.saved for item in items],
        prompts=prompts if any(prompts) else (),
        shared=None if groups is None else groups.of(batch),
    )


class TrimRates:
    """`Trim.rates`, which all requests of a step have in common, on the device.

    Attributes:
        chances: [NUM_BINS] float32.
    """

    def __init__(self, device: torch.device) -> None:
        self._rates: tuple[float, ...] = (1.0,) * NUM_BINS  # what `chances` holds
        self.chances = torch.ones(NUM_BINS, dtype=torch.float32, device=device)

    def set(self, trims: Sequence[Trim | None]) -> None:
        """Copy the rates of a step to the device, if it has trims and they have changed."""
        rates = next((it.rates for it in trims if it is not None), self._rates)
        if rates != self._rates:
            self.chances.copy_(send(torch.tensor(rates), self.chances.device))
            self._rates = rates


_NUM_COUNTS = 5  # columns of `Outcome.numbers` after what each token has
_NUM_TIMES = 4  # columns of `Outcome.numbers` after the counts
_FIRST_ROW, _CACHED = -_NUM_TIMES - 2, -_NUM_TIMES - 1
_LOOKED_UP = 1 << 32
_EXPONENT = 0x7F800000  # bits of a float32: all set if it is not finite, none if it is 0


@dataclass(frozen=True, eq=False)
class Proposal:
    """A draft, with the times at which the step began and drafting ended."""

    draft: Draft
    began: Tensor | int
    drafted: Tensor | int

    def first(self, requests: int) -> "Proposal":
        """The rows of the first `requests`, without the padding of a captured batch."""
        return replace(self, draft=self.draft.first(requests))


@dataclass(frozen=True, eq=False)
class Outcome:
    """Results of the device's part of a step.

    Attributes:
        numbers: [R, 2 (K + 1) + 9] int64, for the host. Columns: the K + 1 token ids of the
            verdict; the bits of the largest logit of the row of each; if the draft has confidences,
            K more columns with their bits, or if it is a tree, at most K with the numbers of the
            accepted nodes; the numbers of tokens, of accepted tokens and of draft tokens (plus
            `_LOOKED_UP`, see `Draft.looked_up`); the first row of the target's pass; how many
            tokens the drafter has cached; and the times, in nanoseconds, at which the step began,
            had its draft, had the target's logits, and ended.
        width: K + 1.
        logits: [N, v] float32, the target's raw logits, of the columns that this rank has.
        forward: the target's pass.
        path: [R, W] int64, of a tree, which of a request's rows of logits gave each token; None:
            the first rows, in order.
    """

    numbers: Tensor
    width: int
    logits: Tensor
    forward: Forward
    path: Tensor | None

    @classmethod
    def of(
        cls,
        ops: PreparationOps,
        verdict: Verdict,
        draft: Draft,
        cached: Tensor,
        times: Sequence[Tensor | int],
        logits: Tensor,
        forward: Forward,
    ) -> "Outcome":
        """Args:
        cached: [R] int64, tokens that the drafter has cached.
        times: see `numbers`.
        """
        drafted = draft.num_tokens
        if draft.looked_up is not None:
            drafted = drafted + draft.looked_up * _LOOKED_UP
        gains = (verdict.num_tokens, verdict.num_accepted, drafted)
        counts = (*gains, forward.layout.first_row, cached)
        more = draft.confidences
        if more is None and verdict.path is not None:
            more = verdict.path[:, 1:]
        numbers = ops.pack_results(verdict.token_ids, verdict.largest, more, counts, times)
        return cls(numbers, verdict.token_ids.shape[1], logits, forward, verdict.path)

    def laid_out(self, count: int, width: int) -> Tensor:
        """[count, ...], `numbers` with the columns of `width` (K + 1), confidences included, and
        zeros after the requests: equally many on ranks that draft different numbers of tokens."""
        own, rest = self.width, self.numbers.shape[1] - _NUM_COUNTS - _NUM_TIMES
        parts = torch.tensor_split(self.numbers, (own, 2 * own, rest), 1)
        sizes = (width, width, width - 1, parts[-1].shape[1])
        fills = (0, 0, _EXPONENT, 0)
        padded = [
            pad(part, (0, size - part.shape[1], 0, count - len(part)), value=fill)
            for part, size, fill in zip(parts, sizes, fills, strict=True)
        ]
        return torch.cat(padded, 1)

    def logits_at(
        self, rows: "RatedRows", token_ids: Sequence[int], runner: ModelRunner
    ) -> tuple[Tensor, Tensor]:
        """The logits [N, v] of these rows, and the tokens [N] on the device."""
        given = [list(rows.places), list(token_ids)]
        places, chosen = upload(given, self.numbers.device).unbind(0)
        if rows.of_pass:
            return runner.logits(self.forward.hidden[places]), chosen
        return self.logits[places], chosen

    def set_cached(self, cached: Tensor) -> None:
        """Replace the counts of tokens that the drafter has cached: [n] int64, first n requests."""
        self.numbers[: len(cached), _CACHED] = cached


@dataclass(frozen=True, eq=False)
class Collected:
    """Results of all requests of a step, whichever ranks ran them.

    Attributes:
        numbers: [R, ...], see `Outcome`, in the order of the batch.
        width: K + 1, of `numbers`.
        num_rows: rows that the target's pass computed, padding included.
        path: see `Outcome`.
    """

    numbers: Tensor
    width: int
    num_rows: int
    path: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Launched:
    """A step that the device may still be computing.

    Attributes:
        numbers: those of `results`.
        began: when the host began to launch it, in seconds.
        padded: it was captured: every row of the target's pass has logits, padding included.
    """

    batch: Batch
    results: Collected
    numbers: Download
    began: float
    padded: bool

    def read(
        self, tree_depth: int | None, check: Callable[[], None]
    ) -> tuple[list[Committed], list[int], list[int], list[float], float]:
        """Wait for the numbers: what each request gained, its first row of the target's pass and
        its first row of logits, the seconds that drafting, the target's pass and verification took,
        and those of waiting.

        Args:
            check: called before the numbers are read, which mean nothing if a rank was lost.
        """
        asked = perf_counter()
        rows = self.numbers.wait()
        waited = perf_counter() - asked
        check()
        stamps = rows[0][-_NUM_TIMES:]
        seconds = [(end - begin) / 1e9 for begin, end in pairwise(stamps)]
        width = self.results.width
        committed = [
            _committed(row[:-_NUM_TIMES], width, tree_depth, item)
            for row, item in zip(rows, self.batch.requests, strict=True)
        ]
        first = [row[_FIRST_ROW] for row in rows]
        if self.padded:
            return committed, first, first, seconds, waited
        starts: list[int] = []
        ends: dict[int, int] = {}  # by rank
        for gain, item in zip(committed, self.batch.requests, strict=True):
            starts.append(ends.get(item.rank, 0))
            ends[item.rank] = starts[-1] + gain.num_draft_tokens + 1
        return committed, first, starts, seconds, waited

    def times(
        self, seconds: Sequence[float], waited: float, before: float, ended: float
    ) -> StepTimes:
        """The times of the step.

        Args:
            seconds, waited: see `read`.
            before, ended: when the step before and this one ended, in seconds.
        """
        ahead = self.began < before
        # Requests that go on have kept the host busy since the step before. New ones may have come
        # after a time without any.
        whole = ended - (before if ahead or self.batch.is_decode else self.began)
        draft, target, verify = seconds
        host = max(0.0, whole - waited) if ahead else 0.0
        return StepTimes(draft, target, verify, max(0.0, whole - sum(seconds)), host)


@dataclass(frozen=True)
class RatedRows:
    """Rows of a step for which log probabilities are asked for.

    Attributes:
        of_pass: `places` are rows of the target's pass; else rows of `Outcome.logits`.
        rank: the rank that has them, where ranks have requests of their own.
    """

    of_pass: bool
    places: Sequence[int]
    rank: int


@dataclass(frozen=True)
class StepResult:
    """Results of one step on the host.

    Attributes:
        report: the results that are no tensors.
        first_rows: the first row of each request in the target's pass.
        logit_starts: the first row of each request in `Outcome.logits`; it has one more row than
            draft tokens.
        path: see `Outcome`.
    """

    report: StepReport
    first_rows: Sequence[int]
    logit_starts: Sequence[int]
    path: Tensor | None

    def rows_of(self, index: int, count: int) -> RatedRows:
        """The rows of logits that gave the first `count` tokens which request `index` of the batch
        gained."""
        first = self.logit_starts[index]
        nodes = range(count) if self.path is None else self.path[index, :count].tolist()
        return RatedRows(False, [first + node for node in nodes], self.rank_of(index))

    def rank_of(self, index: int) -> int:
        """The rank that has the rows of request `index` of the batch; see `ScheduledRequest`."""
        return self.report.batch.requests[index].rank


def num_columns(width: int) -> int:
    """The number of columns of `Outcome.laid_out`."""
    return 3 * width - 1 + _NUM_COUNTS + _NUM_TIMES


def _committed(
    row: Sequence[int], width: int, tree_depth: int | None, item: ScheduledRequest
) -> Committed:
    """One request's share of `Outcome.numbers`, without times."""
    *places, count, accepted, drafts, _, cached = row
    looked_up, drafts = divmod(drafts, _LOOKED_UP)
    tokens, bits = places[:count], places[width : width + count]
    positions = None if tree_depth is None else min(drafts, tree_depth)
    # Without a trim all draft tokens were verified.
    known = drafts if item.trim is None else max(drafts, item.num_draft_tokens)
    # Logits that are all 0 come from numbers whose squares overflowed in a norm.
    broken = [place for place, it in enumerate(bits) if not 0 < it & _EXPONENT < _EXPONENT]
    sound = broken[0] if broken else count
    accepted, more = min(accepted, sound), places[2 * width :]
    return Committed(
        token_ids=tuple(tokens[:sound]),
        num_draft_tokens=drafts,
        num_accepted=accepted,
        drafter_computed=cached,
        num_positions=positions,
        broken=sound < count,
        confidences=_confidences(more[:known]) if tree_depth is None else (),
        nodes=() if tree_depth is None else tuple(more[:accepted]),
        looked_up=bool(looked_up),
    )


def _confidences(bits: Sequence[int]) -> tuple[float, ...]:
    """Bits of float32 -> numbers; empty if any place has no confidence."""
    if not bits or any([it & _EXPONENT == _EXPONENT for it in bits]):
        return ()
    return struct.unpack(f"{len(bits)}f", struct.pack(f"{len(bits)}i", *bits))
