"""Probes: steps that try more than the latest choice, so that nothing is switched off for ever.

Their time is kept in a ledger, into which a small share of all time is paid, and back into which
goes the time that accepted tokens saved. So probes come seldom where they fail, and in a row where
they pay.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.core.batch import DraftPlan
from slipstream.engine.draft_policy import Candidate
from slipstream.engine.drafting.acceptance import Acceptance
from slipstream.engine.drafting.choice import Choice, CostTable

PROBE_SHARE = 0.015  # of all time
_MOST_SAVED = 4  # probes that are saved up for
_LEAST_SECONDS = 0.002  # what a probe counts for at least, in steps
_RESULTS_IN = 3  # steps until the results of a probe are here


@dataclass(frozen=True)
class Probe:
    """What is tried beyond a choice.

    Attributes:
        width: draft tokens that every request drafts in a padded step; 0: some requests draft one
            token (or tree) more than they were given.
        seconds: that it costs; 0: there is nothing to try.
        requests: how many try something.
    """

    width: int = 0
    seconds: float = 0.0
    requests: int = 0


class Probes:
    """Says when something is tried, and what.

    Args:
        most: draft tokens of a request.
        unit: tokens that are taken or left together.
        widths: numbers of units that steps may have, rising from 0.
        exact: requests may draft more without others that have to, too.
    """

    def __init__(
        self, acceptance: Acceptance, most: int, unit: int, widths: Sequence[int], exact: bool
    ) -> None:
        self._acceptance, self._most, self._unit = acceptance, most, unit
        self._widths, self._exact = widths, exact
        self.next, self._choice = Probe(), Choice(0, (), 1.0, 1.0, 1.0)
        self._ledger = 0.0  # seconds
        self._rests = 0  # plans until there may be another

    def is_due(self) -> bool:
        """Asked for every plan."""
        self._rests -= 1
        return self._ledger >= self.next.seconds > 0 and self._rests <= 0

    def take_in(self, results: Sequence[tuple[int, int]]) -> bool:
        """A step has ended.

        Args:
            results: of each probe that was in it, the place and how many tokens were accepted.

        Returns:
            Whether some probe found what it was for.
        """
        choice, probe, saved = self._choice, self.next, 0
        self._ledger += PROBE_SHARE * choice.seconds
        if results:
            saved = sum(max(0, accepted - place + 1) for place, accepted in results)
            taken = probe.seconds * min(1.0, len(results) / max(1, probe.requests))
            self._ledger += saved / choice.speed - taken
        self._ledger = min(self._ledger, _MOST_SAVED * probe.seconds)
        return saved > 0

    def follow(
        self, choice: Choice, plans: Sequence[DraftPlan], bounds: Sequence[int], table: CostTable
    ) -> None:
        """There is a new choice: find what to try beyond it, and what that costs."""
        self._choice = choice
        short = [
            plan.num_tokens // self._unit
            for plan, bound in zip(plans, bounds, strict=True)
            if self._is_short(plan, bound)
        ]
        if short:
            self.next = self._for_some(short, table)
        elif not self._exact and max(bounds) > choice.width * self._unit:
            self.next = self._for_all(len(bounds), table)
        else:
            self.next = Probe()

    def _for_all(self, requests: int, table: CostTable) -> Probe:
        """The next larger width."""
        choice = self._choice
        wider = next((width for width in self._widths if width > choice.width), 0)
        if not wider:
            return Probe()
        full = requests * wider
        seconds = table.targets(full, wider)[full] + table.padded_drafting(wider) - choice.seconds
        return Probe(wider * self._unit, max(self._least, seconds), requests)

    def _for_some(self, short: Sequence[int], table: CostTable) -> Probe:
        """As many requests as can try one more for at most twice what it costs for one of them: a
        pass of the drafter may cost much, and little more for several."""
        choice, place = self._choice, 1 + min(short)
        taken, at_place = sum(choice.counts), sum([it >= place for it in choice.counts])
        targets = table.targets(taken + len(short), max(choice.width, place))
        added = table.added(place)
        drafting, costs = 0.0, list[float]()
        for number in range(1, 1 + min(len(short), len(added) - 1 - at_place)):
            drafting += added[at_place + number]
            more = targets[taken + number] - targets[taken] + drafting
            # What was not tried for long may be thought dearer than it is.
            costs.append(min(max(self._least, more), self._choice.seconds))
            if costs[-1] > 2 * costs[0]:
                costs.pop()
                break
        return Probe(0, costs[-1], len(costs)) if costs else Probe()

    @property
    def _least(self) -> float:
        return _LEAST_SECONDS * self._choice.seconds

    def _is_short(self, plan: DraftPlan, bound: int) -> bool:
        """Whether a request could draft more, and nobody else would have to for it."""
        most = self._most if self._exact else self._choice.width * self._unit
        return plan.num_tokens < min(bound, most) and plan.stops is None and plan.trim is None

    def plans(
        self, candidates: Sequence[Candidate], chosen: Sequence[DraftPlan]
    ) -> list[DraftPlan]:
        """The plans of a step that tries something."""
        acceptance, width, unit = self._acceptance, self.next.width, self._unit
        acceptance.all_until = acceptance.num_steps + _RESULTS_IN
        plans = list(chosen)
        self._rests = 2 + len(plans) // 4
        short: list[tuple[bool, int, int, int]] = []
        for index, it in enumerate(candidates):
            history, count = acceptance.of(it.request), plans[index].num_tokens
            bound = min(it.most, it.request.num_speculative_tokens, self._most)
            if width:
                history.probed = self._choice.width + 1
                plans[index] = DraftPlan(min(width, bound))
            elif self._is_short(plans[index], bound):
                short.append((count > 0, history.probed_at, index, min(count + unit, bound)))
        for _, _, index, count in sorted(short)[: self.next.requests]:
            history = acceptance.of(candidates[index].request)
            history.probed, history.probed_at = max(1, count // unit), acceptance.num_steps
            plans[index] = DraftPlan(count)
        return plans
