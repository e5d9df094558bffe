"""Decoding in windows of one engine, whose draft policy is exchanged between them.

A window begins when all its requests have their first token and ends when they have gained a given
number of tokens together. No request ends within it, so it holds decode steps of a fixed number of
requests and nothing else; then the requests are aborted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, count
from operator import mul
from time import perf_counter

from slipstream import LLM, SamplingParams
from slipstream.core.batch import DraftPlan, StepReport
from slipstream.engine.draft_policy import Candidate, DraftPolicy
from slipstream.engine.prompts import EncodedPrompt
from slipstream.engine.samples import Submission


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request of a window.

    Attributes:
        rates: where verdicts are drawn: the chance of each place, given those before it.
    """

    prompt: list[int]
    seed: int | None = None
    rates: Sequence[float] | None = None
    temperature: float = 0.0


@dataclass
class Window:
    """The measurements of a window of time; windows of a kind can be added up.

    Attributes:
        tokens: gained. Where verdicts are drawn, expected from the drafts that were verified: the
            luck of the draw does not count.
        choices: by step, verified draft tokens per request.
    """

    tokens: float = 0.0
    seconds: float = 0.0
    choices: list[float] = field(default_factory=list)

    def __iadd__(self, other: "Window") -> "Window":
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.choices += other.choices
        return self

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step."""
        return 1e3 * self.seconds / max(1, len(self.choices))

    @property
    def mean_choice(self) -> float:
        """Verified draft tokens per request and step."""
        return sum(self.choices) / max(1, len(self.choices))


class Watched:
    """A policy whose reports are also passed to another function."""

    def __init__(self, policy: DraftPolicy, watch: Callable[[StepReport], None]) -> None:
        self._policy, self._watch = policy, watch

    @property
    def widths(self) -> tuple[int, ...]:
        return self._policy.widths

    @property
    def reads_confidences(self) -> bool:
        return self._policy.reads_confidences

    def plan(self, candidates: Sequence[Candidate]) -> Sequence[DraftPlan]:
        return self._policy.plan(candidates)

    def observe(self, report: StepReport) -> None:
        self._policy.observe(report)
        self._watch(report)


_numbers = count()


@contextmanager
def running(llm: LLM, requests: Sequence[Asked], most: int) -> Iterator[list[Submission]]:
    """The requests, each with its first token; they are aborted at the end.

    Args:
        most: output tokens of each at most.
    """
    engine = llm.engine
    live: list[Submission] = []
    try:
        for asked in requests:
            params = SamplingParams(
                temperature=asked.temperature, max_tokens=most, ignore_eos=True, seed=asked.seed
            )
            prompt = EncodedPrompt(None, asked.prompt, ())
            live.append(engine.add(f"window/{next(_numbers)}", prompt, params))
        while not all(num_gained(it) for it in live):
            engine.step()
        yield live
    finally:
        for submission in live:
            engine.abort(submission.request_id)


@contextmanager
def policy_of(llm: LLM, policy: DraftPolicy) -> Iterator[None]:
    """Exchange the engine's policy for a while."""
    scheduler = llm.engine.scheduler
    before, scheduler.policy = scheduler.policy, policy
    try:
        yield
    finally:
        scheduler.policy = before


def num_gained(submission: Submission) -> int:
    """Output tokens so far."""
    return submission.samples[0].request.num_output_tokens


def run_window(
    llm: LLM, policy: DraftPolicy, requests: Sequence[Asked], tokens: int, most: int
) -> Window:
    """Decode under a policy until the requests have gained `tokens` each, on average.

    Args:
        most: output tokens of each request at most, which none must reach.
    """
    reports: list[StepReport] = []
    with policy_of(llm, Watched(policy, reports.append)), running(llm, requests, most) as live:
        reports.clear()
        gained, goal = 0, tokens * len(live)
        began = perf_counter()
        while gained < goal:
            llm.engine.step()
            assert reports, "requests ended before their window began"
            gained += sum([len(gain.token_ids) for gain in reports[-1].committed])
            assert len(reports) < most, "requests end within their window"
        seconds = perf_counter() - began
        names = [it.samples[0].request.request_id for it in live]
    asked = dict(zip(names, requests, strict=True))
    choices = [_mean_draft(report) for report in reports]
    if any(it.rates is not None for it in requests):
        return Window(sum(_expected(report, asked) for report in reports), seconds, choices)
    return Window(float(gained), seconds, choices)


def _mean_draft(report: StepReport) -> float:
    """Verified draft tokens per request."""
    drafts = [gain.num_draft_tokens for gain in report.committed]
    return sum(drafts) / len(drafts)


def _expected(report: StepReport, asked: Mapping[str, Asked]) -> float:
    """Tokens that the drafts of a step give on average."""
    tokens = 0.0
    for item, gain in zip(report.batch.requests, report.committed, strict=True):
        rates = asked[item.request.request_id].rates or ()
        tokens += 1 + sum(accumulate(rates[: gain.num_draft_tokens], mul))
    return tokens
