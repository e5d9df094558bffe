"""Totals of counts and times since the engine started."""

import logging
from dataclasses import dataclass, field

from slipstream.core.adapters import NamedAdapter
from slipstream.core.batch import Committed, StepReport
from slipstream.core.outputs import RequestMetrics
from slipstream.engine.drafting.choice import StepCosts

logger = logging.getLogger("slipstream")

_DRAFTS_OF_NO_USE = 300  # a drafter that fits gets a token accepted in far fewer


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """The time of a step with speculation, and the estimated time of plain decoding.

    Attributes:
        num_requests: requests of the step.
        drafting: seconds per draft token.
        seconds: time of a decode step for which `plain` is known, else 0.
        plain: estimated seconds of that step without drafts.
    """

    num_requests: int
    drafting: float
    seconds: float = 0.0
    plain: float = 0.0

    @classmethod
    def of(cls, report: StepReport, costs: StepCosts | None) -> "StepEstimate":
        """The estimate for a step.

        Args:
            costs: estimates of the time of steps; None: there are none.
        """
        batch, times = report.batch, report.times
        requests = len(batch.requests)
        drafted = sum([gained.num_draft_tokens for gained in report.committed])
        drafting = times.draft / drafted if drafted else 0.0
        if costs is None or not (report.padded or batch.is_decode):
            return cls(requests, drafting)
        # Whatever made this step slower than predicted, such as other load on the machine, would
        # have slowed a plain step down as well, and is not part of its prediction.
        took = times.device + times.rest
        expected, plain = costs.report_seconds(report)
        expected = max(plain, expected)  # nothing is known at first
        return cls(requests, drafting, took, plain * took / expected)

    def count(self, metrics: RequestMetrics, gained: Committed, share: float = 1.0) -> None:
        """Count one request's share of the step in metrics.

        Args:
            share: the share of the step's time that is counted.
        """
        if not (gained.token_ids or gained.num_draft_tokens):
            return
        drafted, accepted = gained.num_draft_tokens, gained.num_accepted
        metrics.count_draft(drafted, accepted, gained.num_positions)
        metrics.refused_drafting_seconds += self.drafting * (drafted - accepted)
        metrics.decode_seconds += self.seconds * share
        metrics.plain_seconds += self.plain * len(gained.token_ids) * share


@dataclass
class EngineMetrics:
    """Totals over all requests; times in seconds.

    Attributes:
        num_prompt_tokens: prompt tokens that steps computed; those that are computed again after a
            preemption count again.
        num_broken: samples that ended because the model's logits were not finite.
        speculation: as `RequestMetrics` defines it; each request of a step has an equal share of
            the step's time.
        adapters: the same for the requests of each adapter, by its name.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_broken: int = 0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    verify_seconds: float = 0.0
    rest_seconds: float = 0.0
    speculation: RequestMetrics = field(default_factory=RequestMetrics)
    adapters: dict[str, RequestMetrics] = field(default_factory=dict)

    def snapshot(self) -> "EngineMetrics":
        """A copy, which later steps do not change."""
        adapters = {name: it.snapshot() for name, it in self.adapters.items()}
        # The constructor is the fastest way, and every step takes a copy.
        return EngineMetrics(
            self.num_steps,
            self.num_prompt_tokens,
            self.num_output_tokens,
            self.num_broken,
            self.draft_seconds,
            self.target_seconds,
            self.verify_seconds,
            self.rest_seconds,
            self.speculation.snapshot(),
            adapters,
        )

    def restore(self, earlier: "EngineMetrics") -> None:
        """Undo what was counted since this snapshot, whose values these metrics take over."""
        speculation = self.speculation
        speculation.restore(earlier.speculation)
        vars(self).update(vars(earlier) | {"speculation": speculation})

    def count_step(self, report: StepReport) -> None:
        times = report.times
        self.num_steps += 1
        if not report.batch.is_decode:
            chunks = [it for it in report.batch.requests if it.admitted or it.is_prompt_chunk]
            self.num_prompt_tokens += sum([it.num_new_tokens for it in chunks])
        self.draft_seconds += times.draft
        self.target_seconds += times.target
        self.verify_seconds += times.verify
        self.rest_seconds += times.rest

    def count_tokens(
        self,
        gained: Committed,
        num_kept: int,
        step: StepEstimate,
        adapter: NamedAdapter | None = None,
    ) -> None:
        """Count one request's tokens of a step; stop conditions kept `num_kept` of them."""
        self.num_output_tokens += num_kept
        self.num_broken += gained.broken
        before = self.speculation.num_drafts
        step.count(self.speculation, gained, 1 / step.num_requests)
        if before < _DRAFTS_OF_NO_USE <= self.speculation.num_drafts:
            self._warn_of_no_use()
        if adapter is not None:
            own = self.adapters.setdefault(adapter.name, RequestMetrics())
            step.count(own, gained, 1 / step.num_requests)

    def _warn_of_no_use(self) -> None:
        """Warn if no draft token was accepted yet: NaN in a drafter is silent otherwise."""
        if not self.speculation.num_accepted_tokens:
            logger.warning(
                "none of the first %d drafts had a token that was accepted: the drafter does not "
                "fit the model or its traffic, or its logits are not finite; slipstream inspect "
                "DRAFTER --target MODEL tells whether a checkpoint fits, and float32 as its dtype "
                "whether numbers overflow",
                self.speculation.num_drafts,
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
        """The share of each part in the time of all steps."""
        seconds = self.seconds
        total = sum(seconds.values())
        return {name: value / total if total else 0.0 for name, value in seconds.items()}
