"""Counts and times of an engine since it started."""

from dataclasses import dataclass, field

from slipstream.core.batch import Committed, StepTimes
from slipstream.core.outputs import RequestMetrics


@dataclass
class EngineMetrics:
    """Totals over all requests; times in seconds.

    `num_broken` counts samples that ended because the model's logits were not finite.

    `speculation` counts drafts, draft tokens and accepted tokens by the definitions of
    `RequestMetrics`.
    """

    num_steps: int = 0
    num_output_tokens: int = 0
    num_broken: int = 0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    verify_seconds: float = 0.0
    rest_seconds: float = 0.0
    speculation: RequestMetrics = field(default_factory=RequestMetrics)

    def count_step(self, times: StepTimes) -> None:
        self.num_steps += 1
        self.draft_seconds += times.draft
        self.target_seconds += times.target
        self.verify_seconds += times.verify
        self.rest_seconds += times.rest

    def count_tokens(self, gained: Committed, num_kept: int) -> None:
        """Take in one request's share of a step, of which stop conditions left `num_kept`."""
        self.num_output_tokens += num_kept
        self.num_broken += gained.broken
        if gained.num_draft_tokens:
            self.speculation.count_draft(
                gained.num_draft_tokens, gained.num_accepted, gained.num_positions
            )

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of all steps by part: drafting, the target's pass, verification, the rest."""
        return {
            "draft": self.draft_seconds,
            "target": self.target_seconds,
            "verify": self.verify_seconds,
            "rest": self.rest_seconds,
        }

    @property
    def time_shares(self) -> dict[str, float]:
        """Shares of the step time, by its parts."""
        seconds = self.seconds
        total = sum(seconds.values())
        return {name: value / total if total else 0.0 for name, value in seconds.items()}
