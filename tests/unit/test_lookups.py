"""Combined drafters that the policy chooses between, over simulated traffic."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from slipstream.core.batch import Split
from slipstream.core.request import Request
from slipstream.core.step_form import CapturedForm, ExactForm, StepForm
from slipstream.engine.draft_policy import Candidate
from slipstream.engine.drafting.policy import AdaptivePolicy
from tests.draft_traffic import Costs, limits, report, request, seconds_of

K = 7
WIDTHS = (0, 1, 2, 4, 7)
EXACT, PADDED = ExactForm(), CapturedForm(64, WIDTHS, packs=False)
CPU = Costs(fixed=1.0, row=0.1, draft_pass=0.15)


@dataclass(eq=False)
class Server:
    """Runs steps in which a look-up finds a match for seven of ten requests.

    Attributes:
        looked_up, drafted: the chance that a token is accepted, at each step.
        by: number of drafts by look-ups, and by the network, since it was last cleared.
    """

    costs: Costs
    form: StepForm
    looked_up: Callable[[int], float]
    drafted: Callable[[int], float]
    size: int = 1
    fixed: Split | None = None
    passes: int = 0
    number: int = 0
    seconds: float = 0.0
    tokens: int = 0
    by: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        bounds = replace(limits(K), lookup_passes=self.passes)
        self.policy = AdaptivePolicy(bounds, WIDTHS, self.costs, self.form)
        self.requests = [request(f"{index}", K) for index in range(self.size)]
        self.noise = random.Random(6)

    def run(self, steps: int) -> "Server":
        self.by.clear()
        self.seconds, self.tokens = 0.0, 0
        for _ in range(steps):
            self.step()
        return self

    def step(self) -> None:
        plans = self.policy.plan([Candidate(it, K) for it in self.requests])
        results, found, passes = [], [], []
        for plan in plans:
            most = self.fixed or plan.split or Split(plan.num_tokens, plan.num_tokens)
            assert plan.num_tokens <= K
            assert plan.split is None or max(plan.split) == plan.num_tokens
            matches = self.noise.random() < 0.7 and most.looked_up > 0
            count = most.looked_up if matches else most.drafted
            rate, accepted = (self.looked_up if matches else self.drafted)(self.number), 0
            while accepted < count and self.noise.random() < rate:
                accepted += 1
            results.append((count, accepted))
            found.append(matches and count > 0)
            passes.append(0 if matches else count)
            self.by["look-up" if found[-1] else "network" if count else "nothing"] += 1
        rows = [count for count, _ in results]
        width = max(plan.num_tokens for plan in plans)
        if self.form.ends_chains:
            seconds = self.costs.target_seconds(self.size, self.size + sum(rows), 0)
            for place in range(max(passes)):
                drafting = sum(count > place for count in passes)
                seconds += self.costs.draft_seconds(drafting, 1, 0)
        else:
            seconds = seconds_of(rows, self.costs, self.form, WIDTHS, width)
        self.seconds += seconds
        self.tokens += sum(accepted + 1 for _, accepted in results)
        told = report(self.requests, results, seconds=seconds, padded=not self.form.ends_chains)
        pairs = zip(told.committed, found, strict=True)
        committed = [replace(gain, looked_up=hit) for gain, hit in pairs]
        self.policy.observe(replace(told, committed=committed))
        self.number += 1

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def always(chance: float) -> Callable[[int], float]:
    return lambda step: chance


@pytest.mark.parametrize("size", [1, 6])
@pytest.mark.parametrize(
    ("looked_up", "drafted", "likelier"),
    [(0.9, 0.6, "look-up"), (0.3, 0.85, "network")],
)
def test_the_draft_that_is_worth_more_is_used(
    looked_up: float, drafted: float, likelier: str, size: int
) -> None:
    chances = always(looked_up), always(drafted)
    server = Server(CPU, EXACT, *chances, size).run(300)
    server.run(600)
    other = {"look-up": "network", "network": "look-up"}[likelier]
    wanted = 0.6 if likelier == "look-up" else 0.9  # three of ten have no match
    assert server.by[likelier] > wanted * server.by.total()
    assert server.by[other] < 0.2 * server.by.total()
    for count in (1, 2, 4, 7):
        first = Server(CPU, EXACT, *chances, size, Split(count, count)).run(600)
        alone = Server(CPU, EXACT, *chances, size, Split(0, count)).run(600)
        assert server.speed > 0.9 * max(first.speed, alone.speed), count


def test_padded_steps_have_the_passes_anyway_and_use_what_is_accepted_more() -> None:
    costs = Costs(fixed=1.0, row=0.001, draft_pass=0.03)
    for looked_up, drafted, most in ((0.6, 0.85, "network"), (0.85, 0.6, "look-up")):
        server = Server(costs, PADDED, always(looked_up), always(drafted), 8).run(200)
        server.run(300)
        assert server.by[most] > 0.6 * server.by.total()


def test_look_ups_are_used_alone_if_the_network_is_not_worth_its_passes() -> None:
    costs = Costs(fixed=1.0, row=0.05, draft_pass=0.9)
    server = Server(costs, EXACT, always(0.8), always(0.3)).run(200)
    server.run(400)
    assert server.by["look-up"] > 0.6 * server.by.total()
    assert server.by["network"] < 0.05 * server.by.total()


def test_look_ups_that_were_turned_down_are_tried_again() -> None:
    server = Server(CPU, EXACT, lambda step: 0.1 if step < 400 else 0.98, always(0.7)).run(300)
    server.run(100)
    assert 0 < server.by["look-up"] < 6
    server.run(200)
    server.run(200)
    assert server.by["look-up"] > 100


def test_what_is_known_of_finished_requests_is_dropped() -> None:
    server = Server(CPU, EXACT, always(0.8), always(0.8), 4)
    for turn in range(60):
        server.run(3)
        for it in server.requests:
            it.status = it.status.FINISHED
        server.requests = [request(f"{turn} {index}", K) for index in range(4)]
    assert server.policy._lookups is not None

    def known() -> set[Request]:
        assert server.policy._lookups is not None
        return {*server.policy._lookups._looked_up.own, *server.policy._lookups._drafted.own}

    assert len(known()) < 40
