"""The time that steps take on this machine: measured at the start, and refined by every step.

A decode step takes

    f(rows) + r requests + c context + a context (rows / requests - 1)     the target, verification
    + h(requests)                                                          the rest
    + d(requests, width) + e width context + g(requests)                   drafting

and, if it was launched ahead, as long as the host's work b(requests) at least. f, g, h, b and d are
tables, which are interpolated and extrapolated linearly. So no assumption is
made about how costs rise with rows: they may jump where a tile is full, or flatten where all
experts are read. Context is the sum of the lengths of all requests, which attention reads.

Each knot of a table follows the median of the values that the latest steps give for it. A single
step that was disturbed changes nothing; a lasting change shows once most of these steps have it.

All of this is multiplied by the machine's slowness, which follows the steps whose costs are known
well, and values are learnt as they would be without it. Otherwise a machine that becomes slower or
faster would seem to do so only for the steps that it runs, and not for those it might run instead.

Plain steps tell the host's share h. Steps with drafts tell the sum of h and g, which is what
drafting adds to it. While there are plain steps, h is theirs. Where there were none for long, what
changes is taken to be h, so that plain steps and those with drafts are charged for it alike.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from slipstream.core.batch import StepReport
from slipstream.engine.drafting.step_costs import CostRow, MeasuredStep, fitted_slopes
from slipstream.engine.drafting.step_facts import context_of, drafting_counts, has_ended_early
from slipstream.engine.drafting.tables import GAIN, LEAST, Grid, Knot, Slope, Table, finite

_MOST_ERROR = 0.3  # bound of the errors that slopes learn from, relative to the prediction
_LEAST_SHARE = 0.1  # least share of an error that is attributed to a knot
_STALE = 0.005  # sum of relative changes after which cached predictions are dropped
_PLAIN_AGE = 64  # steps learnt from, for which a plain step tells the host's share
_TABLES = ("rows", "rest", "added_rest", "host")
_MOST_SLOWNESS = 1e3  # that is restored
Padded = Callable[[int], int] | None


class CostModel:
    """Predicts the seconds of decode steps.

    Args:
        padded: the number of requests that a captured step of a given number is padded to; None:
            steps are not captured.
        at_once: see `StepLimits.drafts_at_once`.
        looks_up: drafters are combined, so that drafts may be looked up.
    """

    def __init__(
        self, padded: Padded = None, at_once: bool = False, looks_up: bool = False
    ) -> None:
        self._padded, self._at_once, self._looks_up = padded, at_once, looks_up
        self._rows, self._rest, self._drafting = Table(), Table(), Grid()  # f, h and d
        self._added_rest, self._host = Table(), Table()  # g and b
        self._num_learnt = 0
        self._plain_at: dict[int, int] = {}  # by requests the number of the latest plain step
        self._slopes = {
            "requests": Slope(1.0),  # r
            "context": Slope(256.0),  # c
            "attention": Slope(256.0),  # a
            "draft_context": Slope(256.0),  # e
            "draft_prompt": Slope(256.0),  # seconds for each token that the drafter computes late
        }
        self._slowness = Knot(1.0)
        self._slowness.set(1.0)
        self._restored: CostModel | None = None  # what was restored, before anything was learnt
        self._moved = 0.0
        self._targets: dict[tuple[int, int], tuple[float, float]] = {}
        self._drafts: dict[tuple[int, int], tuple[float, float]] = {}
        self._chains: dict[tuple[int, tuple[int, ...]], tuple[float, float]] = {}
        # Parts of these: by requests the host's shares (without drafts, and what these add to it),
        # and by width the drafting of all numbers of requests that have a table.
        self._shares: dict[int, tuple[float, float]] = {}
        self._columns: dict[int, list[float]] = {}

    # ------------------------------------------------------------------ predictions

    def seconds(self, requests: int, width: int, rows: int, context: int) -> float:
        """Seconds of a decode step.

        Args:
            requests: decoding requests; where steps are captured, they count as padded.
            width: the most tokens that any of them drafts; 0: plain.
            rows: all rows of the target's pass, padding included.
            context: the lengths of the requests together.
        """
        drafting = self.draft_seconds(requests, width, context)
        device = drafting + self.target_seconds(requests, rows, context)
        return max(device, self.host_seconds(requests))

    def report_seconds(self, report: StepReport) -> tuple[float, float]:
        """Predicted seconds of a decode step that has been run, and of the same without drafts."""
        requests, context = len(report.batch.requests), context_of(report)
        counts = drafting_counts(report, self._padded, self._at_once, self._looks_up)
        least = max(LEAST, self.host_seconds(requests))
        plain = max(least, self.target_seconds(requests, requests, context))
        if not counts:
            return plain, plain
        found = self._chains.get((requests, counts))
        if found is None:
            found = self._chains[requests, counts] = self._chain(self._pad(requests), counts)
        seconds = self._slowness.value * (found[0] + found[1] * context)
        return max(least, seconds + self.target_seconds(requests, report.num_rows, context)), plain

    @property
    def knows_contexts(self) -> bool:
        """Whether it was measured how much longer steps take after long contexts."""
        return self._slopes["context"].is_measured

    def host_seconds(self, requests: int) -> float:
        """Minimum seconds of a step that overlaps with the host's work; 0 if it does not."""
        return self._slowness.value * max(0.0, self._host(self._pad(requests)))

    def target_seconds(self, requests: int, rows: int, context: int) -> float:
        """Seconds of all but drafting: the target's pass, verification, and the rest."""
        found = self._targets.get((requests, rows))
        if found is None:
            found = self._targets[requests, rows] = self._target(requests, rows)
        return self._slowness.value * (found[0] + found[1] * context)

    def draft_seconds(self, requests: int, width: int, context: int) -> float:
        """The seconds that it adds to a step if `requests` requests draft `width` tokens each."""
        if not width:
            return 0.0
        found = self._drafts.get((requests, width))
        if found is None:
            found = self._drafts[requests, width] = self._draft(requests, width)
        return self._slowness.value * (found[0] + found[1] * context)

    def prompt_seconds(self, tokens: int) -> float:
        """Seconds in which the drafter computes so many tokens of a prompt; 0: not measured."""
        return self._slowness.value * self._slopes["draft_prompt"].value * tokens

    def table(self, requests: Sequence[int], drafts: Sequence[int], length: int) -> list[CostRow]:
        """Predictions for requests of `length` tokens each."""

        def seconds(count: int, width: int) -> float:
            return self.seconds(count, width, self._pad(count) * (width + 1), count * length)

        return [CostRow(it, width, seconds(it, width)) for it in requests for width in drafts]

    def _target(self, requests: int, rows: int) -> tuple[float, float]:
        """Seconds, and seconds per token of context."""
        requests = self._pad(requests)
        rows = max(rows, requests)
        fixed = self._rows(rows) + self._share(requests)[0]
        return max(LEAST, fixed), self._per_token(requests, rows)

    def _chain(self, requests: int, counts: Sequence[int]) -> tuple[float, float]:
        """Seconds of drafting, and seconds per token of context; see `drafting_counts`."""
        slope = self._slopes["draft_context"].value * len(counts) * counts[0] / requests
        return self._passes(counts) + self._added_rest(requests), slope

    def _draft(self, requests: int, width: int) -> tuple[float, float]:
        requests = self._pad(requests)
        column = self._columns.get(width)
        if column is None or len(column) < len(self._drafting.tables):  # a new number of requests
            column = self._columns[width] = [table(width) for table in self._drafting.tables]
        fixed = max(0.0, self._drafting.between(column, requests)) + self._share(requests)[1]
        return fixed, self._slopes["draft_context"].value * width

    def _share(self, requests: int) -> tuple[float, float]:
        found = self._shares.get(requests)
        if found is None:
            plain = self._rest(requests) + self._slopes["requests"].value * requests
            found = self._shares[requests] = plain, max(0.0, self._added_rest(requests))
        return found

    def _per_token(self, requests: int, rows: int) -> float:
        """Seconds of the target's pass per token of context."""
        more = self._slopes["attention"].value * (rows / requests - 1)
        return self._slopes["context"].value + more

    def _request_seconds(self, requests: int, rows: int, context: int) -> float:
        """Seconds of the target's pass that do not follow from its rows alone."""
        per_token = self._per_token(requests, rows)
        return self._slopes["requests"].value * requests + per_token * context

    def _of_requests(self, point: MeasuredStep) -> float:
        return self._request_seconds(point.requests, point.rows, point.context)

    def slowness_at(self, point: MeasuredStep) -> float:
        """How much longer the target's pass of a step took than it would at slowness 1."""
        return point.target / max(LEAST, self._rows(point.rows) + self._of_requests(point))

    def _pad(self, requests: int) -> int:
        return requests if self._padded is None else self._padded(requests)

    # ------------------------------------------------------------------ learning

    def calibrate(self, points: Sequence[MeasuredStep]) -> None:
        """Replace what is known by measured steps.

        Slopes are computed from pairs of points that differ in one quantity. The tables go through
        the points with the shortest contexts. If costs were restored, the points also tell the
        machine's slowness, so that they fit those that were not measured again.
        """
        if self._restored is not None:
            self._slowness.set(median(self._restored.slowness_at(point) for point in points))
            points = [point.divided(self._slowness.value) for point in points]
        short: dict[tuple[int, int], MeasuredStep] = {}
        for point in sorted(points, key=lambda it: it.context, reverse=True):
            short[point.requests, point.width] = point  # the last is the shortest
        for name, value in fitted_slopes(points, short).items():
            self._slopes[name].set(value)
        for point in sorted(short.values(), key=lambda it: it.width):
            requests, context = point.requests, point.context
            self._rows.knot(point.rows).set(max(LEAST, point.target - self._of_requests(point)))
            if point.host:
                self._host.knot(requests).set(point.host)
            rest = _host_gap(point.rest, point.draft + point.target, point.host)
            if not point.width:
                self._rest.knot(requests).set(point.draft + rest)
                continue
            self._added_rest.knot(requests).set(max(0.0, rest - self._rest(requests)))
            drafting = point.draft
            drafting -= self._slopes["draft_context"].value * point.width * context
            self._drafting.knot(requests, point.width).set(max(0.0, drafting))
        self._forget_predictions()

    def observe(self, report: StepReport) -> None:
        """Learn from a step, unless it has prompt chunks or ran uncaptured where others do not."""
        batch, times = report.batch, report.times
        if report.padded is not (self._padded is not None):
            return
        if not (report.padded or batch.is_decode):  # captured steps always decode
            return
        requests = self._pad(len(batch.requests))
        context = context_of(report)
        self._num_learnt += 1
        seconds = times.target + times.verify
        slowness = self._learn_target(requests, report.num_rows, context, seconds)
        if self._looks_up and any([gain.looked_up for gain in report.committed]):
            return  # how many passes the network ran for them is not known
        draft, host = times.draft / slowness, times.host / slowness
        if host:
            self._update(self._host.knot(requests), host, host)
        counts = drafting_counts(report, self._padded, self._at_once)
        ended_early = not self._at_once and has_ended_early(report)
        rest = _host_gap(times.rest, times.device, times.host) / slowness
        self._learn_rest(requests, rest, draft, bool(counts) or ended_early)
        if counts and not ended_early:
            self._learn_drafting(requests, counts, context, draft)
        if self._moved > _STALE:
            self._forget_predictions()

    def _learn_target(self, requests: int, rows: int, context: int, seconds: float) -> float:
        """Learn from the target's pass; returns the machine's slowness."""
        slopes, knot = self._slopes, self._rows.knot(rows)
        of_requests = self._request_seconds(requests, rows, context)
        if knot.is_settled:
            self._slowness.update(seconds / max(LEAST, knot.value + of_requests))
        seconds /= self._slowness.value
        error = self._update(knot, seconds - of_requests, seconds)
        slopes["requests"].learn(requests, error)
        more = rows / requests - 1
        if more < 1 / 2:  # nearly plain: the error is that of `context`, not of `attention`
            slopes["context"].learn(context, error)
        else:
            slopes["attention"].learn(context * more, error)
        return self._slowness.value

    def _learn_rest(self, requests: int, rest: float, draft: float, drafts: bool) -> None:
        """Learn the host's share from a step with or without drafts; see the module's docstring."""
        if not drafts:
            self._plain_at[requests] = self._num_learnt
            self._update(self._rest.knot(requests), draft + rest, draft + rest)
        elif self._num_learnt - self._plain_at.get(requests, -_PLAIN_AGE) < _PLAIN_AGE:
            self._update(self._added_rest.knot(requests), rest - self._rest(requests), rest)
        else:
            self._update(self._rest.knot(requests), rest - self._added_rest(requests), rest)

    def _learn_drafting(
        self, requests: int, counts: Sequence[int], context: int, seconds: float
    ) -> None:
        """Learn what drafting costs.

        Args:
            counts: how many requests drafted at each position.
            seconds: of drafting.
        """
        most, width, slope = counts[0], len(counts), self._slopes["draft_context"]
        context = context * most // requests
        drafting = seconds - slope.value * width * context
        if counts[-1] == most:
            knot = self._drafting.knot(most, width)
            slope.learn(width * context, self._update(knot, drafting, seconds))
            return
        # If fewer requests draft at later positions, the error is attributed in equal proportion to
        # all knots of the prediction, since the parts cannot be told apart.
        predicted = self._passes(counts)
        off = drafting / max(LEAST, predicted)
        for place, (count, following) in enumerate(pairwise((*counts, 0)), 1):
            if following < count:
                knot = self._drafting.knot(count, place)
                self._update(knot, knot.value * off if predicted > LEAST else drafting, seconds)

    def _passes(self, counts: Sequence[int]) -> float:
        """Seconds of drafting for these numbers of requests at each position."""
        seconds = 0.0
        for place, (count, following) in enumerate(pairwise((*counts, 0)), 1):
            if following < count:  # between such positions what is added cancels out
                seconds += self._drafting(count, place)
                seconds -= self._drafting(following, place) if following else 0.0
        return seconds

    def _update(self, knot: Knot, value: float, seconds: float) -> float:
        """Update a knot by its value in a step of `seconds`, if all other terms are right; returns
        the error of the prediction in seconds, bounded."""
        knot.visit(self._num_learnt)
        error = value - knot.value
        predicted = max(LEAST, seconds - error)
        gain = GAIN if knot.is_settled else 1.0
        # If the knot is a small part of the step, so is its share in the error.
        share = max(_LEAST_SHARE, min(1.0, knot.value / predicted)) if knot.value else 1.0
        self._moved += knot.update(knot.value + share * error, gain)
        most = _MOST_ERROR * predicted
        return max(-most, min(most, error))

    def _forget_predictions(self) -> None:
        self._moved = 0.0
        self._targets.clear()
        self._drafts.clear()
        self._chains.clear()
        self._shares.clear()
        self._columns.clear()

    # ------------------------------------------------------------------ saving and restoring

    def state(self) -> dict[str, Any]:
        """All that was learnt, as JSON data."""
        return {
            "rows": self._rows.items(),
            "rest": self._rest.items(),
            "added_rest": self._added_rest.items(),
            "host": self._host.items(),
            "drafting": self._drafting.items(),
            "slopes": {
                name: slope.value if slope.is_measured else None
                for name, slope in self._slopes.items()
            },
            "slowness": self._slowness.value,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: the data is not of that form.
        """
        restored = CostModel(self._padded, self._at_once, self._looks_up)
        restored._fill(state)
        self._fill(state)
        self._restored = restored

    def _fill(self, state: Mapping[str, Any]) -> None:
        given = {name: state["slopes"][name] for name in self._slopes}
        slopes = {
            name: finite(value, least=0.0) for name, value in given.items() if value is not None
        }
        slowness = finite(state["slowness"], 1 / _MOST_SLOWNESS, _MOST_SLOWNESS)
        tables, drafting = {name: Table() for name in _TABLES}, Grid()
        for name, table in tables.items():
            table.restore(state[name])
        drafting.restore(state["drafting"])
        self._rows, self._rest, self._added_rest, self._host = tables.values()
        self._drafting = drafting
        for name, value in slopes.items():
            self._slopes[name].set(value)
        self._slowness.set(slowness)
        self._forget_predictions()


def _host_gap(rest: float, device: float, host: float) -> float:
    """The rest of a step without the time for which a device that runs ahead waits for the host."""
    return max(0.0, rest - max(0.0, host - device))
