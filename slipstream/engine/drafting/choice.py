"""The best numbers of draft tokens for the requests of one step.

The possible draft tokens of all requests are ranked by survival, the probability that they and all
before them are accepted, and taken from the best on, as long as that raises the expected tokens per
second. Survival falls along a chain, so the tokens taken are a prefix of every chain.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from math import inf
from operator import add, sub, truediv
from typing import Protocol

import numpy as np

from slipstream.core.batch import StepReport
from slipstream.core.step_form import StepForm
from slipstream.engine.drafting import native
from slipstream.engine.drafting.tables import LEAST

LEAST_SURVIVAL = 0.02  # tokens with less are never drafted
_FEW = 8  # up to this many requests, costs of drafting are smoothed

Gains = Sequence[Sequence[float]]


class StepCosts(Protocol):
    """Estimates of the time that steps take, learnt from what they took; see `CostModel`."""

    def draft_seconds(self, requests: int, width: int, context: int) -> float:
        """Time to draft `width` tokens for each request; `context` is the sum of their lengths."""

    def target_seconds(self, requests: int, rows: int, context: int) -> float:
        """Time of a step without drafting, whose target pass has `rows` rows."""

    def report_seconds(self, report: StepReport) -> tuple[float, float]:
        """Predicted time of a decode step that has been run, and of the same without drafts."""

    def prompt_seconds(self, tokens: int) -> float:
        """Time in which the drafter computes so many tokens of a prompt."""

    def host_seconds(self, requests: int) -> float:
        """Minimum time of a step that overlaps with the host's work; 0 if it does not."""

    def observe(self, report: StepReport) -> None:
        """Learn from the times of a step."""


