"""Traffic for draft policies, simulated: requests whose drafts are accepted with known chances."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from slipstream.core.batch import (
    Batch,
    Committed,
    DraftPlan,
    ScheduledRequest,
    StepReport,
    StepTimes,
    Trim,
)
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.step_form import StepForm, StepLimits
from slipstream.engine.draft_policy import Candidate, DraftPolicy
from slipstream.kernels.reference.preparation import trim_drafts

# step -> the chance that a token is accepted, at every place.
Chance = Callable[[int], float]


@dataclass(frozen=True)
class Costs:
    """Seconds of steps by a formula.

    Attributes:
        fixed, row: of the target's pass.
        draft_pass, draft_row: of each pass of the drafter.
        tile: rows of the target are paid for in groups of so many.
        prompt_token: of each token of a prompt that the drafter computes late.
    """

    fixed: float = 1.0
    row: float = 0.0
    draft_pass: float = 0.1
    draft_row: float = 0.0
    tile: int = 1
    prompt_token: float = 0.0

    def target_seconds(self, requests: int, rows: int, context: int) -> float:
        return self.fixed + self.row * self.tile * -(-rows // self.tile)

    def draft_seconds(self, requests: int, width: int, context: int) -> float:
        return width * (self.draft_pass + self.draft_row * requests)

    def report_seconds(self, report: StepReport) -> tuple[float, float]:
        requests = len(report.batch.requests)
        return report.times.device + report.times.rest, self.target_seconds(requests, requests, 0)

    def prompt_seconds(self, tokens: int) -> float:
        return self.prompt_token * tokens

    def host_seconds(self, requests: int) -> float:
        return 0.0

    def observe(self, report: StepReport) -> None:
        """The policy learns nothing; its rates are given."""


def learn_costs_while_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines that choose how much they draft measure nothing at the start: it takes long."""
    monkeypatch.setattr("slipstream.engine.assembly.calibrate", lambda *_, **__: 0)


def limits(most: int, tree_depth: int | None = None) -> StepLimits:
    return StepLimits(64, 4096, 10**9, 10**9, most, False, "", tree_depth)


def request(name: str, bound: int) -> Request:
    tokens = [1] * 100
    return Request(name, tokens, SamplingParams(), 0, frozenset(), 10**6, bound, 0)


def report(
    requests: Sequence[Request],
    results: Sequence[tuple[int, int]],
    told: Sequence[tuple[float, ...]] = (),
    trims: Sequence[Trim | None] = (),
    seconds: float = 0.0,
    padded: bool = False,
    nodes: Sequence[tuple[int, ...]] = (),
) -> StepReport:
    """The report of a step: for each request how many tokens were verified, and accepted, what its
    drafter's confidences were, and which nodes of its tree were accepted."""
    items, committed = [], []
    size = len(requests)
    told, trims, nodes = told or [()] * size, trims or [None] * size, nodes or [()] * size
    facts = zip(requests, results, told, trims, nodes, strict=True)
    for it, (drafted, accepted), known, trim, hit in facts:
        count = max(drafted, len(known))
        items.append(ScheduledRequest(it, 0, 1, count, (), False, True, trim=trim))
        tokens = (1,) * (accepted + 1)
        committed.append(Committed(tokens, drafted, accepted, 0, confidences=known, nodes=hit))
    times = StepTimes(0.0, seconds, 0.0, 0.0)
    return StepReport(Batch(tuple(items)), committed, [True] * len(items), times, padded, 0)


@dataclass(eq=False)
class Server:
    """Runs steps of a policy over simulated requests.

    Attributes:
        seconds, tokens: so far.
        tells: drafts come with their chances as confidences.
        counts: what was verified, by step and request.
    """

    policy: DraftPolicy
    costs: Costs
    form: StepForm
    most: int
    tells: bool = False
    seconds: float = 0.0
    tokens: int = 0
    counts: list[list[int]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    chances: list[Chance] = field(default_factory=list)
    noise: random.Random = field(default_factory=lambda: random.Random(5))

    def add(self, chance: Chance, bound: int | None = None) -> None:
        name = f"request {self.noise.random()}"
        self.requests.append(request(name, self.most if bound is None else bound))
        self.chances.append(chance)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        number = len(self.counts)
        plans = self.policy.plan([Candidate(it, self.most) for it in self.requests])
        pairs = zip(plans, self.chances, strict=True)
        told = [(chance(number),) * plan.num_tokens for plan, chance in pairs]
        width = max(plan.num_tokens for plan in plans)
        drafted = self._verified(plans, width, told)
        self.counts.append(drafted)
        accepted = []
        for count, chance in zip(drafted, self.chances, strict=True):
            rate, taken = chance(number), 0
            while taken < count and self.noise.random() < rate:
                taken += 1
            accepted.append(taken)
        seconds = seconds_of(drafted, self.costs, self.form, self.policy.widths, width)
        self.seconds += seconds
        self.tokens += sum(accepted) + len(accepted)
        results = list(zip(drafted, accepted, strict=True))
        trims = [plan.trim for plan in plans]
        told = told if self.tells else []
        padded = not self.form.ends_chains
        self.policy.observe(report(self.requests, results, told, trims, seconds, padded))

    def _verified(
        self, plans: Sequence[DraftPlan], width: int, told: Sequence[tuple[float, ...]]
    ) -> list[int]:
        """The number of draft tokens of each request that get rows."""
        trims = [plan.trim for plan in plans if plan.trim is not None]
        if not trims:
            return [plan.num_tokens for plan in plans]
        size, wanted = len(plans), torch.tensor([plan.num_tokens for plan in plans])
        num_rows = self.form.rows(size, width, sum(trim.num_rows for trim in trims))
        assert len(trims) == size
        confidences = torch.tensor([(*it, *[0.0] * (width - len(it))) for it in told])
        factors = torch.tensor([trim.factor for trim in trims])
        rates, known = torch.tensor(trims[0].rates), torch.ones_like(wanted)
        return trim_drafts(confidences, wanted, factors, rates, known, num_rows).tolist()

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def seconds_of(
    drafted: Sequence[int], costs: Costs, form: StepForm, widths: Sequence[int], most: int = 0
) -> float:
    """Seconds of a step that verifies `drafted` tokens by request, and drafts `most` if more."""
    size, most = len(drafted), max(most, *drafted)
    width = most if form.ends_chains else next(it for it in widths if it >= most)
    seconds = costs.target_seconds(size, form.rows(size, width, sum(drafted)), 100 * size)
    for place in range(1, width + 1):
        drafting = sum(count >= place for count in drafted) if form.ends_chains else size
        now = costs.draft_seconds(drafting, place, 0)
        seconds += now - costs.draft_seconds(drafting, place - 1, 0)
    return seconds
