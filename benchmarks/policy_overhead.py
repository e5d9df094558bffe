"""Host time of the draft policy in a step: `plan` and `observe`, on recorded steps without a model.

    python -m benchmarks.policy_overhead [--requests 1,8,32,128] [--steps 400]

A policy is recorded with simulated verdicts and times: half of the requests have most draft tokens
accepted, the others few, and every 16th step one request ends and another comes. A second policy is
then given the very same steps and decides the same; only it is timed. "cpu" are exact steps of
drafts with confidences, "gpu" captured ones. Printed are microseconds a step, mean and 95th
percentile over all steps. The exit code is 1 where a mean passes the bar of 20.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from time import thread_time

from benchmarks.policy_engines import sizes
from slipstream.core.batch import (
    Batch,
    Committed,
    DraftPlan,
    ScheduledRequest,
    StepReport,
    StepTimes,
)
from slipstream.core.request import Request, RequestStatus
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.step_form import CapturedForm, ExactForm, StepLimits
from slipstream.engine.draft_policy import Candidate, DraftPolicy
from slipstream.engine.drafting.costs import CostModel
from slipstream.engine.drafting.policy import AdaptivePolicy
from slipstream.engine.drafting.step_costs import MeasuredStep

MOST_US = 20.0  # the bar
MOST = 7  # draft tokens of a step
WIDTHS = (0, 1, 2, 4, MOST)
CHANCES = (0.85, 0.2)
CONTEXT = 500  # tokens of each request
PASS, ROW, DRAFT_PASS, DRAFT_ROW = 4e-3, 1e-5, 4e-4, 2e-6  # seconds


@dataclass(frozen=True)
class Step:
    """The candidates of a step, and its report."""

    candidates: Sequence[Candidate]
    report: StepReport


def _seconds(requests: int, width: int, rows: int) -> tuple[float, float]:
    """The seconds of drafting, and of the target's pass with verification."""
    return width * (DRAFT_PASS + DRAFT_ROW * requests), PASS + ROW * rows


def new_policy(requests: int, captured: bool) -> DraftPolicy:
    """One that knows what steps cost."""
    limits = StepLimits(requests, 8192, 10**6, 10**6, MOST, False, "")
    form = CapturedForm(requests, WIDTHS, packs=True) if captured else ExactForm()
    costs = CostModel(form.bucket if isinstance(form, CapturedForm) else None)
    points = []
    for size in sorted({1, requests}):
        for width in WIDTHS:
            rows = size * (width + 1)
            draft, target = _seconds(size, width, rows)
            points.append(MeasuredStep(size, width, rows, size * CONTEXT, draft, target))
    costs.calibrate(points)
    return AdaptivePolicy(limits, WIDTHS, costs, form)


class Recording:
    """Steps of a policy with simulated requests.

    Attributes:
        steps: so far; with each the request that ended after it, if one did, and its plans.
    """

    def __init__(self, requests: int, captured: bool, num_steps: int) -> None:
        self._captured, self._noise = captured, random.Random(0)
        self._form = CapturedForm(requests, WIDTHS, packs=True) if captured else ExactForm()
        self._numbers = count()
        self._live = [self._request() for _ in range(requests)]
        self.steps: list[tuple[Step, Request | None, list[DraftPlan]]] = []
        policy = new_policy(requests, captured)
        for number in range(num_steps):
            candidates = [Candidate(it, MOST) for it in self._live]
            plans = list(policy.plan(candidates))
            step = Step(candidates, self._report(plans))
            policy.observe(step.report)
            ended = None
            if number % 16 == 15:
                ended = self._live.pop(0)
                ended.status = RequestStatus.FINISHED
                self._live.append(self._request())
            self.steps.append((step, ended, plans))

    def _request(self) -> Request:
        number = next(self._numbers)
        tokens = [1] * CONTEXT
        return Request(
            str(number), tokens, SamplingParams(), 0, frozenset(), 10**6, MOST, number,
            status=RequestStatus.RUNNING,
        )  # fmt: skip

    def _report(self, plans: Sequence[DraftPlan]) -> StepReport:
        items, gains = [], []
        for request, plan in zip(self._live, plans, strict=True):
            chance = CHANCES[request.arrival % len(CHANCES)]
            confidences: list[float] = []
            survival = 1.0
            while len(confidences) < plan.num_tokens:
                confidence = min(1.0, max(0.0, self._noise.gauss(chance, 0.1)))
                if plan.stops is not None:
                    rates = plan.stops.rates
                    survival *= rates[min(len(rates) - 1, int(confidence * len(rates)))]
                    if survival < plan.stops.least_to_verify:
                        break
                confidences.append(confidence)
            accepted = 0
            while accepted < len(confidences) and self._noise.random() < confidences[accepted]:
                accepted += 1
            start = CONTEXT - 1
            items.append(ScheduledRequest(request, start, 1, plan.num_tokens, (), False, True))
            told = () if self._captured else tuple(confidences)
            gains.append(
                Committed((1,) * (accepted + 1), len(confidences), accepted, 0, confidences=told)
            )
        size, width = len(items), max(plan.num_tokens for plan in plans)
        rows = self._form.rows(size, width, sum(gain.num_draft_tokens for gain in gains))
        draft, target = (part * self._noise.gauss(1, 0.03) for part in _seconds(size, width, rows))
        times = StepTimes(draft, target, 0.0, 0.0)
        return StepReport(Batch(tuple(items)), gains, [True] * size, times, self._captured, rows)


def microseconds(recording: Recording, policy: DraftPolicy) -> list[float]:
    """The microseconds that a policy takes for each recorded step."""
    for step, _, _ in recording.steps:
        for candidate in step.candidates:
            candidate.request.status = RequestStatus.RUNNING
    found = []
    for step, ended, plans in recording.steps:
        began = thread_time()
        planned = policy.plan(step.candidates)
        middle = thread_time()
        assert list(planned) == plans, "the policy decides something else than it did"
        resumed = thread_time()
        policy.observe(step.report)
        found.append(1e6 * (thread_time() - resumed + middle - began))
        if ended is not None:
            ended.status = RequestStatus.FINISHED
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--requests", type=sizes, default=(1, 8, 32, 128))
    cli.add_argument("--steps", type=int, default=400)
    given = cli.parse_args(arguments)
    print("steps  requests  mean us  95th percentile")
    missed = False
    for captured in (False, True):
        for requests in given.requests:
            recording = Recording(requests, captured, given.steps)
            times = sorted(microseconds(recording, new_policy(requests, captured)))
            mean, late = statistics.fmean(times), times[int(0.95 * len(times))]
            missed |= mean > MOST_US
            verdict = "MISSED" if mean > MOST_US else "met"
            name = "gpu" if captured else "cpu"
            print(f"{name:>5} {requests:9d} {mean:8.1f} {late:16.1f}  {verdict}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
