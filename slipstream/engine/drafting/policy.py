"""`num_speculative_tokens="auto"`: draft as many tokens as give the most tokens per second.

The results of earlier steps give estimates of the probability that draft tokens are accepted
(acceptance.py) and of the time that steps take (costs.py). From these choice.py finds the best
number of draft tokens for each request. A request that drafts fewer than it could is probed with
more now and then (probes.py). Combined drafters are chosen between (lookups.py).

Why the output keeps the target's distribution. For every number of draft tokens, the tokens of a
step have the target's distribution given the tokens before them (Leviathan et al. 2023, theorem 1),
as long as that number is fixed before any of the step's noise is used. The noise of a draft, of its
verdict and of the token after it is keyed by the step and used nowhere else. A plan made here
depends only on results of earlier steps (tokens and confidences alike) and on other requests, which
have noise of their own. (Coupled requests get the target's own samples whatever is drafted, so they
cannot be biased.) Within a step only `ChainStops` act. They read the confidence of a place, which
depends on the tokens before it and on the distribution that its token is drawn from. Reading the
token itself would be wrong: to verify only tokens that the target is likely to accept is to sample
these more often than the target does.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import repeat
from math import log2
from operator import attrgetter

from slipstream.core.batch import FACTOR_PARTS, ChainStops, DraftPlan, StepReport, Trim
from slipstream.core.request import Request
from slipstream.core.step_form import StepForm, StepLimits
from slipstream.engine.draft_policy import Candidate
from slipstream.engine.drafting.acceptance import Acceptance, History, survivals
from slipstream.engine.drafting.choice import Choice, CostTable, StepCosts, choose
from slipstream.engine.drafting.lateness import Lateness
from slipstream.engine.drafting.lookups import Lookups
from slipstream.engine.drafting.pace import Pace
from slipstream.engine.drafting.probes import Probes, Sizes
from slipstream.engine.drafting.sizes import chosen_widths, tree_sizes

# Relative error of expected tokens or seconds that makes a new choice due, and in how many plans.
_SURPRISE, _CHOSEN_IN = 0.5, 3
# Drafting is begun if it seems to be so many times as fast as plain steps. Estimates are noisy, the
# best of many is rarely as good as it looks, and each change back and forth costs a little.
_LEAST_GAIN = 1.04
# Tables of costs are made again after so many plans. Captured steps hardly vary: for these, also at
# once if a table is off by more than this, and after as many steps in turn that took much longer
# than expected. Elsewhere that would follow noise.
_TABLE_AGE, _OUTDATED, _MOST_SLOW = 48, 0.15, 4
_MOST_UNCHANGED = 28  # a choice serves 4 plans and at most this many more
_OWN_MOST, _TOKEN_IDS = attrgetter("num_speculative_tokens"), attrgetter("token_ids")
_LEAST_TO_STOP, _MOST_TO_STOP = 0.02, 0.9


class AdaptivePolicy:
    """Chooses K by estimated costs and acceptance; see `DraftPolicy`.

    Args:
        limits: `num_speculative_tokens` is the largest K.
        widths: see `DraftPolicy.widths`.
        costs: estimates of the time that steps take.
        form: how steps are laid out.
        late_tokens: see `Lateness`.
    """

    def __init__(
        self,
        limits: StepLimits,
        widths: Sequence[int],
        costs: StepCosts,
        form: StepForm,
        late_tokens: int = 0,
    ) -> None:
        self._most, self.widths = limits.num_speculative_tokens, tuple(widths)
        # The sizes of trees; empty for chains. All trees of a step have one size.
        self._sizes = tree_sizes(self._most) if limits.drafts_trees else ()
        self._choices = chosen_widths(limits, widths, form)
        self._costs, self._form = costs, form
        # If all tokens come from one pass, nothing is saved by ending a chain, and the confidences
        # of later tokens do not take the earlier ones into account.
        by_one = not limits.drafts_at_once
        self.reads_confidences = by_one if form.ends_chains else not self._sizes
        self.acceptance = Acceptance(limits.num_positions, self._sizes)
        self._tables: dict[tuple[int, int, int], CostTable] = {}
        self._choice, self._unit = Choice(0, (), 1.0, 1.0, 1.0), 1  # see `CostTable`
        # The plans that follow from it, for these requests; `_left` calls of `plan` use them.
        self._requests: Sequence[Request] = ()
        self._plans: list[DraftPlan] = []
        self._known: dict[Request, DraftPlan] = {}  # filled when requests change
        self._longest = self._left = self._age = self._num_slow = 0
        self._expected = 0.0  # accepted tokens of a request in a step
        # Plans that name just a number of tokens.
        self._simple = tuple(map(DraftPlan, range(self._most + 1)))
        self._pace = Pace()
        self._lateness = Lateness(self.acceptance, costs, late_tokens)
        passes = limits.lookup_passes
        self._lookups = None if passes is None else Lookups(self._most, passes)
        self._probes = Probes(self.acceptance, self._most, self._choices, form.ends_chains)

    # ------------------------------------------------------------------ the interface

    def plan(self, candidates: Sequence[Candidate]) -> Sequence[DraftPlan]:
        if not candidates:
            return ()
        self._left -= 1
        self._age += 1
        requests, most = zip(*candidates, strict=True)
        if requests != self._requests:
            if self._left > 0 and 4 * len(requests) <= len(self._requests):
                # Few, at the end of their prompts.
                return [self._plan_for_new(*it) for it in candidates]
            self._replan(requests, most)
        elif self._left <= 0:
            self._choose(requests, most)
        plans: Sequence[DraftPlan] = self._plans
        if self._probes.plain_is_due(self._longest > 0):
            return [self._simple[0]] * len(plans)
        if self._lookups is not None:
            plans = self._lookups.tried(candidates, plans)
        if self._probes.is_due():
            plans = self._probes.plans(candidates, plans)
        if min(most) < self._longest:
            plans = [plan.cut(it.most) for plan, it in zip(plans, candidates, strict=True)]
        return plans

    def observe(self, report: StepReport) -> None:
        if self._pace.is_due(report):
            self._costs.observe(report)
        if self._lookups is not None:
            self._lookups.observe(report)
        results = self.acceptance.observe(report)
        off = abs(self.acceptance.latest - self._expected)
        seconds = report.times.device + report.times.rest
        is_slow = seconds > (1 + _SURPRISE) * self._choice.seconds and report.padded
        self._num_slow = self._num_slow + 1 if is_slow else 0
        if self._num_slow >= _MOST_SLOW:  # not just a probe: the tables are wrong
            self._num_slow, self._age = 0, _TABLE_AGE
        is_other = off > _SURPRISE * (0.5 + self._expected)
        if is_other:
            self.acceptance.expect_changes(_CHOSEN_IN)
        if is_slow or is_other:
            self._left = min(self._left, _CHOSEN_IN)
        if self._probes.take_in(results, seconds):  # a probe succeeded: choose again soon
            self._left = min(self._left, len(self._requests) // 4)

    # ------------------------------------------------------------------ the choice

    def _replan(self, requests: Sequence[Request], most: Sequence[int]) -> None:
        """Plan for a set of requests that differs from that of the last choice."""
        size, chosen_for = len(requests), len(self._choice.counts)
        if self._left <= 0 or size <= 8:
            self._choose(requests, most)
            return
        if not self._known:
            self._known = dict(zip(self._requests, self._plans, strict=True))
        known = self._known
        pairs = zip(requests, most, strict=True)
        new = [(request, room) for request, room in pairs if request not in known]
        changed = max(len(new), chosen_for - size)
        if 8 * changed >= max(size, chosen_for):
            self._choose(requests, most)
            return
        for request, room in new:
            plan = known[request] = self._plan_for_new(request, room)
            self._longest = max(self._longest, plan.num_tokens)
        self._plans = list(map(known.__getitem__, requests))
        self._requests = requests

    def _plan_for_new(self, request: Request, most: int) -> DraftPlan:
        """A plan for a request that is new since the latest choice, by the same thresholds."""
        choice, history = self._choice, self.acceptance.of(request)
        bound = self._lateness.bound(request, min(most, request.num_speculative_tokens))
        if self._sizes or not self._form.ends_chains:
            like = next(iter(self._plans), None)
            trim = None if like is None else like.trim
            if trim is not None:
                factor = round(self.acceptance.factor_of(history) * FACTOR_PARTS)
                trim = replace(trim, factor=factor)
            return DraftPlan(min(bound, choice.width * self._unit), trim=trim)
        gains = survivals(history.chances, min(bound, choice.width))
        return DraftPlan(sum(gain >= choice.least for gain in gains))

    def _choose(self, requests: Sequence[Request], most: Sequence[int]) -> None:
        acceptance, size = self.acceptance, len(requests)
        acceptance.drop_finished(size)
        histories = acceptance.of_all(requests)
        bounds = list(map(min, most, map(_OWN_MOST, requests), repeat(self._most)))
        context = sum(map(len, map(_TOKEN_IDS, requests)))
        table = self._table(size, context, 1)
        bounds = self._lateness.bounds(requests, bounds, table)
        trims = acceptance.has_confidences and not (self._form.ends_chains or self._sizes)
        trims = trims and not table.is_flat(self._most)
        least_gain, trees = 1.0 if self._choice.width else _LEAST_GAIN, None
        if self._sizes:
            chances = acceptance.chances_of(histories)
            table, trees = self._choose_size(chances, bounds, context, least_gain)
        else:
            recent = acceptance.recent_chances(size) if trims else None
            gains = acceptance.gains_of(histories, bounds, recent)
            self._choice = choose(gains, self._choices, table, least_gain)
        choice, self._unit = self._choice, table.unit
        self._requests, self._known = requests, {}
        self._expected = choice.tokens / size - 1
        known = acceptance.num_steps * max(4, min(size, 16)) // 16  # by results
        self._left = min(4 + min(2 * size - 2, _MOST_UNCHANGED), 1 + known)
        if table.is_flat(choice.width):  # then no draft token within it costs anything
            widest = choice.width * self._unit
            self._plans = [self._simple[min(widest, bound)] for bound in bounds]
        elif trims:
            self._plans = self._trimmed_plans(histories, bounds)
        elif trees is not None:
            pairs_taken = zip(bounds, choice.counts, strict=True)
            self._plans = [self._simple[min(it, table.unit) * taken] for it, taken in pairs_taken]
        else:
            self._plans = self._exact_plans(histories, bounds, table)
        self._probes.follow(choice, self._plans, bounds, table, trees)
        if self._lookups is not None:
            self._plans = self._lookups.split(requests, self._plans, bounds, choice, table)
        self._longest = max([plan.num_tokens for plan in self._plans])

    def _choose_size(
        self,
        chances: Sequence[Sequence[float]],
        bounds: Sequence[int],
        context: int,
        least_gain: float,
    ) -> tuple[CostTable, Sizes]:
        """Choose a size of trees, and which requests draft one; returns the costs, and the size."""
        requests, best, number = len(bounds), None, 0
        tables = [self._table(requests, context, size) for size in self._sizes]
        for place, table in enumerate(tables, 1):
            gain, pairs = self.acceptance.tree_gain, zip(chances, bounds, strict=True)
            gains = [[gain(row, table.unit) if bound else 0.0] for row, bound in pairs]
            choice = choose(gains, self._choices, table, least_gain)
            if best is None or choice.speed > best.speed:
                best, number = choice, place * choice.width
        assert best is not None
        self._choice, larger = best, tables[number : number + 1]
        return tables[max(0, number - 1)], Sizes(number, larger[0] if larger else None)

    def _exact_plans(
        self, histories: Sequence[History], bounds: Sequence[int], table: CostTable
    ) -> list[DraftPlan]:
        """Plans for steps that are not padded, each with its own length.

        A single request's chain ends by the drafter's confidence. With several requests chains end
        as planned: a draft pass for the few that go on costs nearly as much as one for all."""
        choice = self._choice
        if len(bounds) > 1 or not self.acceptance.has_confidences or not choice.width:
            return list(map(self._simple.__getitem__, choice.counts))
        rates = histories[0].traffic.scaled(histories[0].rounded_factor)
        return [DraftPlan(bounds[0], ChainStops(rates, *self._thresholds(table)))]

    def _trimmed_plans(
        self, histories: Sequence[History], bounds: Sequence[int]
    ) -> list[DraftPlan]:
        """Plans for captured steps: all requests draft the step's full width, and the device
        verifies as many tokens as were chosen, those that are most likely to survive."""
        width, size = self._choice.width, len(bounds)
        rates = tuple([round(it, 2) for it in self.acceptance.share_rates(histories)])
        rows = sum(self._choice.counts)

        @cache
        def plan(count: int, num_rows: int, factor: int) -> DraftPlan:
            return DraftPlan(count, trim=Trim(num_rows, factor, rates))

        factors = [round(self.acceptance.factor_of(it) * FACTOR_PARTS) for it in histories]
        return [
            plan(min(width, bound), (rows + place) // size, factor)
            for place, (factor, bound) in enumerate(zip(factors, bounds, strict=True))
        ]

    def _thresholds(self, table: CostTable) -> tuple[float, float]:
        """The least survival with which one more token of a single chain is worth its draft pass
        and its row, and with which it is worth its row alone: their costs, measured in tokens."""
        speed = self._choice.speed
        row, further = table.margins(self._choice.width, self._choice.width)
        return _bounded(speed * (row + further)), _bounded(speed * row)

    def _table(self, requests: int, context: int, unit: int) -> CostTable:
        """The costs for a number of requests and, rounded, the sum of their lengths."""
        if self._age >= _TABLE_AGE:
            self._age = 0
            self._tables.clear()
        key = requests, round(4 * log2(context)), unit
        found = self._tables.get(key)
        if found is None or (not self._form.ends_chains and found.error > _OUTDATED):
            found = CostTable(self._costs, self._form, requests, context, unit)
            self._tables[key] = found
        return found


def _bounded(least: float) -> float:
    return min(_MOST_TO_STOP, max(_LEAST_TO_STOP, least))
