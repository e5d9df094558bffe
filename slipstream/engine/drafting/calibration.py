"""Measures the time of steps on this machine when the engine starts.

A few steps of each kind are run with artificial requests (`artificial_requests.py`) of some length,
as if their prompts had been computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from slipstream.core.batch import Batch, StepReport
from slipstream.engine.artificial_requests import ArtificialRequests
from slipstream.engine.drafting.costs import CostModel
from slipstream.engine.drafting.step_costs import MeasuredStep, least, plausible
from slipstream.engine.launcher import Launcher
from slipstream.engine.resolve import Resolved

BUDGET_SECONDS = 2.0
_LENGTH, _LONG = 64, 4096  # lengths of short and long requests
_REQUESTS = (1, 16, 4, 64, 2, 8, 32, 128, 256)  # the most important first
_ROUNDS = 2  # repeated, since other load on the machine comes and goes
_MOST_RUNS, _FEWEST_RUNS = 6, 2  # runs of a kind of step in a round; the first is not counted
_ENOUGH_SECONDS = 0.02
_SLOW = 0.2  # seconds of a step on a GPU that has compiled something


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
    late_tokens: int = 0,
    briefly: bool = False,
) -> int:
    """Measure as many kinds of steps as there is time for, the most important first.

    No request may be running; all slots and blocks are free again afterwards.

    Args:
        costs: is calibrated by the measurements.
        widths: numbers of draft tokens that steps can have, rising from 0.
        budget_seconds: without the time in which kernels are compiled.
        now: a clock, in seconds, which is used for the time limit only.
        late_tokens: see `Lateness`.
        briefly: keep the budget even if costs of long contexts are not known.

    Returns:
        The number of kinds that were measured.
    """
    measured = _Measurements(step, resolved, block_size, now, late_tokens)
    points: dict[Shape, MeasuredStep] = {}
    if measured.length < 2:  # max_model_len is too small for these requests
        return 0
    kinds = shapes(resolved, widths, measured.length, measured.longest)
    lacks = not (briefly or costs.knows_contexts)
    if lacks and any(it.length > measured.length for it in kinds):
        budget_seconds = max(budget_seconds, BUDGET_SECONDS)  # restored costs lack them
    try:
        measured.run(Shape(1, 0, measured.length), None)  # warms up, such as by compiling kernels
        ends = now() + budget_seconds
        for shape in _ROUNDS * kinds:
            rows, context = shape.requests * (shape.width + 1), shape.requests * shape.length
            expected = costs.seconds(shape.requests, shape.width, rows, context) if points else 0.0
            if now() - measured.compiling + expected * (_FEWEST_RUNS + 1) > ends:
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
    if longest >= 4 * length:
        found += [Shape(count, width, longest) for count in (1, few) for width in ends[:2]]
        found += [Shape(few, width, length) for width in ends[:2]]
    found += [Shape(count, width, length) for width in ends[2:] for count in (1, large)]
    found += [Shape(1, width, length) for width in widths]
    found += [Shape(count, width, length) for count in counts for width in ends]
    most_rows = limits.max_num_batched_tokens
    return [it for it in dict.fromkeys(found) if it.requests * (it.width + 1) <= most_rows]


class _Measurements:
    """Steps of artificial requests, and what they took.

    Attributes:
        compiling: seconds in which kernels were compiled. Steps are captured before, but not those
            that admit requests, and not the passes in which drafters catch up.
    """

    def __init__(
        self,
        step: Launcher,
        resolved: Resolved,
        block_size: int,
        now: Callable[[], float],
        late_tokens: int,
    ) -> None:
        self._step, self._now, self._late_tokens = step, now, late_tokens
        self._undrafted: set[int] = set()  # slots whose prompts the drafter may still lack
        self.compiling, self._may_compile = 0.0, resolved.captures
        limits = resolved.limits
        # The most tokens that a request gains in the runs of one kind of step.
        growth = (_MOST_RUNS + 3) * (limits.num_speculative_tokens + 1)
        self._requests = ArtificialRequests(step, resolved, block_size, growth)
        most = self._requests.longest
        self.longest = min(_LONG, most - growth)
        self.length = min(_LENGTH, most // 2, self.longest)

    def run(self, shape: Shape, plain: MeasuredStep | None) -> MeasuredStep | None:
        """The shortest times of a few steps; None if the drafter never drafted that many tokens.

        Args:
            plain: the result for as many requests without drafts, if it is known.
        """
        requests, slots = self._requests, range(shape.requests)
        wrong = [slot for slot in slots if not requests.fits(slot, shape.length)]
        if wrong:  # they lack its length, or room for more tokens
            began = self._now()
            requests.admit(wrong, shape.length)
            requests.finish(self._step.launch(requests.batch(wrong, admitted=True)))
            self._undrafted.update(wrong)
            self._note_compiling(began)
        batch = requests.batch(slots, shape.width)
        points = [_point(shape, *pair) for pair in self._steps(batch, self._step.runs_ahead)]
        found = [point for point in points[1:] if point is not None]
        if found and points[0] is not None and shape.width and self._undrafted.issuperset(slots):
            found = [replace(it, prompt=self._prompt(points[0], it)) for it in found]
        if shape.width:
            self._undrafted.difference_update(slots)
        if found or plain is None:
            return least(found) if found else None
        # The target's output may have no matches to look up. So the requests are admitted again in
        # every step; the time for that is part of `rest`, which is therefore taken from `plain`.
        requests.admit(slots, shape.length)
        batch = requests.batch(slots, shape.width, admitted=True)
        points = [_point(shape, *pair, plain.rest) for pair in self._steps(batch, False)]
        found = [point for point in points[1:] if point is not None]
        return least(found) if found else None

    def _prompt(self, first: MeasuredStep, other: MeasuredStep) -> float:
        """Seconds for each token that the drafter computed late in the first step; 0 if unknown."""
        length = first.context // first.requests
        more = first.draft + first.rest - other.draft - other.rest
        tokens = min(length, self._late_tokens) if length >= self.longest else 0
        return max(0.0, more) / (first.requests * tokens) if tokens else 0.0

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
            context = sum(map(self._requests.known, batch.requests))
            results.append((self._requests.finish(launched), context))
            if len(results) == 1:
                self._note_compiling(began)
        if ahead is not None:
            self._requests.finish(ahead)
        return results

    def _note_compiling(self, began: float) -> None:
        """Take in the time of a first step of a kind, which ends now."""
        if self._may_compile and (seconds := self._now() - began) > _SLOW:
            self.compiling += seconds

    def clear(self) -> None:
        """Free all that the device and the drafter hold of the requests."""
        self._requests.clear()


def _point(
    shape: Shape, report: StepReport, context: int, rest: float | None = None
) -> MeasuredStep | None:
    """The times of a step; None if it had another shape. `rest` replaces the measured rest."""
    guessed = all(gain.num_draft_tokens == shape.width for gain in report.committed)
    if not (guessed or report.padded):
        return None
    times = report.times
    seconds = times.draft, times.target + times.verify, times.rest if rest is None else rest
    return MeasuredStep(shape.requests, shape.width, report.num_rows, context, *seconds, times.host)
