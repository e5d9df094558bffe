"""The best numbers of draft tokens for the requests of one step.

The possible draft tokens of all requests are ranked by survival, the probability that they and all
before them are accepted, and taken from the best on, as long as that raises the expected tokens per
second. Survival falls along a chain, so the tokens taken are a prefix of every chain.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add, itemgetter, sub, truediv
from typing import NamedTuple, Protocol

from slipstream.core.step_form import StepForm

LEAST_SURVIVAL = 0.02  # tokens with less are never drafted
_NEGATED = itemgetter(0)


class StepCosts(Protocol):
    """Estimates of the time that steps take; see `CostModel`."""

    def draft_seconds(self, requests: int, width: int, context: int) -> float:
        """Time to draft `width` tokens for each request; `context` is the sum of their lengths."""

    def target_seconds(self, requests: int, rows: int, context: int) -> float:
        """Time of a step without drafting, whose target pass has `rows` rows."""


class CostTable:
    """The estimated times of all steps that one batch may have, cached.

    Args:
        unit: number of draft tokens that are chosen together: all of a tree, 1 for chains.
    """

    def __init__(
        self, costs: StepCosts, form: StepForm, requests: int, context: int, unit: int = 1
    ) -> None:
        self._costs, self._form, self._unit = costs, form, unit
        self._requests, self._context = requests, context
        self.exact = form.ends_chains
        self._targets: dict[int, list[float]] = {}
        self._added: dict[int, list[float]] = {}

    def is_flat(self, width: int) -> bool:
        """Whether a step of this width costs the same for any number of draft tokens."""
        requests, form, most = self._requests, self._form, width * self._unit
        return form.rows(requests, most, 0) == form.rows(requests, most, requests * most)

    def targets(self, units: int, width: int) -> Sequence[float]:
        """Seconds of steps that verify 0, 1, .. at least `units` units, without drafting them."""
        found = self._targets.setdefault(0 if self.exact else width, [])
        requests, unit = self._requests, self._unit
        for count in range(len(found), units + 1):
            rows = self._form.rows(requests, width * unit, count * unit)
            found.append(self._costs.target_seconds(requests, rows, self._context))
        return found

    def added(self, place: int) -> Sequence[float]:
        """Added seconds of drafting if a token at this place is drafted for 1, 2, .. all requests,
        compared with one request less; entry 0 is 0. All are 0 where steps are padded."""
        found = self._added.get(place)
        if found is None:
            passes = [0.0] * (self._requests + 1)
            if self.exact:
                passes = [self._pass(count, place) for count in range(self._requests + 1)]
            found = self._added[place] = [0.0, *(now - last for last, now in pairwise(passes))]
        return found

    def padded_drafting(self, width: int) -> float:
        """Seconds of drafting in a padded step of this width; 0 where steps are not padded."""
        return 0.0 if self.exact else self._drafting(self._requests, width)

    def _pass(self, drafting: int, place: int) -> float:
        return self._drafting(drafting, place) - self._drafting(drafting, place - 1)

    def _drafting(self, drafting: int, width: int) -> float:
        """Seconds of drafting `width` units for `drafting` of the requests."""
        if not (drafting and width):
            return 0.0
        context = self._context * drafting // self._requests
        return self._costs.draft_seconds(drafting, width * self._unit, context)


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


def choose(gains: Sequence[Sequence[float]], widths: Sequence[int], table: CostTable) -> Choice:
    """The choice with the most expected tokens per second.

    Args:
        gains: for each request the expected accepted tokens of each unit that it may draft, never
            rising; for a chain the survival of each token.
        widths: the widths that a step may have, rising from 0.
    """
    requests = len(gains)
    longest = max(map(len, gains), default=0)
    ranked = [
        (-chain[place - 1], place, index)
        for place in range(1, longest + 1)
        for index, chain in enumerate(gains)
        if len(chain) >= place and chain[place - 1] > LEAST_SURVIVAL
    ]
    ranked.sort(key=_NEGATED)  # stable: of equal gains the nearer place, the earlier request
    tokens, seconds = float(requests), table.targets(0, 0)[0]
    best = _Best(tokens / seconds, tokens, seconds, 0, 0)
    if table.exact and requests == 1:
        widths = (0, widths[-1])  # `_best_of` tries all shorter chains, too
    for before, width in pairwise(widths):
        if longest <= before:
            break  # no wider than the last
        within = ranked if width >= longest else [pair for pair in ranked if pair[1] <= width]
        narrower = 0 if table.exact else before
        best = max(best, _best_of(within, requests, narrower, width, table))
    counts, least = [0] * requests, 1.0
    for negated, place, index in [it for it in ranked if it[1] <= best.width][: best.taken]:
        counts[index], least = place, -negated
    width = max(counts, default=0) if table.exact else best.width
    return Choice(width, counts, least, best.tokens, best.seconds)


class _Best(NamedTuple):
    """The best number of tokens to take, within one width; compared by speed."""

    speed: float
    tokens: float
    seconds: float
    width: int
    taken: int


def _best_of(
    within: Sequence[tuple[float, int, int]],
    requests: int,
    narrower: int,
    width: int,
    table: CostTable,
) -> _Best:
    """Args:
    within: units of up to this width as (minus its gain, place, request), best first.
    narrower: the next smaller width; choices that fit into it are left to it.
    """
    tokens, drafting = float(requests), table.padded_drafting(width)
    if table.is_flat(width):
        tokens -= sum([pair[0] for pair in within])
        seconds = table.targets(0, width)[0] + drafting
        return _Best(tokens / seconds, tokens, seconds, width, len(within))
    # By the number of units taken, from 1; the sums run in C.
    gained = list(accumulate(map(_NEGATED, within), sub, initial=tokens))[1:]
    seconds_of: Iterable[float] = table.targets(len(within), width)[1 : len(within) + 1]
    if table.exact:
        steps = [iter(table.added(place)[1:]) for place in range(width + 1)]
        passes = accumulate([next(steps[pair[1]]) for pair in within])
        seconds_of = map(add, seconds_of, passes)
    else:
        seconds_of = [target + drafting for target in seconds_of]
    first = next((index for index, pair in enumerate(within) if pair[1] > narrower), len(within))
    spent = list(seconds_of)
    speeds = list(map(truediv, gained[first:], spent[first:]))
    if not speeds:
        return _Best(0.0, tokens, 1.0, width, 0)
    best = max(speeds)
    index = first + speeds.index(best)
    return _Best(best, gained[index], spent[index], width, index + 1)
