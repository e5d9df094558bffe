"""What the draft policy does in C++, compared with the same in Python, bit by bit."""

import random
from dataclasses import replace

import numpy as np
import pytest

from slipstream.core.batch import ChainStops, StepReport, Trim
from slipstream.core.step_form import CapturedForm, ExactForm
from slipstream.engine.drafting import native
from slipstream.engine.drafting.acceptance import Acceptance
from slipstream.engine.drafting.choice import Choice, CostTable, choose
from tests.draft_traffic import Costs, report, request

K = 5
WIDTHS = (0, 1, 2, 4, K)
pytestmark = pytest.mark.skipif(native.learn_drafts is None, reason="no C++ was built")


def random_steps(size: int, has_confidences: bool) -> list[StepReport]:
    """Steps of all kinds: of requests that end or are not known, with and without drafts, stops and
    trims."""
    noise, steps = random.Random(size), []
    requests = [request(f"{it}", K) for it in range(size)]
    for _ in range(150):
        drafted = [noise.randrange(K + 1) for _ in requests]
        results = [(count, min(count, noise.randrange(K + 3))) for count in drafted]
        told = [
            tuple(noise.choice((0.0, 1.0, noise.random())) for _ in range(it)) for it in drafted
        ]
        step = report(requests, results, told if has_confidences and noise.random() < 0.9 else ())
        items = [
            replace(
                item,
                num_draft_tokens=min(K, item.num_draft_tokens + noise.randrange(2)),
                stops=noise.choice((None, ChainStops((), 0.0, 0.0))),
                trim=noise.choice((None, Trim(1, 8, ()))),
            )
            for item in step.batch.requests
        ]
        live = [noise.random() < 0.97 for _ in items]
        steps.append(replace(step, batch=replace(step.batch, requests=tuple(items)), live=live))
        ended = noise.randrange(size)
        if noise.random() < 0.1:
            requests[ended] = request("new", K)
    return steps


def learned(steps: list[StepReport]) -> list[object]:
    """Everything that is known after these steps, with probes among them."""
    acceptance, noise, found = Acceptance(K), random.Random(3), list[object]()
    for step in steps:
        for item in step.batch.requests:
            if noise.random() < 0.9:
                acceptance.of(item.request).probed = noise.choice((0, 0, 0, 0, 1, 2))
        found.append(acceptance.observe(step))
        traffic = acceptance._traffics.plain
        found += [list(traffic.chances), list(traffic.num_results), list(traffic.rates)]
        found += [list(traffic.results_by_bin), acceptance.reliability.bins, acceptance.latest]
        found += [(*it.chances, it.num_results, it.factor, it.has_drafted, it.probed)
                  for it in acceptance._histories.values()]  # fmt: skip
    return [*found, [(told, factor) for told, factor, _ in acceptance._recent]]


@pytest.mark.parametrize("has_confidences", [False, True])
@pytest.mark.parametrize("size", [1, 3, 40])
def test_the_same_is_learned_from_results(
    size: int, has_confidences: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = random_steps(size, has_confidences)
    found = learned(steps)
    monkeypatch.setattr(native, "learn_drafts", None)
    assert found == learned(steps)


@pytest.mark.parametrize("form", [ExactForm(), CapturedForm(64, WIDTHS, packs=True)])
def test_the_same_is_chosen(
    form: ExactForm | CapturedForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise, drafted = random.Random(4), 0
    costs = Costs(fixed=1.0, row=0.06, draft_pass=0.06, draft_row=0.01)
    for size in [*range(2, 12), 33, 64] * 8:
        most = noise.choice((0.01, 0.5, 1.0))
        chains = [[noise.choice((0.0, most, most * noise.random())) for _ in range(K)]
                  for _ in range(size)]  # fmt: skip
        gains, least_gain = [sorted(it, reverse=True) for it in chains], noise.choice((1.0, 1.04))

        def chosen(gains: list[list[float]] = gains, least: float = least_gain) -> Choice:
            return choose(gains, WIDTHS, CostTable(costs, form, len(gains), 1000), least)

        with monkeypatch.context() as patched:
            patched.setattr(native, "choose_drafts", None)
            expected = chosen()
        assert chosen() == expected
        drafted += expected.width > 0
    assert 10 < drafted < 90


@pytest.mark.parametrize("spread", [0.01, 1.0])
@pytest.mark.parametrize("size", [4, 50])
def test_the_same_gains_are_expected(
    spread: float, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise, acceptance = random.Random(6), Acceptance(K)
    histories = [acceptance.of(request(f"{it}", K)) for it in range(size)]
    for history in histories:
        history.chances[:] = [0.5 + spread * (noise.random() - 0.5) for _ in range(K)]
    bounds = [noise.randrange(K + 2) for _ in range(size)]
    found = acceptance.gains_of(histories, bounds, None)
    monkeypatch.setattr(native, "draft_gains", None)
    expected = acceptance.gains_of(histories, bounds, None)
    assert np.array(found) == pytest.approx(np.array(expected), rel=1e-12)
