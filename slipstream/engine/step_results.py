"""Results of a step: packed into one tensor for one copy to the host, and unpacked there."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from slipstream.core.batch import NUM_BINS, Batch, Committed, ScheduledRequest, StepReport, Trim
from slipstream.kernels.devices import Download, send
from slipstream.runner.device_batch import Guesses, PackedBatch
from slipstream.runner.model_runner import Forward
from slipstream.runner.rows import prompt_rows
from slipstream.sampling.state import SamplingState, Uses
from slipstream.sampling.verification import Verdict
from slipstream.speculative.drafter import Draft


def pack(
    batch: Batch, guesses: Guesses | None, sampling: SamplingState, rereads: bool
) -> PackedBatch:
    """The batch in numbers.

    Args:
        guesses: of a drafter that runs on the host; see `Drafter.prepare`.
        rereads: the drafter wants features of the last cached token of a prefix hit.
    """
    items = batch.requests
    drafts = [item.num_draft_tokens for item in items]
    if guesses is not None:
        guessed = zip(guesses, drafts, strict=True)
        drafts = [most if guess is None else len(guess) for guess, most in guessed]
    slots = [item.request.slot for item in items]
    uses = sampling.uses(slots)
    width = max(drafts)
    if Uses.GRAMMAR in uses:  # which may have something to say where a drafter has not
        width = max(item.num_draft_tokens for item in items)
    trims = [item.trim for item in items]
    if guesses is not None or Uses.GRAMMAR in uses:  # whose tokens have no confidences
        pairs = zip(drafts, trims, strict=True)
        drafts = [most if it is None else min(most, it.num_rows) for most, it in pairs]
        trims = []
    stops = [item.stops for item in items]
    again = [int(rereads and item.admitted and item.start > 0) for item in items]
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
        rereads=again,
        stops=stops if any(stops) else (),
        trims=trims if any(trims) else (),
        saved=[item.saved for item in items],
        prompts=prompts if any(prompts) else (),
    )


class TrimRates:
    """The rates of a step's trims, which are the same for all, where the device reads them.

    Attributes:
        chances: [NUM_BINS] float32; see `Trim`.
    """

    def __init__(self, device: torch.device) -> None:
        self._rates: tuple[float, ...] = (1.0,) * NUM_BINS  # what `chances` holds
        self.chances = torch.ones(NUM_BINS, dtype=torch.float32, device=device)

    def set(self, trims: Sequence[Trim | None]) -> None:
        """Take those of a step, if it has any."""
        rates = next((it.rates for it in trims if it is not None), self._rates)
        if rates != self._rates:
            self.chances.copy_(send(torch.tensor(rates), self.chances.device))
            self._rates = rates


_NUM_TIMES = 4  # columns of `Outcome.numbers` behind the counts
_FIRST_ROW, _CACHED = -_NUM_TIMES - 2, -_NUM_TIMES - 1
_EXPONENT = 0x7F800000  # bits of a float32 that are all set where it is not finite


@dataclass(frozen=True, eq=False)
class Proposal:
    """A draft, when the step began and when the draft was there."""

    draft: Draft
    began: Tensor
    drafted: Tensor

    def first(self, requests: int) -> "Proposal":
        """The rows of so many requests, without the padding of a captured batch."""
        return replace(self, draft=self.draft.first(requests))


@dataclass(frozen=True, eq=False)
class Outcome:
    """Results of the device's part of a step.

    Attributes:
        numbers: [R, 2 (K + 1) + 9] int64, for the host: the K + 1 places of the verdict's tokens,
            and for each the bits of the largest logit of its row; how many tokens, accepted and
            draft tokens there are, the first row of the target's pass, and what the drafter has
            cached; and when the step began, had its drafts, had the target's logits, and ended, in
            nanoseconds. Where drafts have confidences, their bits stand in K more columns before
            the counts.
        width: K + 1.
        logits: [N, v] float32, the target's raw logits, of the columns that this rank has.
        forward: the target's pass.
        path: [R, W] int64, which of a request's rows of logits gave each token; None: the first.
    """

    numbers: Tensor
    width: int
    logits: Tensor
    forward: Forward
    path: Tensor | None

    @classmethod
    def of(
        cls,
        verdict: Verdict,
        largest: Tensor,
        draft: Draft,
        cached: Tensor,
        times: Sequence[Tensor],
        logits: Tensor,
        forward: Forward,
    ) -> "Outcome":
        """Args:
        largest: [R, K + 1] float32, the largest logit of the row of each token.
        cached: [R] int64, what the drafter has cached.
        times: when the step began, had drafts, had logits, and ended.
        """
        gains = (verdict.num_tokens, verdict.num_accepted, draft.num_tokens)
        counts = (*gains, forward.layout.first_row, cached)
        rows = torch.stack(tuple(times)).expand(len(cached), _NUM_TIMES)
        bits = [_bits(largest)]
        if draft.confidences is not None:
            bits.append(_bits(draft.confidences))
        numbers = torch.cat((verdict.token_ids, *bits, torch.stack(counts, 1), rows), 1)
        return cls(numbers, verdict.token_ids.shape[1], logits, forward, verdict.path)

    def set_cached(self, cached: Tensor) -> None:
        """The drafter has more in its cache by now: [requests] int64, of the first requests."""
        self.numbers[: len(cached), _CACHED] = cached


@dataclass(frozen=True, eq=False)
class Launched:
    """A step whose device work is under way.

    Attributes:
        padded: all rows of the target's pass have logits, as many as the host had said.
    """

    batch: Batch
    outcome: Outcome
    numbers: Download
    began: float
    padded: bool

    def read(self, tree_depth: int | None) -> tuple[list[Committed], list[int], list[float]]:
        """Wait for the numbers: what each request gained, its first row of logits, and the seconds
        that drafting, the target's pass and verification took."""
        rows = self.numbers.wait()
        stamps = rows[0][-_NUM_TIMES:]
        seconds = [(end - begin) / 1e9 for begin, end in pairwise(stamps)]
        width = self.outcome.width
        committed = [
            _committed(row[:-_NUM_TIMES], width, tree_depth, item)
            for row, item in zip(rows, self.batch.requests, strict=True)
        ]
        if self.padded:
            return committed, [row[_FIRST_ROW] for row in rows], seconds
        counts = [gain.num_draft_tokens + 1 for gain in committed[:-1]]
        return committed, [*accumulate(counts, initial=0)], seconds


