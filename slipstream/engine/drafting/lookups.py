"""Chooses between drafters that are combined: look-ups, and a network that drafts for the rest.

A look-up takes no pass of the network, but its draft is verified instead of the network's. For each
request both drafts are assessed by their own results, as expected accepted tokens minus the tokens
that their passes and rows take the time of.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, takewhile
from operator import mul

from slipstream.core.batch import DraftPlan, Split, StepReport
from slipstream.core.request import Request
from slipstream.engine.draft_policy import Candidate
from slipstream.engine.drafting.acceptance import TRAFFIC_MEMORY
from slipstream.engine.drafting.choice import LEAST_SURVIVAL, Choice, CostTable
from slipstream.engine.drafting.traffic import UNKNOWN

# Weight of the latest result in a request's averages, and of one that shows a change.
_MEMORY, _CHANGED = 0.1, 0.5
_TRIED_EVERY = 64  # plans after which look-ups that were turned down are tried again, once


@dataclass(frozen=True)
class Prices:
    """The time of parts of a step, in tokens that the step would yield in it.

    Attributes:
        row: of one more row of the target's pass.
        draft_pass: of a pass of the network, for one of the requests.
    """

    row: float = 0.0
    draft_pass: float = 0.0

    @classmethod
    def of(cls, choice: Choice, table: CostTable) -> "Prices":
        """Prices near a choice. In padded steps the network's passes are run in any case, and all
        rows are computed, so that they cost nothing."""
        if not table.exact:
            return cls()
        row, draft_pass = table.margins(sum(choice.counts), choice.width)
        draft_pass /= len(choice.counts)
        return cls(max(0.0, choice.speed * row), max(0.0, choice.speed * draft_pass))


@dataclass(eq=False)
class Results:
    """The chances that tokens of one kind of draft are accepted, by request and position."""

    places: int
    traffic: list[float] = field(init=False)
    own: dict[Request, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.traffic = [UNKNOWN] * self.places

    def worth(self, request: Request, most: int, price: float) -> list[float]:
        """The survival of at most `most` tokens, up to the first that is not worth its price."""
        survivals = accumulate(self.own.get(request, self.traffic)[:most], mul)
        least = max(LEAST_SURVIVAL, price)
        return [*takewhile(lambda survival: survival >= least, survivals)]

    def drop_finished(self, num_live: int) -> None:
        """See `Acceptance.drop_finished`."""
        if len(self.own) > 2 * num_live + 8:
            self.own = {it: chances for it, chances in self.own.items() if not it.finished}

    def learn(
        self, request: Request, num_drafts: int, num_accepted: int, memory: float = _MEMORY
    ) -> None:
        chances = self.own.get(request)
        if chances is None:
            chances = self.own[request] = list(self.traffic)
        for place in range(min(num_accepted + 1, num_drafts, self.places)):
            verdict = float(place < num_accepted)
            chances[place] += memory * (verdict - chances[place])
            self.traffic[place] += TRAFFIC_MEMORY * (verdict - self.traffic[place])


class Lookups:
    """Decides for each request whether a look-up drafts for it, and how much.

    Args:
        places: number of positions of draft tokens.
        passes: passes of the network in an exact step for a request whose draft was looked up.
    """

    def __init__(self, places: int, passes: int) -> None:
        self._passes = passes
        self._looked_up, self._drafted = Results(places), Results(places)
        self._refused: set[Request] = set()
        self._until_tried = _TRIED_EVERY

    def tried(
        self, candidates: Sequence[Candidate], plans: Sequence[DraftPlan]
    ) -> Sequence[DraftPlan]:
        """The plans of this step, which now and then tries look-ups that were turned down."""
        self._until_tried -= 1
        if self._until_tried > 0 or not self._refused:
            return plans
        self._until_tried = _TRIED_EVERY
        pairs = zip(candidates, plans, strict=True)
        return [
            _trying(plan, it.most) if it.request in self._refused else plan for it, plan in pairs
        ]

    def split(
        self,
        requests: Sequence[Request],
        plans: Sequence[DraftPlan],
        bounds: Sequence[int],
        choice: Choice,
        table: CostTable,
    ) -> list[DraftPlan]:
        """The plans, with the numbers for look-ups and for the network."""
        prices = Prices.of(choice, table)
        facts = zip(requests, plans, bounds, choice.counts, strict=True)
        found, self._refused = [], set()
        for results in (self._looked_up, self._drafted):
            results.drop_finished(len(requests))
        for request, plan, bound, count in facts:
            if not table.exact:  # there are passes and rows for the step's width alone
                bound = plan.num_tokens
            split = self._split(request, plan, bound, count, prices)
            if bound and not split.looked_up:
                self._refused.add(request)
            found.append(replace(plan, num_tokens=max(split), split=split))
        return found

    def _split(
        self, request: Request, plan: DraftPlan, bound: int, count: int, prices: Prices
    ) -> Split:
        found = self._looked_up.worth(request, bound, prices.row)
        gain = sum(found) - len(found) * prices.row - self._passes * prices.draft_pass
        # What is expected of a chain that ends by its confidences is shorter than its plan.
        fixed, price = plan.stops is None, prices.row + prices.draft_pass
        drafted = self._drafted.worth(request, plan.num_tokens if fixed else count, price)
        is_better = gain > 0 and gain >= sum(drafted) - len(drafted) * price
        number = len(drafted) if fixed and price else plan.num_tokens
        return Split(len(found) if is_better else 0, number)

    def observe(self, report: StepReport) -> None:
        """Learn from the results of a step."""
        for item, gain, live in zip(
            report.batch.requests, report.committed, report.live, strict=True
        ):
            request, accepted = item.request, gain.num_accepted
            if not live:
                self._looked_up.own.pop(request, None)
                self._drafted.own.pop(request, None)
            elif not gain.num_draft_tokens:
                continue
            elif not gain.looked_up:
                self._drafted.learn(request, gain.num_draft_tokens, accepted)
            else:
                drafted = gain.num_draft_tokens
                has_changed = accepted == drafted and request in self._refused
                memory = _CHANGED if has_changed else _MEMORY
                self._looked_up.learn(request, drafted, accepted, memory)


def _trying(plan: DraftPlan, most: int) -> DraftPlan:
    count = min(most, max(1, plan.num_tokens))
    return DraftPlan(count, plan.stops, plan.trim, Split(count, min(count, plan.drafted)))
