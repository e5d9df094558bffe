"""A policy whose chains end at all lengths, and engines that follow it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from slipstream.core.batch import (
    NUM_BINS,
    ChainStops,
    Committed,
    DraftPlan,
    ScheduledRequest,
    StepReport,
    Trim,
)
from slipstream.engine.draft_policy import Candidate, FixedPolicy

BINS = 2048
# Extreme on purpose: neighbouring bins of confidence have very different rates.
RATES = tuple(0.4 + 0.6 * (place * 677 % BINS) / BINS for place in range(BINS))


@dataclass(frozen=True)
class StoppingPolicy(FixedPolicy):
    """As many tokens as fit, but chains end by their confidences, every request's by bounds of its
    own; it keeps what came of the steps."""

    seen: list[tuple[ScheduledRequest, Committed]] = field(default_factory=list)

    reads_confidences = True

    def plan(self, candidates: Sequence[Candidate]) -> Sequence[DraftPlan]:
        plans = super().plan(candidates)
        return [
            DraftPlan(plan.num_tokens, stops_of(it.request.arrival))
            for plan, it in zip(plans, candidates, strict=True)
        ]

    def observe(self, report: StepReport) -> None:
        self.seen.extend(zip(report.batch.requests, report.committed, strict=True))

    @property
    def asked(self) -> list[tuple[int, int]]:
        """(planned, drafted) of every share that was to draft."""
        return [
            (item.num_draft_tokens, gain.num_draft_tokens)
            for item, gain in self.seen
            if item.num_draft_tokens
        ]


@dataclass(frozen=True)
class TrimmingPolicy(StoppingPolicy):
    """All requests draft as many tokens as fit, and some of these are verified."""

    def plan(self, candidates: Sequence[Candidate]) -> Sequence[DraftPlan]:
        return [
            DraftPlan(plan.num_tokens, trim=trim_of(it.request.arrival, it.request.num_tokens))
            for plan, it in zip(FixedPolicy.plan(self, candidates), candidates, strict=True)
        ]


def trim_of(arrival: int, length: int) -> Trim:
    rates = tuple(0.4 + 0.6 * (place * 7 % NUM_BINS) / NUM_BINS for place in range(NUM_BINS))
    return Trim((arrival + length) % 2, 6 + arrival % 4, rates)


def stops_of(number: int) -> ChainStops:
    return ChainStops(RATES, 0.45 + 0.1 * (number % 5), 0.4 + 0.1 * (number % 4))


def use_stopping_policy(
    monkeypatch: pytest.MonkeyPatch, kind: type[StoppingPolicy] = StoppingPolicy
) -> list[StoppingPolicy]:
    """An engine that is built from here on follows such a policy, which is put into the list."""
    made: list[StoppingPolicy] = []

    def policy(count: int) -> StoppingPolicy:
        if not made:
            made.append(kind(count))
        return made[0]

    monkeypatch.setattr("slipstream.engine.assembly.FixedPolicy", policy)
    return made
