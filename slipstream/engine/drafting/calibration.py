"""Measures the time of steps on this machine when the engine starts.

Artificial requests of some length are put into the slots, as if their prompts had been computed,
and run a few steps of each kind. The scheduler and the block manager do not know of them: their
block tables name blocks that no request uses yet, and the prefix index never gets these blocks.
Noise is keyed by a request's seed and step, so later output does not depend on this. The tokens
repeat in a cycle, so that drafters which look up text find matches, and differ from each other, so
that the rows of a mixture of experts do not all choose the same experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from slipstream.core.batch import Batch, ScheduledRequest, StepReport
from slipstream.core.request import Request, RequestStatus
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.drafting.costs import CostModel
from slipstream.engine.drafting.step_costs import Point, least, plausible
from slipstream.engine.launcher import Launcher
from slipstream.engine.resolve import Resolved
from slipstream.engine.step_results import Launched

BUDGET_SECONDS = 2.0
_LENGTH, _LONG = 64, 4096  # lengths of short and long requests
_CYCLE = 24  # length of the cycle of tokens
_REQUESTS = (1, 16, 4, 64, 2, 8, 32, 128, 256)  # the most important first
_ROUNDS = 2  # repeated, since other load on the machine comes and goes
_MOST_RUNS, _FEWEST_RUNS = 6, 2  # runs of a kind of step in a round; the first is not counted
_ENOUGH_SECONDS = 0.02
_GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@dataclass(frozen=True)
class Shape:
    """A kind of decode step: `requests` requests of about `length` tokens draft `width` each."""

    requests: int
    width: int
    length: int


def calibrate(
    costs: CostModel,
    step: Launcher,
    resolved: Resolved,
    widths: Sequence[int],
    block_size: int,
    budget_seconds: float = BUDGET_SECONDS,
    now: Callable[[], float] = perf_counter,
) -> int:
    """Measure as many kinds of steps as there is time for, the most important first.

    No request may be running; all slots and blocks are free again afterwards.

    Args:
        costs: is calibrated by the measurements.
        widths: numbers of draft tokens that steps can have, rising from 0.
        now: a clock, in seconds, which is used for the time limit only.

    Returns:
        The number of kinds that were measured.
    """
    measured = ArtificialRequests(step, resolved, block_size, now)
    points: dict[Shape, Point] = {}
    if measured.length < 2:  # max_model_len is too small for these requests
        return 0
    try:
        measured.run(Shape(1, 0, measured.length), None)  # warms up, such as by compiling kernels
        ends = now() + budget_seconds
        for shape in _ROUNDS * shapes(resolved, widths, measured.length, measured.longest):
            rows, context = shape.requests * (shape.width + 1), shape.requests * shape.length
            expected = costs.seconds(shape.requests, shape.width, rows, context) if points else 0.0
            if now() + expected * (_FEWEST_RUNS + 1) > ends:
                continue
            point = measured.run(shape, points.get(replace(shape, width=0)))
            if point is not None:
                points[shape] = least([point, points.get(shape, point)])
                costs.calibrate(plausible(tuple(points.values())))
    finally:
        measured.clear()
    return len(points)


def shapes(resolved: Resolved, widths: Sequence[int], length: int, longest: int) -> list[Shape]:
    """The kinds of steps to measure, the most important first."""
    limits, most = resolved.limits, widths[-1]
    counts = [count for count in _REQUESTS if count < limits.max_num_seqs]
    counts.insert(2, limits.max_num_seqs)
    large, few = counts[min(1, len(counts) - 1)], min(8, limits.max_num_seqs)
    ends = tuple(dict.fromkeys((0, most, *widths[1:2])))
    found = [Shape(count, width, length) for count in (1, large) for width in ends[:2]]
    found += [Shape(count, width, length) for width in ends[2:] for count in (1, large)]
    if longest >= 4 * length:
        found += [Shape(count, width, longest) for count in (1, few) for width in ends[:2]]
        found += [Shape(few, width, length) for width in ends[:2]]
    found += [Shape(1, width, length) for width in widths]
    found += [Shape(count, width, length) for count in counts for width in ends]
    most_rows = limits.max_num_batched_tokens
    return [it for it in dict.fromkeys(found) if it.requests * (it.width + 1) <= most_rows]


class ArtificialRequests:
    """The requests that are measured, by slot."""

    def __init__(
        self, step: Launcher, resolved: Resolved, block_size: int, now: Callable[[], float]
    ) -> None:
        self._step, self._resolved, self._now = step, resolved, now
        limits = resolved.limits
        self._most = min(limits.max_model_len, limits.drafter_max_model_len)
        # The most tokens that a request gains in the runs of one kind of step.
        self._growth = (_MOST_RUNS + 3) * (limits.num_speculative_tokens + 1)
        self.longest = min(_LONG, self._most - self._growth)
        self.length = min(_LENGTH, self._most // 2, self.longest)
        self._block_size = block_size
        self._requests: list[Request | None] = [None] * limits.max_num_seqs
        self._known = [0] * limits.max_num_seqs  # upper bounds of their numbers of tokens
        self._began = [0] * limits.max_num_seqs  # their numbers of tokens when they were admitted

    def run(self, shape: Shape, plain: Point | None) -> Point | None:
        """The shortest times of a few steps; None if the drafter never drafted that many tokens.

        Args:
            plain: the result for as many requests without drafts, if it is known.
        """
        self._prepare(shape)
        batch = self._batch(range(shape.requests), shape.width)
        points = [_point(shape, *pair) for pair in self._steps(batch, self._step.runs_ahead)]
        found = [point for point in points[1:] if point is not None]
        if found or plain is None:
            return least(found) if found else None
        # The target's output may have no matches to look up. So the requests are admitted anew in
        # every step; the time for that is part of `rest`, which is therefore taken from `plain`.
        batch = self._admission(range(shape.requests), shape)
        points = [_point(shape, *pair, plain.rest) for pair in self._steps(batch, False)]
        found = [point for point in points[1:] if point is not None]
        return least(found) if found else None

    def _steps(self, batch: Batch, runs_ahead: bool) -> list[tuple[StepReport, int]]:
        """Run a batch a few times: the reports, each with the total context length."""
        results: list[tuple[StepReport, int]] = []
        began = self._now()
        ahead = self._step.launch(batch) if runs_ahead else None
        while len(results) < _FEWEST_RUNS or (
            len(results) < _MOST_RUNS and self._now() - began < _ENOUGH_SECONDS
        ):
            launched = ahead or self._step.launch(batch)
            if ahead is not None:
                ahead = self._step.launch(batch)
            context = sum(self._known[item.request.slot] for item in batch.requests)
            results.append((self._finish(launched), context))
        if ahead is not None:
            self._finish(ahead)
        return results

    def _prepare(self, shape: Shape) -> None:
        """Admit the shape's requests anew where they lack its length or room for more tokens."""
        wrong = [slot for slot in range(shape.requests) if not self._fits(slot, shape.length)]
        if wrong:
            batch = self._admission(wrong, replace(shape, width=0))
            self._finish(self._step.launch(batch))

    def _admission(self, slots: Sequence[int], shape: Shape) -> Batch:
        self._drop(slots)
        for slot in slots:
            self._requests[slot] = self._artificial(slot, shape.length)
            self._known[slot] = self._began[slot] = shape.length
        return self._batch(slots, shape.width, admitted=True)

    def _fits(self, slot: int, length: int) -> bool:
        if self._requests[slot] is None or self._began[slot] != length:
            return False
        return self._known[slot] + self._growth <= min(4 * length, self._most)

    def _artificial(self, slot: int, length: int) -> Request:
        spread = max(1, self._resolved.vocab_size // _CYCLE)
        tokens = [(slot + place) % _CYCLE * spread for place in range(length)]
        request = Request(
            request_id=f"measured {slot}",
            token_ids=[it % self._resolved.vocab_size for it in tokens],
            params=_GREEDY,
            seed=0,
            stop_token_ids=frozenset(),
            max_tokens=self._resolved.limits.max_model_len,
            num_speculative_tokens=self._resolved.limits.num_speculative_tokens,
            arrival=slot,
        )
        request.slot = slot
        return request

    def _batch(self, slots: Sequence[int], width: int, admitted: bool = False) -> Batch:
        return Batch(tuple(self._scheduled(slot, width, admitted) for slot in slots))

    def _scheduled(self, slot: int, width: int, admitted: bool) -> ScheduledRequest:
        request = self._requests[slot]
        assert request is not None
        covered = min(4 * self._began[slot], self._most) + self._growth
        count = -(-min(covered, self._resolved.limits.max_model_len) // self._block_size)
        return ScheduledRequest(
            request=request,
            start=self._known[slot] - 1,
            num_new_tokens=1,
            num_draft_tokens=width,
            block_table=_blocks(slot, count, self._resolved.num_blocks),
            admitted=admitted,
            reaches_end=True,
            window_table=_blocks(slot, count, self._resolved.num_window_blocks),
            rank=slot % self._step.division.num_parts,
        )

    def _finish(self, launched: Launched) -> StepReport:
        report = self._step.finish(launched).report
        for item, gain in zip(report.batch.requests, report.committed, strict=True):
            slot = item.request.slot
            before = item.start + 1 if item.admitted else self._known[slot]
            # Blocks that were never written may hold NaN. Then the logits are not finite, and the
            # report has fewer tokens than the device has added.
            gained = item.num_draft_tokens + 1 if gain.broken else len(gain.token_ids)
            self._known[slot] = before + gained
        return report

    def _drop(self, slots: Sequence[int]) -> None:
        """Make the drafter forget these requests."""
        gone = [request for request in map(self._requests.__getitem__, slots) if request]
        for request in gone:
            request.status = RequestStatus.FINISHED
        self._step.forget(gone)

    def clear(self) -> None:
        """Free all that the device and the drafter hold of the requests."""
        self._drop(range(len(self._requests)))
        self._step.reset([request for request in self._requests if request is not None])


def _point(
    shape: Shape, report: StepReport, context: int, rest: float | None = None
) -> Point | None:
    """The times of a step; None if it had another shape. `rest` replaces the measured rest."""
    guessed = all(gain.num_draft_tokens == shape.width for gain in report.committed)
    if not (guessed or report.padded):
        return None
    times = report.times
    seconds = times.draft, times.target + times.verify, times.rest if rest is None else rest
    return Point(shape.requests, shape.width, report.num_rows, context, *seconds, times.host)


def _blocks(slot: int, count: int, available: int) -> Sequence[int]:
    """A block table for a slot; slots share blocks only if there are too few."""
    return [(slot * count + index) % available for index in range(count)] if available else ()
