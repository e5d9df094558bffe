"""The interface of policies that decide how many tokens each request drafts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

from slipstream.core.batch import DraftPlan, StepReport
from slipstream.core.request import Request


class Candidate(NamedTuple):
    """A request that may draft in the step that is being planned; a tuple, since one is made for
    every request in every step.

    Attributes:
        most: maximum number of draft tokens, by the request's and the model's maximum lengths.
    """

    request: Request
    most: int


class DraftPolicy(Protocol):
    """Decides for every step how much is drafted, and learns from the step's results."""

    @property
    def widths(self) -> tuple[int, ...]:
        """The values of K that steps are captured for, rising from 0. A step is padded to the
        smallest that none of its requests exceeds; the last is the most that a plan may have.
        """

    @property
    def reads_confidences(self) -> bool:
        """Whether the results of steps must have the confidences of draft tokens."""

    def plan(self, candidates: Sequence[Candidate]) -> Sequence[DraftPlan]:
        """A plan for each candidate; the scheduler cuts it where rows or blocks are short."""

    def observe(self, report: StepReport) -> None:
        """Learn from a step's results; called once a step, maybe after the next one was planned."""


_plain_plan = cache(DraftPlan)  # by the number of tokens


@dataclass(frozen=True)
class FixedPolicy:
    """Always drafts as many tokens as may be useful, up to the request's and the engine's K.

    Attributes:
        learn: is told of every step, to know what they cost; None: that is not known.
    """

    num_speculative_tokens: int
    learn: Callable[[StepReport], None] | None = None

    reads_confidences = False

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(sorted({0, self.num_speculative_tokens}))

    def plan(self, candidates: Sequence[Candidate]) -> Sequence[DraftPlan]:
        most = self.num_speculative_tokens
        return [
            _plain_plan(min(it.most, it.request.num_speculative_tokens, most)) for it in candidates
        ]

    def observe(self, report: StepReport) -> None:
        if self.learn is not None:
            self.learn(report)