class CostTable:
    """The estimated times of all steps that one batch may have, cached.

    Args:
        unit: number of draft tokens that are chosen together: 1 for chains, for trees their size.
    """

    def __init__(
        self, costs: StepCosts, form: StepForm, requests: int, context: int, unit: int = 1
    ) -> None:
        self._costs, self._form, self.unit = costs, form, unit
        self._requests, self._context = requests, context
        self.exact, self.least = form.ends_chains, max(LEAST, costs.host_seconds(requests))
        # In exact steps drafting is interpolated between these numbers of requests.
        self._numbers = _spread(requests, 2) if self.exact else [requests]
        self._targets: dict[int, Sequence[float]] = {}
        self._added: dict[int, list[float]] = {}
        self._drafted: dict[int, Sequence[float]] = {}
        self._flat: dict[int, bool] = {}
        self._alone: list[float] = []
        self._known = self._now()

    @property
    def plain(self) -> float:
        """Seconds of a step without drafts."""
        return max(self.least, self.targets(0, 0)[0])

    @property
    def error(self) -> float:
        """How far costs have moved since the table was made, relative to what they are now."""
        pairs = zip(self._known, self._now(), strict=True)
        return max([abs(known - now) / max(LEAST, now) for known, now in pairs])

    def _now(self) -> tuple[float, float]:
        """Seconds of target passes without drafts and with one for each request."""
        requests, context = self._requests, self._context
        few, many = (
            self._costs.target_seconds(requests, rows, context) for rows in (requests, 2 * requests)
        )
        return few, many

    def is_flat(self, width: int) -> bool:
        """Whether a step of this width costs the same for any number of draft tokens."""
        found = self._flat.get(width)
        if found is None:
            requests, form, most = self._requests, self._form, width * self.unit
            found = form.rows(requests, most, 0) == form.rows(requests, most, requests * most)
            self._flat[width] = found
        return found

    def targets(self, units: int, width: int) -> Sequence[float]:
        """Seconds of steps that verify 0, 1, .. at least `units` units, without drafting them."""
        key = 0 if self.exact else width
        found = self._targets.get(key, ())
        if len(found) > units:
            return found
        requests, unit, form = self._requests, self.unit, self._form

        def rows(count: int) -> int:
            return form.rows(requests, width * unit, count * unit)

        def seconds(rows: int) -> float:
            return self._costs.target_seconds(requests, rows, self._context)

        if self.exact:
            # Some are computed and the others interpolated, as precisely as costs are known.
            at = _spread(1 << units.bit_length(), 8)
            found = [seconds(rows(count)) for count in at]
            if len(at) <= at[-1]:
                found = np.interp(np.arange(at[-1] + 1), at, found).tolist()
        else:
            found = _stepped(rows, seconds, 0, requests * width)
        self._targets[key] = found
        return found

    def added(self, place: int) -> Sequence[float]:
        """Added seconds of drafting if a token at this place is drafted for 1, 2, .. all requests,
        compared with one request less; entry 0 is 0. All are 0 where steps are padded."""
        found = self._added.get(place)
        if found is None:
            found = [0.0]
            if self.exact:
                passes = list(map(sub, self._drafts(place), self._drafts(place - 1)))
                for (low, before), (high, now) in pairwise(zip(self._numbers, passes, strict=True)):
                    found += [(now - before) / (high - low)] * (high - low)
                if self._requests <= _FEW:
                    passes = [0.0, *_line([*accumulate(found)][1:])]
                    found[1:] = [now - before for before, now in pairwise(passes)]
            else:
                found *= self._requests + 1
            self._added[place] = found
        return found

    def alone(self, most: int, widths: Sequence[int]) -> Sequence[float]:
        """Seconds of steps of a single request that drafts 0, 1, .. at least `most` units; infinite
        for numbers that steps cannot have. The widths of a table's steps never change."""
        if len(self._alone) <= most:
            self._alone = [self.plain]
            for place in range(1, most + 1):
                fits = self.exact or place in widths
                spent = self.targets(place, place)[place] if fits else inf
                self._alone.append(max(self.least, spent + self._drafts(place)[-1]))
        return self._alone

    def whole(self, width: int) -> float:
        """Seconds of a step in which all requests draft `width` units."""
        full = self._requests * width
        return max(self.least, self.targets(full, width)[full] + self._drafts(width)[-1])

    def margins(self, units: int, width: int) -> tuple[float, float]:
        """The seconds that one more unit of rows takes in exact steps, near so many units, and one
        more pass of the drafter for all requests, on average up to this width, as a single one may
        be far off."""
        low, high, most = max(0, units - 1), units + 1, max(2, width)
        targets = self.targets(high, width)
        drafting = self._drafts(most)[-1] - self._drafts(1)[-1]
        return (targets[high] - targets[low]) / (high - low), drafting / (most - 1)

    def padded_drafting(self, width: int) -> float:
        """Seconds of drafting in a padded step of this width; 0 where steps are not padded."""
        return 0.0 if self.exact else self._drafts(width)[-1]

    def _drafts(self, width: int) -> Sequence[float]:
        """Seconds of drafting `width` units for each of `_numbers` of requests."""
        found = self._drafted.get(width)
        if found is None:
            found = [self._drafting(count, width) for count in self._numbers]
            self._drafted[width] = found
        return found

    def _drafting(self, drafting: int, width: int) -> float:
        """Seconds of drafting `width` units for `drafting` of the requests."""
        if not (drafting and width):
            return 0.0
        context = self._context * drafting // self._requests
        return self._costs.draft_seconds(drafting, width * self.unit, context)


def _line(values: Sequence[float]) -> list[float]:
    """Values on a rising line through these. The difference between neighbours is small, so errors
    of single values would decide whether one more request drafts."""
    half, middle = (len(values) + 1) // 2, (len(values) - 1) / 2
    apart = (sum(values[-half:]) - sum(values[:half])) / half
    slope = max(0.0, apart / max(1, len(values) - half))
    mean = sum(values) / len(values)
    return [mean + slope * (index - middle) for index in range(len(values))]


