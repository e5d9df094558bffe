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
        self.exact = form.ends_chains
        self._targets: dict[int, list[float]] = {}
        self._added: dict[int, list[float]] = {}

    def is_flat(self, width: int) -> bool:
        """Whether draft tokens within this width cost nothing."""
        requests, form, most = self._requests, self._form, width * self._unit
        return form.rows(requests, most, 0) == form.rows(requests, most, requests * most)

    def targets(self, units: int, width: int) -> Sequence[float]:
        """Seconds of a step without drafting that verifies 0, 1, .. `units` units or more."""
        found = self._targets.setdefault(0 if self.exact else width, [])
        requests, unit = self._requests, self._unit
        for count in range(len(found), units + 1):
            rows = self._form.rows(requests, width * unit, count * unit)
            found.append(self._costs.target_seconds(requests, rows, self._context))
        return found

    def added(self, place: int) -> Sequence[float]:
        """What drafting costs more if a token at this place is drafted for 0, 1, .. all requests
        and not for one less; nothing where steps are padded."""
        found = self._added.get(place)
        if found is None:
            passes = [0.0] * (self._requests + 1)
            if self.exact:
                passes = [self._pass(count, place) for count in range(self._requests + 1)]
            found = self._added[place] = [0.0, *(now - last for last, now in pairwise(passes))]
        return found

    def padded_drafting(self, width: int) -> float:
        """Seconds of drafting in a step of this width, whoever drafts."""
        return 0.0 if self.exact else self._drafting(self._requests, width)

    def _pass(self, drafting: int, place: int) -> float:
        return self._drafting(drafting, place) - self._drafting(drafting, place - 1)

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
        [
            (-gain, place, index)
            for index, chain in enumerate(gains)
            for place, gain in enumerate(chain, 1)
            if gain > LEAST_SURVIVAL
        ]
    )
    tokens, seconds = float(requests), table.targets(0, 0)[0]
    best = _Best(tokens / seconds, tokens, seconds, 0, 0)
    longest = max(map(len, gains), default=0)
    if table.exact and requests == 1:
        widths = (0, widths[-1])  # shorter chains are what a longer one begins with
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
    """The first so many of the ranked tokens within a width."""

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
    within: tokens of up to this width as (minus its gain, place, request), best first.
    narrower: a step that is no wider than this is none of this width.
    """
    tokens, drafting = float(requests), table.padded_drafting(width)
    if table.is_flat(width):
        tokens -= sum([pair[0] for pair in within])
        seconds = table.targets(0, width)[0] + drafting
        return _Best(tokens / seconds, tokens, seconds, width, len(within))
    targets = table.targets(len(within), width)
    added = [table.added(place) for place in range(width + 1)]
    at_place = [0] * (width + 1)
    best, best_tokens, best_seconds, best_taken = 0.0, tokens, 1.0, 0
    is_wide = not narrower
    for taken, (negated, place, _) in enumerate(within, 1):
        tokens -= negated
        at_place[place] = count = at_place[place] + 1
        drafting += added[place][count]
        seconds = targets[taken] + drafting
        is_wide = is_wide or place > narrower
        if is_wide and tokens > best * seconds:
            best, best_tokens, best_seconds, best_taken = tokens / seconds, tokens, seconds, taken
    return _Best(best, best_tokens, best_seconds, width, best_taken)
