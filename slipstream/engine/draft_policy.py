"""How many tokens each request drafts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.core.batch import DraftPlan, StepReport
from slipstream.core.request import Request


@dataclass(frozen=True)
class Candidate:
    """A request that may draft in the step that is being planned.

    Attributes:
        most: draft tokens that lengths leave room for.
    """

    request: Request
    most: int


class DraftPolicy(Protocol):
    """Is asked by the scheduler for every step, and told what came of it."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of draft tokens, rising from 0, that captured steps are padded to: each step to
        the smallest that none of its requests exceeds. The last is the most that the policy gives.
        """

    @property
    def reads_confidences(self) -> bool:
        """Whether results are to tell how confident drafters were of their tokens."""

    def plan(self, candidates: Sequence[Candidate]) -> Sequence[DraftPlan]:
        """A plan for each; rows and blocks that are short may cut it further."""

    def observe(self, report: StepReport) -> None:
        """Take in the results of a step, once; steps may have been planned since then."""


@dataclass(frozen=True)
class FixedPolicy:
    """As many as can be of use, up to the request's own number and the engine's K."""

    num_speculative_tokens: int

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(sorted({0, self.num_speculative_tokens}))

    @property
    def reads_confidences(self) -> bool:
        return False

    def plan(self, candidates: Sequence[Candidate]) -> Sequence[DraftPlan]:
        most = self.num_speculative_tokens
        return [
            DraftPlan(min(it.most, it.request.num_speculative_tokens, most)) for it in candidates
        ]

    def observe(self, report: StepReport) -> None:
        """Nothing changes it."""