def _spread(most: int, parts: int) -> list[int]:
    """Numbers from 0 to `most`, of which `parts` are between a power of two and the next."""
    found = [0]
    while found[-1] < most:
        power = 1 << found[-1].bit_length() >> 1
        found.append(min(most, found[-1] + max(1, power // parts)))
    return found


def _stepped(
    rows: Callable[[int], int], seconds: Callable[[int], float], first: int, last: int
) -> list[float]:
    """The seconds for `first` to `last`, by their numbers of rows, which rise in few steps."""
    low, high = rows(first), rows(last)
    if low == high:
        return [seconds(low)] * (last - first + 1)
    middle = (first + last) // 2
    return _stepped(rows, seconds, first, middle) + _stepped(rows, seconds, middle + 1, last)


@dataclass(frozen=True)
class Choice:
    """How many tokens are drafted in a step, in units.

    Attributes:
        width: the most units of any request, to which the step is padded.
        counts: units of each request.
        least: the smallest survival among the tokens taken; 1 if there are none.
        tokens: expected tokens of all requests.
        seconds: expected time of the step.
    """

    width: int
    counts: Sequence[int]
    least: float
    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def choose(
    gains: Gains, widths: Sequence[int], table: CostTable, least_gain: float = 1.0
) -> Choice:
    """The choice with the most expected tokens per second.

    Args:
        gains: [requests, units] expected accepted tokens of each unit of each request, never
            rising; for a chain the survival of each token; 0 where a request may not draft.
        widths: the widths that a step may have, rising from 0.
        least_gain: steps with drafts must be so many times as fast as plain ones.
    """
    requests = len(gains)
    if requests == 1:
        return _choose_alone(gains[0], widths, table, least_gain)
    if native.choose_drafts is not None:
        return Choice(*native.choose_drafts(gains, widths, table, least_gain, LEAST_SURVIVAL))
    flat = [gain for column in zip(*gains, strict=True) for gain in column]
    order = [index for index, gain in enumerate(flat) if gain > LEAST_SURVIVAL]
    longest = 1 + order[-1] // requests if order else 0
    order.sort(key=flat.__getitem__, reverse=True)
    # The added time of each unit, by its number among those chosen at its position.
    passes = [islice(table.added(place), 1, None) for place in range(1, longest + 1)]
    added = {index: next(passes[index // requests]) for index in order}
    tokens, seconds, chosen, width = float(requests), table.plain, order[:0], 0
    speed = least_gain * tokens / seconds
    for narrower, wider in pairwise(widths):
        if narrower >= longest:
            break
        within = [index for index in order if index < wider * requests]
        gained = list(accumulate(map(flat.__getitem__, within), initial=float(requests)))
        targets = table.targets(len(within), wider)
        drafting = accumulate(map(added.__getitem__, within), initial=table.padded_drafting(wider))
        least = table.least  # noisy costs of drafting may add up to less than nothing
        spent = [max(least, it) for it in map(add, targets, drafting)]
        speeds = list(map(truediv, gained, spent))
        # Choices that fit into a narrower step are considered there.
        first = next(at for at, index in enumerate(within, 1) if index >= narrower * requests)
        best = max(speeds[first:])
        if best > speed:
            taken = speeds.index(best, first)
            tokens, seconds, speed = gained[taken], spent[taken], best
            chosen, width = within[:taken], wider
    counts = [0] * requests
    for index in chosen:
        counts[index % requests] += 1
    if table.exact:
        width = max(counts)
    return Choice(width, counts, flat[chosen[-1]] if chosen else 1.0, tokens, seconds)


def _choose_alone(
    gains: Sequence[float], widths: Sequence[int], table: CostTable, least_gain: float
) -> Choice:
    """The choice for a single request."""
    seconds = table.alone(len(gains), widths)
    tokens = most = 1.0
    speed, width = least_gain * tokens / seconds[0], 0
    for place, gain in enumerate(gains, 1):
        if gain <= LEAST_SURVIVAL:
            break
        tokens += gain
        if tokens / seconds[place] > speed:
            speed, width, most = tokens / seconds[place], place, tokens
    return Choice(width, [width], gains[width - 1] if width else 1.0, most, seconds[width])