@dataclass(frozen=True)
class RatedRows:
    """Rows of a step, some of whose log probabilities are asked for.

    Attributes:
        of_pass: `places` are rows of the target's pass; else of the logits that were judged.
    """

    of_pass: bool
    places: Sequence[int]


@dataclass(frozen=True)
class StepResult:
    """Results of one step on the host.

    Attributes:
        report: what is known of it without tensors.
        logit_starts: request r owns rows logit_starts[r] .. logit_starts[r] + its draft tokens of
            the logits that were judged.
        path: [R, W] int64, which of its rows gave each of a request's tokens; None: the first.
        forward: the target's pass.
    """

    report: StepReport
    logit_starts: Sequence[int]
    path: Tensor | None
    forward: Forward

    def rows_of(self, index: int, count: int) -> RatedRows:
        """What the first `count` tokens that the request of batch index `index` gained were sampled
        from."""
        first = self.logit_starts[index]
        nodes = range(count) if self.path is None else self.path[index, :count].tolist()
        return RatedRows(False, [first + node for node in nodes])


def _bits(numbers: Tensor) -> Tensor:
    """float32 -> int64, which `cat` would convert to more slowly."""
    return numbers.view(torch.int32).to(torch.int64)


def _committed(
    row: Sequence[int], width: int, tree_depth: int | None, item: ScheduledRequest
) -> Committed:
    """One request's share of `Outcome.numbers`, without times."""
    *places, count, accepted, drafts, _, cached = row
    tokens, bits = places[:count], places[width : width + count]
    positions = None if tree_depth is None else min(drafts, tree_depth)
    # Without a trim what was drafted is what was verified.
    known = drafts if item.trim is None else max(drafts, item.num_draft_tokens)
    sound = next((place for place, it in enumerate(bits) if it & _EXPONENT == _EXPONENT), count)
    return Committed(
        token_ids=tuple(tokens[:sound]),
        num_draft_tokens=drafts,
        num_accepted=min(accepted, sound),
        drafter_computed=cached,
        num_positions=positions,
        broken=sound < count,
        confidences=_confidences(places[2 * width :][:known]),
    )


def _confidences(bits: Sequence[int]) -> tuple[float, ...]:
    """Nothing where some place has none."""
    if any(it & _EXPONENT == _EXPONENT for it in bits):
        return ()
    return struct.unpack(f"{len(bits)}f", struct.pack(f"{len(bits)}i", *bits))
