"""What speculation costs and gains, by step and request."""

from dataclasses import fields, replace

import pytest

from slipstream.core.batch import Batch, Committed, ScheduledRequest, StepReport, StepTimes
from slipstream.core.outputs import RequestMetrics
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.metrics import EngineMetrics, StepEstimate
from tests.draft_traffic import Costs

DRAFTS, ACCEPTED = (4, 2, 0), (1, 2, 0)


def step() -> StepReport:
    """A step of eight seconds with three requests, two of which draft."""
    items = tuple(
        ScheduledRequest(
            Request(str(index), [1] * 9, SamplingParams(), 0, frozenset(), 9, 9, index),
            *(8, 1, count, (), False, True),
        )
        for index, count in enumerate(DRAFTS)
    )
    committed = [
        Committed((7,) * (accepted + 1), count, accepted, 0)
        for count, accepted in zip(DRAFTS, ACCEPTED, strict=True)
    ]
    times = StepTimes(draft=3.0, target=3.0, verify=1.0, rest=1.0)
    return StepReport(Batch(items), committed, [True] * 3, times, False, 9)


def count(report: StepReport, costs: Costs | None) -> tuple[EngineMetrics, list[RequestMetrics]]:
    estimate = StepEstimate.of(report, costs)
    whole, parts = EngineMetrics(), [RequestMetrics() for _ in DRAFTS]
    whole.count_step(report)
    for gained, metrics in zip(report.committed, parts, strict=True):
        estimate.count(metrics, gained)
        whole.count_tokens(gained, len(gained.token_ids), estimate)
    return whole, parts


def test_speed_ups_are_estimated_and_refused_drafts_are_paid_for() -> None:
    whole, parts = count(step(), Costs(fixed=2.0, row=1.0))  # a plain step takes 5 seconds
    assert [it.estimated_speedup for it in parts] == [10 / 8, 15 / 8, 5 / 8]
    assert [it.refused_drafting_seconds for it in parts] == [1.5, 0, 0]
    assert [it.num_steps_by_draft_tokens for it in parts] == [[0, 0, 0, 0, 1], [0, 0, 1], [1]]
    spec = whole.speculation
    assert spec.estimated_speedup == pytest.approx(10 / 8)  # two tokens each
    assert spec.decode_seconds == pytest.approx(8)
    assert spec.refused_drafting_seconds == 1.5
    assert spec.num_steps_by_draft_tokens == [1, 0, 1, 0, 1]
    assert spec.num_drafts == 2


def test_without_costs_nothing_is_estimated() -> None:
    whole, parts = count(step(), None)
    assert {it.estimated_speedup for it in (whole.speculation, *parts)} == {None}
    assert whole.speculation.refused_drafting_seconds == 1.5


def test_steps_with_prompts_do_not_count_as_decoding() -> None:
    report = step()
    first, *others = report.batch.requests
    chunk = replace(first, num_new_tokens=5, num_draft_tokens=0, reaches_end=False)
    committed = [Committed((), 0, 0, 0), *report.committed[1:]]
    mixed = replace(report, batch=Batch((chunk, *others)), committed=committed)
    whole, parts = count(mixed, Costs())
    assert parts[0] == RequestMetrics()
    assert whole.speculation.estimated_speedup is None
    assert whole.speculation.num_steps_by_draft_tokens == [1, 0, 1]


def test_a_snapshot_holds_every_number_and_stays_as_it_was() -> None:
    metrics = EngineMetrics()
    for number, field in enumerate(fields(metrics), 1):
        if isinstance(getattr(metrics, field.name), int | float):
            setattr(metrics, field.name, number)
    metrics.speculation.num_steps = 3
    metrics.adapters["one"] = RequestMetrics(num_steps=4)
    kept, before = metrics.snapshot(), replace(metrics)
    assert kept == before
    metrics.adapters["one"].num_steps = metrics.speculation.num_steps = metrics.num_steps = 50
    assert (kept.adapters["one"].num_steps, kept.speculation.num_steps, kept.num_steps) == (4, 3, 1)


@pytest.mark.parametrize("accepted_at", [None, 17, 299])
def test_a_drafter_that_never_has_a_token_accepted_is_told_once(
    accepted_at: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    metrics, estimate = EngineMetrics(), StepEstimate(1, 0.0)
    caplog.set_level("WARNING", "slipstream")
    for number in range(700):
        for drafted in (3, 0):  # steps without a draft count for nothing
            accepted = int(bool(drafted) and number == accepted_at)
            gained = Committed((7,) * (accepted + 1), drafted, accepted, 0)
            metrics.count_tokens(gained, accepted + 1, estimate)
    told = [it.getMessage() for it in caplog.records]
    assert len(told) == (accepted_at is None)
    assert all("none of the first 300 drafts had a token" in it for it in told)
