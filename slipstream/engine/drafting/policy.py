"""`num_speculative_tokens="auto"`: each step drafts what promises the most tokens per second.

From the results of earlier steps follow the chances that draft tokens are accepted (acceptance.py)
and what steps cost (costs.py); the choice between all ways to draft is that of choice.py. Whoever
drafts nothing, or less than it could, is tried again now and then: the time that probes take is
kept in a ledger, into which a small share of all time is paid, and back into which goes the time
that accepted tokens saved. So probes come seldom where they fail, and in a row where they pay.

Why the output keeps the target's distribution. A step's tokens follow the target's distribution
given all tokens before them, for every number of draft tokens (Leviathan et al. 2023, theorem 1),
if that number is known before the step's noise is looked at: the noise of a draft, of its verdict
and of the token behind it is keyed by the step and drawn by nobody else. What is planned here
depends on results of earlier steps alone, on tokens and confidences as much as it likes, and on
other requests, whose noise is another. Within a step only `ChainStops` act, which see of a place
its confidence: a function of the tokens before it and of the distribution that its token is drawn
from. To look at that token would be wrong: to verify only what the target is likely to accept is
to sample these tokens more often than the target does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Protocol

from slipstream.core.batch import ChainStops, DraftPlan, StepReport
from slipstream.core.limits import StepLimits
from slipstream.core.request import Request
from slipstream.core.step_form import StepForm
from slipstream.engine.draft_policy import Candidate
from slipstream.engine.drafting.acceptance import Acceptance, History, survivals
from slipstream.engine.drafting.choice import Choice, CostTable, StepCosts, choose

PROBE_SHARE = 0.01  # of all time
_MOST_PROBES = 4  # that are saved up for
_LEAST_PROBE = 0.002  # what a probe counts for at least, in steps
_TABLE_AGE = 128  # plans; then costs are asked for anew
_MOST_UNCHANGED = 16  # plans that a choice serves at most
_LEAST_TO_STOP, _MOST_TO_STOP = 0.02, 0.9


# Graphs are captured for these: near enough to each other that a step loses little in the next
# larger one, and few, since each is captured for every number of requests while the engine starts.
_WIDTHS = (1, 2, 4, 7, 12)


def captured_widths(limits: StepLimits) -> tuple[int, ...]:
    """Numbers of draft tokens that captured steps have, rising from 0."""
    most = limits.num_speculative_tokens
    if limits.drafts_trees:
        return (0, most)
    return (0, *(width for width in _WIDTHS if width < most), most)


class LearningCosts(StepCosts, Protocol):
    """Costs that learn from what steps took; see `CostModel`."""

    def observe(self, report: StepReport) -> None:
        """Take in the times of a step."""


@dataclass(frozen=True)
class Probe:
    """What is tried beyond a choice.

    Attributes:
        width: draft tokens that every request drafts in a padded step; 0: some requests draft one
            token (or tree) more than they were given.
        seconds: that it costs; 0: there is nothing to try.
        requests: how many try something.
    """

    width: int
    seconds: float
    requests: int


class AdaptivePolicy:
    """Chooses by costs and chances; see `DraftPolicy`.

    Args:
        limits: whose `num_speculative_tokens` is the most that is ever drafted.
        widths: that captured steps have.
        form: of steps.
    """

    def __init__(
        self, limits: StepLimits, widths: Sequence[int], costs: LearningCosts, form: StepForm
    ) -> None:
        self._most, self._places = limits.num_speculative_tokens, limits.num_positions
        self._widths = tuple(widths)
        # Tokens that are taken or left together.
        self._unit = self._most if limits.drafts_trees else 1
        self._choices = (0, 1) if limits.drafts_trees else self._widths
        if form.ends_chains and not limits.drafts_trees:
            self._choices = tuple(range(self._most + 1))
        self._costs, self._form = costs, form
        self.acceptance = Acceptance(self._places)
        self._tables: dict[tuple[int, int], CostTable] = {}
        self._choice = Choice(0, (), 1.0, 1.0, 1.0)
        # What it means for these requests, and for how many plans it stays.
        self._requests: list[Request] = []
        self._plans: list[DraftPlan] = []
        self._by_id: dict[str, DraftPlan] = {}
        self._longest = self._left = self._age = 0
        self._probe = Probe(0, 0.0, 0)
        self._ledger = 0.0  # seconds that probes may take

    @property
    def widths(self) -> tuple[int, ...]:
        return self._widths

    @property
    def reads_confidences(self) -> bool:
        return self._form.ends_chains

    # ------------------------------------------------------------------ the interface

    def plan(self, candidates: Sequence[Candidate]) -> Sequence[DraftPlan]:
        if not candidates:
            return ()
        self._left -= 1
        requests = [it.request for it in candidates]
        if requests != self._requests:
            if self._left > 0 and 4 * len(requests) <= len(self._requests):
                return [self._newcomer(it) for it in candidates]  # whose prompts end beside others
            self._turn_to(requests, candidates)
        elif self._left <= 0:
            self._choose(requests, candidates)
        plans = self._plans
        if self._ledger >= self._probe.seconds > 0:
            plans = self._probing(candidates)
        if min([it.most for it in candidates]) < max(self._longest, self._probe.width):
            plans = [_cut(plan, it.most) for plan, it in zip(plans, candidates, strict=True)]
        return plans

    def observe(self, report: StepReport) -> None:
        self._costs.observe(report)
        results = self.acceptance.observe(report)
        paid = PROBE_SHARE * self._choice.seconds
        if results:
            saved = sum(max(0, accepted - place + 1) for place, accepted in results)
            taken = self._probe.seconds * min(1.0, len(results) / max(1, self._probe.requests))
            paid += saved / self._choice.speed - taken
            self._left = 0  # what was learnt counts at once
        self._ledger = min(self._ledger + paid, _MOST_PROBES * self._probe.seconds)

    # ------------------------------------------------------------------ the choice

    def _turn_to(self, requests: list[Request], candidates: Sequence[Candidate]) -> None:
        """Other requests than those that were chosen for."""
        size, chosen_for = len(requests), len(self._choice.counts)
        if self._left <= 0 or 8 * abs(size - chosen_for) >= max(size, chosen_for) or size <= 8:
            self._choose(requests, candidates)
            return
        known = self._by_id
        self._plans = [known.get(it.request.request_id) or self._newcomer(it) for it in candidates]
        for request, plan in zip(requests, self._plans, strict=True):
            known[request.request_id] = plan
        self._requests = requests

    def _newcomer(self, candidate: Candidate) -> DraftPlan:
        """The plan that the latest choice means for others: as long as survival is worth it."""
        choice, request = self._choice, candidate.request
        bound = min(candidate.most, request.num_speculative_tokens)
        if self._unit > 1 or not self._form.ends_chains:
            return DraftPlan(min(bound, choice.width * self._unit))
        gains = survivals(self.acceptance.of(request).chances, min(bound, choice.width))
        return DraftPlan(sum(gain >= choice.least for gain in gains))

    def _choose(self, requests: list[Request], candidates: Sequence[Candidate]) -> None:
        acceptance, size = self.acceptance, len(requests)
        acceptance.keep_only(size)
        histories = [acceptance.of(request) for request in requests]
        bounds = [min(it.most, it.request.num_speculative_tokens, self._most) for it in candidates]
        gains = [self._gains(*pair) for pair in zip(histories, bounds, strict=True)]
        table = self._table(size, sum([request.num_tokens for request in requests]))
        choice = self._choice = choose(gains, self._choices, table)
        self._requests, self._left = requests, 1 + min(size // 2, _MOST_UNCHANGED)
        if table.is_flat(choice.width):  # then all that is within it costs nothing
            most = choice.width * self._unit
            self._plans = [DraftPlan(min(most, bound)) for bound in bounds]
        elif self._unit > 1:
            pairs_taken = zip(bounds, choice.counts, strict=True)
            self._plans = [DraftPlan(bound * taken) for bound, taken in pairs_taken]
        else:
            self._plans = self._exact_plans(histories, bounds, table)
        self._longest = max([plan.num_tokens for plan in self._plans])
        self._by_id = {
            request.request_id: plan for request, plan in zip(requests, self._plans, strict=True)
        }
        self._probe = self._next_probe(bounds, table)

    def _gains(self, history: History, bound: int) -> list[float]:
        """Tokens to be expected of each unit."""
        if self._unit == 1:
            return survivals(history.chances, bound)
        return [sum(survivals(history.chances, self._places))] if bound else []

    def _exact_plans(
        self, histories: Sequence[History], bounds: Sequence[int], table: CostTable
    ) -> list[DraftPlan]:
        """Chains of their own lengths; where confidences are known, these say when they end."""
        counts = self._choice.counts
        if not self.acceptance.has_confidences or not self._choice.width:
            return [DraftPlan(count) for count in counts]
        least_to_draft, least_to_verify = self._thresholds(table)
        stops: dict[float, ChainStops] = {}
        plans = []
        for history, count, bound in zip(histories, counts, bounds, strict=True):
            if not count:
                plans.append(DraftPlan(0))
                continue
            factor = history.rounded_factor
            if factor not in stops:
                rates = self.acceptance.rates(factor)
                stops[factor] = ChainStops(rates, least_to_draft, least_to_verify)
            plans.append(DraftPlan(bound, stops[factor]))
        return plans

    def _thresholds(self, table: CostTable) -> tuple[float, float]:
        """The least survival with which one more token is worth a draft pass and a row, and with
        which it is worth a row: what they cost in tokens."""
        choice, requests = self._choice, len(self._choice.counts)
        taken, width = sum(choice.counts), choice.width
        drafting = sum([count > 0 for count in choice.counts])
        around = max(1, requests // 2)
        low, high = max(0, taken - around), taken + around
        row = (table.target(high, width) - table.target(low, width)) / (high - low)
        further = sum([table.added(width, count) for count in range(1, drafting + 1)])
        to_draft = choice.speed * (row + further / drafting)
        return _bounded(to_draft), _bounded(choice.speed * row)

    def _table(self, requests: int, context: int) -> CostTable:
        """Costs by the number of requests and, roughly, by their length."""
        self._age += 1
        if self._age >= _TABLE_AGE:
            self._age = 0
            self._tables.clear()
        key = requests, round(4 * log2(context))
        found = self._tables.get(key)
        if found is None:
            found = CostTable(self._costs, self._form, requests, context, self._unit)
            self._tables[key] = found
        return found

    # ------------------------------------------------------------------ probes

    def _next_probe(self, bounds: Sequence[int], table: CostTable) -> Probe:
        """What to try next, and what it costs beyond the choice."""
        choice, unit, size = self._choice, self._unit, len(bounds)
        least = _LEAST_PROBE * choice.seconds
        short = [
            plan.num_tokens // unit
            for plan, bound in zip(self._plans, bounds, strict=True)
            if self._is_short(plan, bound)
        ]
        if short:
            return self._group_probe(short, least, table)
        wider = next((width for width in self._choices if width > choice.width), 0)
        if not wider or self._form.ends_chains or max(bounds) <= choice.width * unit:
            return Probe(0, 0.0, 0)
        seconds = table.target(size * wider, wider) + table.padded_drafting(wider)
        seconds -= choice.seconds
        return Probe(wider * unit, max(least, seconds), size)

    def _group_probe(self, short: Sequence[int], least: float, table: CostTable) -> Probe:
        """As many requests as can try one more for at most twice what it costs for one of them: a
        pass of the drafter may cost much, and little more for several."""
        choice, place = self._choice, 1 + min(short)
        taken, at_place = sum(choice.counts), sum([it >= place for it in choice.counts])
        width = max(choice.width, place)
        before = table.target(taken, width)
        drafting, costs = 0.0, list[float]()
        for number in range(1, len(short) + 1):
            drafting += table.added(place, at_place + number)
            costs.append(max(least, table.target(taken + number, width) - before + drafting))
            if costs[-1] > 2 * costs[0]:
                costs.pop()
                break
        return Probe(0, costs[-1], len(costs))

    def _is_short(self, plan: DraftPlan, bound: int) -> bool:
        """Whether a request could draft more, and nobody else would have to for it."""
        most = self._most if self._form.ends_chains else self._choice.width * self._unit
        return plan.num_tokens < min(bound, most) and plan.stops is None

    def _probing(self, candidates: Sequence[Candidate]) -> list[DraftPlan]:
        """The plans of a step that tries something."""
        acceptance, width, unit = self.acceptance, self._probe.width, self._unit
        acceptance.all_until = acceptance.num_steps + 3
        plans = list(self._plans)
        short: list[tuple[bool, int, int, int]] = []
        for index, it in enumerate(candidates):
            history, count = acceptance.of(it.request), plans[index].num_tokens
            bound = min(it.most, it.request.num_speculative_tokens, self._most)
            if width:
                history.probed = self._choice.width + 1
                plans[index] = DraftPlan(min(width, bound))
            elif self._is_short(plans[index], bound):
                short.append((count > 0, history.probed_at, index, min(count + unit, bound)))
        for _, _, index, count in sorted(short)[: self._probe.requests]:
            history = acceptance.of(candidates[index].request)
            history.probed, history.probed_at = max(1, count // unit), acceptance.num_steps
            plans[index] = DraftPlan(count)
        return plans


def _cut(plan: DraftPlan, most: int) -> DraftPlan:
    return plan if plan.num_tokens <= most else DraftPlan(most, plan.stops)


def _bounded(least: float) -> float:
    return min(_MOST_TO_STOP, max(_LEAST_TO_STOP, least))
