"""`num_speculative_tokens="auto"`: each step drafts what promises the most tokens per second.

From the results of earlier steps follow the chances that draft tokens are accepted (acceptance.py)
and what steps cost (costs.py); the choice between all ways to draft is that of choice.py. Whoever
drafts less than it could is tried again now and then (probes.py).

Why the output keeps the target's distribution. A step's tokens follow the target's distribution
given all tokens before them, for every number of draft tokens (Leviathan et al. 2023, theorem 1),
if that number is known before the step's noise is looked at: the noise of a draft, of its verdict
and of the token behind it is keyed by the step and drawn by nobody else. What is planned here
depends on results of earlier steps alone, on tokens and confidences as much as it likes, and on
other requests, whose noise is another. (Coupled requests get the target's own samples whatever is
drafted, so there is nothing to bias.) Within a step only `ChainStops` act, which see of a place
its confidence: a function of the tokens before it and of the distribution that its token is drawn
from. To look at that token would be wrong: to verify only what the target is likely to accept is
to sample these tokens more often than the target does.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import log2
from typing import Protocol

from slipstream.core.batch import FACTOR_PARTS, ChainStops, DraftPlan, StepReport, Trim
from slipstream.core.request import Request
from slipstream.core.step_form import StepForm, StepLimits
from slipstream.engine.draft_policy import Candidate
from slipstream.engine.drafting.acceptance import Acceptance, History, survivals
from slipstream.engine.drafting.choice import Choice, CostTable, StepCosts, choose
from slipstream.engine.drafting.probes import Probes

_SURPRISE = 0.5  # how far off results are where a choice is made anew sooner
_TABLE_AGE = 24  # plans; then costs are asked for anew
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


_NARROW = (1, 2, 3, 4)  # widths that are compared with each other where none is captured


class LearningCosts(StepCosts, Protocol):
    """Costs that learn from what steps took; see `CostModel`."""

    def observe(self, report: StepReport) -> None:
        """Take in the times of a step."""


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
            self._choices = tuple(sorted({*_NARROW, *self._widths} & {*range(self._most + 1)}))
        self._costs, self._form = costs, form
        self.acceptance = Acceptance(self._places)
        self._tables: dict[tuple[int, int], CostTable] = {}
        self._choice = Choice(0, (), 1.0, 1.0, 1.0)
        # What it means for these requests, and for how many plans it stays.
        self._requests: list[Request] = []
        self._plans: list[DraftPlan] = []
        self._by_id: dict[str, DraftPlan] = {}
        self._longest = self._left = self._age = 0
        self._probes = Probes(
            self.acceptance, self._most, self._unit, self._choices, form.ends_chains
        )

    @property
    def widths(self) -> tuple[int, ...]:
        return self._widths

    @property
    def reads_confidences(self) -> bool:
        return self._form.ends_chains or self._unit == 1

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
        if self._probes.is_due():
            plans = self._probes.plans(candidates, plans)
        if min([it.most for it in candidates]) < self._longest:
            plans = [_cut(plan, it.most) for plan, it in zip(plans, candidates, strict=True)]
        return plans

    def observe(self, report: StepReport) -> None:
        self._costs.observe(report)
        results = self.acceptance.observe(report)
        choice = self._choice
        expected = choice.tokens / len(choice.counts) - 1 if choice.counts else 0.0
        if abs(self.acceptance.latest - expected) > _SURPRISE * (0.5 + expected):
            self._left = min(self._left, 3)
        if self._probes.take_in(results):  # what was learnt counts soon
            self._left = min(self._left, len(self._requests) // 4)

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
            like = next(iter(self._plans), None)
            trim = None if like is None else like.trim
            return DraftPlan(min(bound, choice.width * self._unit), trim=trim)
        gains = survivals(self.acceptance.of(request).chances, min(bound, choice.width))
        return DraftPlan(sum(gain >= choice.least for gain in gains))

    def _choose(self, requests: list[Request], candidates: Sequence[Candidate]) -> None:
        acceptance, size = self.acceptance, len(requests)
        acceptance.keep_only(size)
        histories = [acceptance.of(request) for request in requests]
        bounds = [min(it.most, it.request.num_speculative_tokens, self._most) for it in candidates]
        table = self._table(size, sum([request.num_tokens for request in requests]))
        trims = acceptance.has_confidences and not (self._form.ends_chains or self._unit > 1)
        trims = trims and not table.is_flat(self._most)
        found = acceptance.recent_chances(size) if trims else acceptance.chances_of(histories)
        gains = [self._gains(*pair) for pair in zip(found, bounds, strict=True)]
        choice = self._choice = choose(gains, self._choices, table)
        self._requests = requests
        self._left = min(4 + min(size // 2, _MOST_UNCHANGED), 1 + acceptance.num_steps // 4)
        if table.is_flat(choice.width):  # then all that is within it costs nothing
            most = choice.width * self._unit
            self._plans = [DraftPlan(min(most, bound)) for bound in bounds]
        elif trims:
            self._plans = self._trimmed_plans(histories, bounds)
        elif self._unit > 1:
            pairs_taken = zip(bounds, choice.counts, strict=True)
            self._plans = [DraftPlan(bound * taken) for bound, taken in pairs_taken]
        else:
            self._plans = self._exact_plans(histories, bounds, table)
        self._longest = max([plan.num_tokens for plan in self._plans])
        self._by_id = {
            request.request_id: plan for request, plan in zip(requests, self._plans, strict=True)
        }
        self._probes.follow(choice, self._plans, bounds, table)

    def _gains(self, chances: Sequence[float], bound: int) -> list[float]:
        """Tokens to be expected of each unit."""
        if self._unit == 1:
            return survivals(chances, bound)
        return [sum(survivals(chances, self._places))] if bound else []

    def _exact_plans(
        self, histories: Sequence[History], bounds: Sequence[int], table: CostTable
    ) -> list[DraftPlan]:
        """Chains of their own lengths; that of a request alone ends where its drafter's confidence
        says so. Several chains end as they were planned: a pass for the few that would go on costs
        nearly as much as one for all of them."""
        choice = self._choice
        if len(bounds) > 1 or not self.acceptance.has_confidences or not choice.width:
            return [DraftPlan(count) for count in choice.counts]
        rates = self.acceptance.rates(histories[0].rounded_factor)
        return [DraftPlan(bounds[0], ChainStops(rates, *self._thresholds(table)))]

    def _trimmed_plans(
        self, histories: Sequence[History], bounds: Sequence[int]
    ) -> list[DraftPlan]:
        """All draft as far as the step is wide, and the device verifies as many tokens as were
        chosen, those that it finds the most likely."""
        width, size = self._choice.width, len(bounds)
        rates = tuple(round(it, 2) for it in self.acceptance.rates(1.0))
        rows = sum(self._choice.counts)
        return [
            _trimmed(min(width, bound), (rows + place) // size, history, rates)
            for place, (history, bound) in enumerate(zip(histories, bounds, strict=True))
        ]

    def _thresholds(self, table: CostTable) -> tuple[float, float]:
        """The least survival with which one more token of a single chain is worth a draft pass and
        a row, and with which it is worth a row: what they cost in tokens."""
        choice, width = self._choice, self._choice.width
        low, high = max(0, width - 1), width + 1
        targets = table.targets(high, width)
        row = (targets[high] - targets[low]) / (high - low)
        places = range(2, max(2, width) + 1)  # of which single ones may be off
        further = sum([sum(table.added(it)[:2]) for it in places]) / len(places)
        return _bounded(choice.speed * (row + further)), _bounded(choice.speed * row)

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


def _cut(plan: DraftPlan, most: int) -> DraftPlan:
    return plan if plan.num_tokens <= most else replace(plan, num_tokens=most)


def _trimmed(count: int, num_rows: int, history: History, rates: tuple[float, ...]) -> DraftPlan:
    factor = round(history.rounded_factor * FACTOR_PARTS)
    return DraftPlan(count, trim=Trim(num_rows, factor, rates))


def _bounded(least: float) -> float:
    return min(_MOST_TO_STOP, max(_LEAST_TO_STOP, least))
