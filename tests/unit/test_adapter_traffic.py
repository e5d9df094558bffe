"""What the policy of drafts knows of adapters: each has the averages of its own requests."""

import copy
import weakref
from collections.abc import Sequence

import pytest

from slipstream.core.adapters import NamedAdapter
from slipstream.core.request import Request
from slipstream.core.step_form import CapturedForm, ExactForm, StepForm
from slipstream.engine.draft_policy import Candidate
from slipstream.engine.drafting.policy import AdaptivePolicy
from tests.draft_traffic import Costs, Server, limits, report, request

K = 7
WIDTHS = (0, 1, 2, 4, 7)
EXACT, PADDED = ExactForm(), CapturedForm(64, WIDTHS, packs=False)
PACKED = CapturedForm(64, WIDTHS, packs=True)
COSTS = Costs(fixed=1.0, row=0.06, draft_pass=0.06, draft_row=0.01)
GOOD, BAD, NEW = [NamedAdapter(name, serial, None) for serial, name in enumerate("abc", 1)]


def adaptive(form: StepForm) -> AdaptivePolicy:
    return AdaptivePolicy(limits(K), WIDTHS, COSTS, form)


def candidates(requests: Sequence[Request]) -> list[Candidate]:
    return [Candidate(it, K) for it in requests]


def adapted(adapter: NamedAdapter | None) -> Request:
    made = request("new", K)
    made.adapter = adapter
    return made


def serve_adapters(policy: AdaptivePolicy, form: StepForm, tells: bool, steps: int) -> Server:
    """Requests with a good and a bad adapter and without one, of twelve steps each."""
    server = Server(policy, COSTS, form, K, tells)
    kinds = [(GOOD, lambda _: 0.9), (BAD, lambda _: 0.02), (None, lambda _: 0.6)]
    for turn in range(steps // 12):
        order = kinds if turn % 2 else kinds[::-1]
        server.requests = [adapted(adapter) for adapter, _ in order]
        server.chances = [chance for _, chance in order]
        server.run(12)
    return server


@pytest.mark.parametrize("form", [EXACT, PADDED])
def test_a_request_starts_from_the_history_of_its_adapter(form: StepForm) -> None:
    policy = adaptive(form)
    serve_adapters(policy, form, False, 240)
    good, bad, plain, new = (
        policy.acceptance.of(adapted(it)).chances[0] for it in (GOOD, BAD, None, NEW)
    )
    assert bad < 0.2 < 0.4 < plain < 0.75 < good
    assert bad + 0.1 < new < good - 0.1, "of an unknown one the average of all is expected"
    drafted = {}
    for adapter in (GOOD, BAD):  # each alone, so that nothing but its start decides
        policy._left = 0
        policy.plan(candidates([adapted(adapter)]))
        drafted[adapter] = policy._choice.width  # the plan may be a probe
    assert drafted[BAD] == 0
    assert drafted[GOOD] >= 4


def test_the_traffic_of_one_adapter_does_not_move_the_start_of_another() -> None:
    policy = adaptive(EXACT)
    serve_adapters(policy, EXACT, True, 240)

    def starts() -> list[object]:
        made = [policy.acceptance.of(adapted(it)) for it in (GOOD, None)]
        return [(it.chances, it.traffic.rates) for it in made]

    before = copy.deepcopy(starts())
    server = Server(policy, COSTS, EXACT, K, tells=True)
    server.requests, server.chances = [adapted(BAD) for _ in range(4)], [lambda _: 0.3] * 4
    server.run(50)
    assert starts() == before


def test_trimmed_plans_take_rows_from_requests_of_a_bad_adapter() -> None:
    """Their drafter is just as sure of its tokens."""
    policy = adaptive(PACKED)
    for _ in range(40):
        asked = [adapted(adapter) for adapter in (GOOD, BAD, None) * 4]
        for _ in range(2):
            plans = policy.plan(candidates(asked))
            results, told = [], []
            for it, plan in zip(asked, plans, strict=True):
                count = plan.num_tokens
                results.append((count, 0 if it.adapter is BAD else count))
                told.append((0.8,) * count)
            policy.observe(report(asked, results, told, [it.trim for it in plans], padded=True))
    policy._left = 0
    asked = [adapted(adapter) for adapter in (BAD, GOOD, None) * 8]
    policy.plan(candidates(asked))
    factors = [plan.trim.factor if plan.trim else -1 for plan in policy._plans]
    assert max(factors[::3]) <= 1
    assert min(factors[1::3]) >= 7
    late = [adapted(adapter) for adapter in (BAD, GOOD)]  # a few that come before the next choice
    bad, good = (plan.trim for plan in policy.plan(candidates(late)))
    assert bad
    assert good
    assert bad.factor <= 1 < 7 <= good.factor


def test_adapters_that_are_gone_are_forgotten() -> None:
    policy, adapter = adaptive(EXACT), NamedAdapter("d", 4, None)
    gone, made = weakref.ref(adapter), adapted(adapter)
    policy.plan(candidates([made]))
    made.status = made.status.FINISHED
    del made, adapter
    for _ in range(6):
        others = [adapted(None) for _ in range(9)]
        policy.plan(candidates(others))
        for it in others:
            it.status = it.status.FINISHED
    assert gone() is None
