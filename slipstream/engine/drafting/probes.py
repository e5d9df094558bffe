"""Probes: steps that draft more than the latest choice, so that drafting is never off for good.

Where all steps draft, a few plain ones come between them now and then, so that their time is known:
the less is lost by them, the more often. It decides whether drafting is worth it, and an estimate
that only steps with drafts have moved may be far off. The first of them is slower than the others,
since the target's weights have left the caches.

Probes of more tokens have a budget of time. A small share of all time is added to it, and so is the
time that accepted tokens of a probe saved. So they are rare where they fail, and frequent where
they pay.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.core.batch import DraftPlan
from slipstream.engine.draft_policy import Candidate
from slipstream.engine.drafting.acceptance import Acceptance
from slipstream.engine.drafting.choice import Choice, CostTable

PROBE_SHARE = 0.01  # share of all time that is added to the budget
_MOST_SAVED = 4  # the budget is enough for this many probes at most
_LEAST_SECONDS = 0.002  # least cost of a probe, as a share of a step
_RESULTS_IN = 3  # steps until the results of a probe arrive
# Share of all time that plain steps may lose, how many come at a time, and the fewest and the most
# plans between them.
_PLAIN_SHARE, _PLAIN_STEPS, _FEWEST_BETWEEN, _MOST_BETWEEN = 0.003, 3, 24, 400
# What a plain step loses, as a share of a step with drafts, up to which it may be no loss at all:
# its time was then measured by artificial requests, or long ago, and may be wrong by as much. So
# the first plain steps come early, and then after twice as many plans each time.
_DOUBTFUL = 0.3
_MOST_SPENT = 4  # largest cost of a probe that is believed, in steps


@dataclass(frozen=True)
class Probe:
    """How many tokens the next probe drafts beyond the choice.

    Attributes:
        width: number of tokens that all requests draft, in a padded step or in a larger tree; 0:
            some requests draft one token (or tree) more than was chosen for them.
        seconds: its cost; 0: there is nothing to probe.
        requests: number of requests that draft more.
        place: see `History.probed`; 0: the last token that a request drafts.
    """

    width: int = 0
    seconds: float = 0.0
    requests: int = 0
    place: int = 0


@dataclass(frozen=True)
class Sizes:
    """The size of the trees of a choice.

    Attributes:
        number: of the size, from 1; 0 if nothing is drafted.
        larger: costs with the next larger size as the unit; None: there is none.
    """

    number: int
    larger: CostTable | None


class Probes:
    """Decides when a step is a probe, and what it drafts.

    Args:
        most: maximum of draft tokens of a request.
        widths: numbers of units that steps may have, rising from 0.
        exact: steps are not padded, so one request may draft more than others.
    """

    def __init__(
        self, acceptance: Acceptance, most: int, widths: Sequence[int], exact: bool
    ) -> None:
        self._acceptance, self._most, self._unit = acceptance, most, 1
        self._widths, self._exact = widths, exact
        self.next, self._choice = Probe(), Choice(0, (), 1.0, 1.0, 1.0)
        self._room = 0
        self._ledger = 0.0  # seconds
        self._rests = 0  # plans until the next probe is allowed
        self._with_drafts = 0  # plans since the latest plain one; below 1 while these go on
        self._between: float = _FEWEST_BETWEEN  # plans from a plain one to the next
        self._most_doubtful = _FEWEST_BETWEEN  # such plans while drafting hardly pays

    def plain_is_due(self, drafts: bool) -> bool:
        """Whether this step is to be plain, to measure it; called once for every plan.

        Args:
            drafts: whether the plan drafts.
        """
        if not drafts:
            self._with_drafts = 0
            return False
        self._with_drafts += 1
        if self._with_drafts > self._between:
            self._with_drafts = 1 - _PLAIN_STEPS
            self._most_doubtful *= 2
            return True
        return self._with_drafts <= 0

    def is_due(self) -> bool:
        """Whether this step is to be a probe; called once for every plan."""
        self._rests -= 1
        return self._ledger >= self.next.seconds > 0 and self._rests <= 0

    def take_in(self, results: Sequence[int], seconds: float) -> bool:
        """Update the budget after a step.

        Args:
            results: see `Acceptance.observe`.
            seconds: the time of the step. A probe may take longer than estimated, since the drafter
                first has to compute the tokens that it did not draft.

        Returns:
            Whether a token at a position that was tried was accepted.
        """
        choice, probe, saved = self._choice, self.next, sum(results)
        self._ledger += PROBE_SHARE * choice.seconds
        if results:
            taken = probe.seconds * min(1.0, len(results) / max(1, probe.requests))
            taken = max(taken, min(seconds - choice.seconds, _MOST_SPENT * choice.seconds))
            self._ledger += saved / choice.speed - taken
        self._ledger = min(self._ledger, _MOST_SAVED * probe.seconds)
        return saved > 0

    def follow(
        self,
        choice: Choice,
        plans: Sequence[DraftPlan],
        bounds: Sequence[int],
        table: CostTable,
        trees: Sizes | None = None,
    ) -> None:
        """After a new choice, find what to probe beyond it, and its cost.

        Args:
            table: the costs that it was chosen by.
            trees: of what size its trees are; None: drafts are chains.
        """
        self._choice, self._unit = choice, table.unit
        lost = table.plain - len(bounds) / choice.speed  # by a plain step, for its tokens
        worth = lost / choice.seconds * _PLAIN_STEPS / _PLAIN_SHARE
        if lost < _DOUBTFUL * choice.seconds:
            worth = min(worth, self._most_doubtful)
        self._between = min(max(worth, _FEWEST_BETWEEN), _MOST_BETWEEN)
        # The most that a request may draft without a change for the others.
        self._room = self._most if self._exact else choice.width * self._unit
        if trees is not None and self._exact:
            self._room = self._unit
        pairs = zip(plans, bounds, strict=True)
        short, room = list[int](), self._room
        if not (plans[0].stops or plans[0].trim):  # then the others have none either
            counts = [plan.num_tokens for plan, bound in pairs if plan.num_tokens < bound]
            short = [count // self._unit for count in counts if count < room]
        if short:
            self.next = self._for_some(short, table)
            if trees is not None:
                self.next = replace(self.next, place=trees.number or 1)
        elif trees is not None:
            self.next = self._of_larger(trees, len(bounds))
        elif not self._exact and max(bounds) > choice.width * self._unit:
            self.next = self._for_all(len(bounds), table)
        else:
            self.next = Probe()

    def _for_all(self, requests: int, table: CostTable) -> Probe:
        """A probe of the next larger width, for all requests."""
        choice = self._choice
        wider = next((width for width in self._widths if width > choice.width), 0)
        if not wider:
            return Probe()
        more = table.whole(wider) - choice.seconds
        return Probe(wider, max(self._least, more), requests, choice.width + 1)

    def _of_larger(self, trees: Sizes, requests: int) -> Probe:
        """A probe of larger trees than those of the choice, or of trees at all, for all requests:
        trees of one step have one shape."""
        if trees.larger is None:
            return Probe()
        more = trees.larger.whole(1) - self._choice.seconds
        return Probe(trees.larger.unit, max(self._least, more), requests, trees.number + 1)

    def _for_some(self, short: Sequence[int], table: CostTable) -> Probe:
        """A probe of one more unit, for as many requests as cost at most twice as much as one: a
        pass of the drafter is expensive, but little more so for several requests."""
        choice, place = self._choice, 1 + min(short)
        taken, at_place = sum(choice.counts), sum([it >= place for it in choice.counts])
        targets = table.targets(taken + len(short), max(choice.width, place))
        added = table.added(place)
        drafting, costs = 0.0, list[float]()
        for number in range(1, 1 + min(len(short), len(added) - 1 - at_place)):
            drafting += added[at_place + number]
            more = targets[taken + number] - targets[taken] + drafting
            # Bounded, since an estimate that is old may be too high.
            costs.append(min(max(self._least, more), self._choice.seconds))
            if costs[-1] > 2 * costs[0]:
                costs.pop()
                break
        return Probe(0, costs[-1], len(costs)) if costs else Probe()

    @property
    def _least(self) -> float:
        return _LEAST_SECONDS * self._choice.seconds

    def _is_short(self, plan: DraftPlan, bound: int) -> bool:
        """Whether a request could draft more without a change for the others."""
        count = plan.drafted
        return count < bound and count < self._room and not (plan.stops or plan.trim)

    def plans(
        self, candidates: Sequence[Candidate], chosen: Sequence[DraftPlan]
    ) -> list[DraftPlan]:
        """The plans of a step that is a probe."""
        acceptance, width, unit = self._acceptance, self.next.width, self._unit
        acceptance.expect_changes(_RESULTS_IN)
        plans = list(chosen)
        self._rests = 2 + len(plans) // 4
        short: list[tuple[bool, int, int, int]] = []
        for index, (request, most) in enumerate(candidates):
            plan, bound = plans[index], min(most, request.num_speculative_tokens, self._most)
            if not (width or self._is_short(plan, bound)):
                continue
            history = acceptance.of(request)
            if history.ends_soon:
                continue
            if width:
                history.probed = self.next.place
                plans[index] = plan.drafting(min(width, bound))
            else:
                more = min(plan.drafted + unit, bound)
                short.append((plan.drafted > 0, history.probed_at, index, more))
        for _, _, index, count in sorted(short)[: self.next.requests]:
            history = acceptance.of(candidates[index].request)
            history.probed, history.probed_at = self.next.place or count, acceptance.num_steps
            plans[index] = plans[index].drafting(count)
        return plans
