"""The best numbers of draft tokens for the requests of one step.

Tokens are ranked by the chance that they survive, over all requests and places, and taken as long
as that raises expected tokens per second. Chances fall along a chain, so what is taken is a prefix
of every chain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

from slipstream.core.step_form import StepForm

LEAST_SURVIVAL = 0.02  # no token that is less likely is worth a row


class StepCosts(Protocol):
    """What steps are expected to take; see `CostModel`."""

    def draft_seconds(self, requests: int, width: int, context: int) -> float:
        """What drafting `width` tokens takes for requests of `context` tokens in all."""

    def target_seconds(self, requests: int, rows: int, context: int) -> float:
        """What all else takes in a step with so many rows of the target's pass."""


class CostTable:
    """Costs of the steps of one batch, each asked for once.

    Args:
        unit: draft tokens that are taken or left together (a tree's); 1 for chains.
    """

    def __init__(
        self, costs: StepCosts, form: StepForm, requests: int, context: int, unit: int = 1
    ) -> None:
        self._costs, self._form, self._unit = costs, form, unit
        self._requests, self._context = requests, context
        self._targets: dict[int, float] = {}
        self._added: dict[tuple[int, int], float] = {}

    def is_flat(self, width: int) -> bool:
        """Whether draft tokens within this width cost nothing."""
        requests, form, most = self._requests, self._form, width * self._unit
        return form.rows(requests, most, 0) == form.rows(requests, most, requests * most)

    def target(self, units: int, width: int) -> float:
        """Seconds of a step that verifies so many units of draft tokens, without drafting."""
        requests = self._requests
        rows = self._form.rows(requests, width * self._unit, units * self._unit)
        found = self._targets.get(rows)
        if found is None:
            found = self._costs.target_seconds(requests, rows, self._context)
            self._targets[rows] = found
        return found

    def padded_drafting(self, width: int) -> float:
        """Seconds of drafting in a step of this width, whoever drafts."""
        return 0.0 if self._form.ends_chains else self._drafting(self._requests, width)

    def added(self, place: int, count: int) -> float:
        """What drafting costs more if a token at this place is drafted for so many requests and not
        for one less."""
        if not self._form.ends_chains:
            return 0.0
        found = self._added.get((place, count))
        if found is None:
            with_it = self._drafting(count, place) - self._drafting(count, place - 1)
            without = self._drafting(count - 1, place) - self._drafting(count - 1, place - 1)
            found = self._added[place, count] = with_it - without
        return found

    def _drafting(self, drafting: int, width: int) -> float:
        """Seconds of drafting `width` units for so many of the requests."""
        if not (drafting and width):
            return 0.0
        context = self._context * drafting // self._requests
        return self._costs.draft_seconds(drafting, width * self._unit, context)


@dataclass(frozen=True)
class Choice:
    """What is drafted in a step.

    Attributes:
        width: that the step is padded to: the most units of any request.
        counts: units of each request.
        least: the least survival of what was taken; 1 where nothing was.
        tokens: expected, of all requests.
        seconds: expected.
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


def choose(gains: Sequence[Sequence[float]], widths: Sequence[int], table: CostTable) -> Choice:
    """The most expected tokens per second.

    Args:
        gains: for each request what each of its units is expected to give, never rising: of a chain
            the survival of each token, as many as it may draft.
        widths: numbers of units that a step may have, rising from 0.
    """
    requests = len(gains)
    ranked = sorted(
        (-gain, place, index)
        for index, chain in enumerate(gains)
        for place, gain in enumerate(chain, 1)
        if gain > LEAST_SURVIVAL
    )
    tokens, seconds = float(requests), table.target(0, 0)
    best = _Best(tokens / seconds, tokens, seconds, 0, 0)
    longest = max(map(len, gains), default=0)
    for before, width in pairwise(widths):
        if longest <= before:
            break  # no wider than the last
        within = [pair for pair in ranked if pair[1] <= width]
        tokens = float(requests)
        if table.is_flat(width):
            tokens -= sum(pair[0] for pair in within)
            seconds = table.target(0, width) + table.padded_drafting(width)
            if tokens > best.speed * seconds:
                best = _Best(tokens / seconds, tokens, seconds, width, len(within))
            continue
        drafting, at_place = table.padded_drafting(width), [0] * (width + 1)
        for taken, (negated, place, _) in enumerate(within, 1):
            tokens -= negated
            at_place[place] += 1
            drafting += table.added(place, at_place[place])
            seconds = table.target(taken, width) + drafting
            if tokens > best.speed * seconds:
                best = _Best(tokens / seconds, tokens, seconds, width, taken)
    counts, least = [0] * requests, 1.0
    for negated, place, index in [it for it in ranked if it[1] <= best.width][: best.taken]:
        counts[index], least = place, -negated
    return Choice(best.width, counts, least, best.tokens, best.seconds)


class _Best(NamedTuple):
    speed: float
    tokens: float
    seconds: float
    width: int
    taken: int
