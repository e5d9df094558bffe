"""How much is drafted may follow from everything that earlier steps have told: the output keeps the
target's distribution within a step and across steps. (What a choice within a step may look at, and
that a place which is dropped for its token shows, is in test_chain_stops.py.)"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from slipstream.core.batch import DraftPlan, StepReport
from slipstream.engine.draft_policy import Candidate
from slipstream.engine.drafting.policy import AdaptivePolicy
from tests.draft_traffic import Costs, learn_costs_while_running
from tests.lossless.counted_pair import Heads
from tests.lossless.test_sampled import draw, exact_distribution, p_value
from tests.padded_steps import use_steps
from tests.stopping_policy import StoppingPolicy


@dataclass(frozen=True)
class NosyPolicy(StoppingPolicy):
    """The number of draft tokens follows from all that is known of a request: its tokens, what was
    drafted, refused and accepted, and with what confidences."""

    told: dict[str, int] = field(default_factory=dict)

    def plan(self, candidates: Sequence[Candidate]) -> Sequence[DraftPlan]:
        plans = super().plan(candidates)
        counts = [
            1 + hash((self.told.get(it.request.request_id, 0), *it.request.token_ids)) % 2
            for it in candidates
        ]
        return [
            DraftPlan(min(plan.num_tokens, count), plan.stops if count == 2 else None)
            for plan, count in zip(plans, counts, strict=True)
        ]

    def observe(self, report: StepReport) -> None:
        super().observe(report)
        for item, gain in zip(report.batch.requests, report.committed, strict=True):
            confidences = tuple(int(it * 1000) for it in gain.confidences)
            name = item.request.request_id
            facts = (gain.num_draft_tokens, gain.num_accepted, *gain.token_ids, *confidences)
            self.told[name] = hash((self.told.get(name, 0), *facts))


@pytest.mark.parametrize("drafter", ["draft", "ngram+draft"])
def test_a_nosy_policy_biases_nothing(
    drafter: str, pair: tuple[str, str], heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[NosyPolicy] = []

    def policy(count: int) -> NosyPolicy:
        made.append(NosyPolicy(count))
        return made[-1]

    monkeypatch.setattr("slipstream.engine.assembly.FixedPolicy", policy)
    check({"drafter": drafter, "num_speculative_tokens": 3}, pair, heads)
    planned = {asked for asked, _ in made[-1].asked}
    assert planned == {1, 2}


@pytest.mark.parametrize("steps", ["exact", "padded"])
def test_the_policy_biases_nothing(
    steps: str, pair: tuple[str, str], heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn_costs_while_running(monkeypatch)
    plan, made = AdaptivePolicy.plan, AdaptivePolicy.__init__
    costs = Costs(draft_pass=0.2)
    monkeypatch.setattr(
        AdaptivePolicy,
        "__init__",
        lambda self, limits, widths, _, form, late: made(self, limits, widths, costs, form),
    )
    use_steps(steps, monkeypatch)
    chosen: set[int] = set()

    def noted(policy: AdaptivePolicy, candidates: Sequence[Candidate]) -> Sequence[DraftPlan]:
        plans = plan(policy, candidates)
        chosen.update(it.num_tokens for it in plans)
        return plans

    monkeypatch.setattr(AdaptivePolicy, "plan", noted)
    check({"drafter": "draft", "num_speculative_tokens": "auto"}, pair, heads)
    assert chosen >= {1, 2}


def check(case: dict[str, Any], pair: tuple[str, str], heads: Heads) -> None:
    exact = exact_distribution(pair[0], {"temperature": 1.0})
    drawn = draw(pair, case, {"temperature": 1.0}, heads)
    for places in ((0, 1), (1, 2), (2, 3)):
        assert p_value(drawn, exact, places) > 0.001, places
