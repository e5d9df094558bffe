"""One turn of the engine, on one page."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor

from slipstream.core.batch import Batch, Committed
from slipstream.core.request import Request
from slipstream.engine.scheduler import Scheduler
from slipstream.runner.device_state import DeviceState
from slipstream.runner.model_runner import Forward, ModelRunner, Rows
from slipstream.sampling.rows import SampleRows
from slipstream.sampling.state import SamplingState
from slipstream.sampling.verification import Verdict, Verification, verify
from slipstream.speculative.drafter import Draft, Drafter


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step: drafting, the target (its pass, sampling and verification), the rest."""

    draft: float
    target: float
    rest: float


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Attributes:
        committed: per scheduled request, what it gained (before stop conditions cut it).
        logits: [N, V] float32, the target's raw logits; request r owns rows
            logit_starts[r] .. logit_starts[r] + its draft tokens.
        forward: the target's pass.
    """

    batch: Batch
    committed: Sequence[Committed]
    logits: Tensor
    logit_starts: Sequence[int]
    forward: Forward
    times: StepTimes


class Step:
    """Schedule, propose, forward, verify, commit. Plain decoding is the same with empty drafts."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        drafter: Drafter,
        state: DeviceState,
        sampling: SamplingState,
        verification: Verification,
    ) -> None:
        self._scheduler, self._runner, self._drafter = scheduler, runner, drafter
        self._state, self._sampling = state, sampling
        self._verification = verification

    @torch.inference_mode()
    def run(self) -> StepResult:
        began = perf_counter()
        batch = self._scheduler.schedule()
        self._admit(batch)

        proposing = perf_counter()
        draft = self._drafter.propose(batch)
        slots = self._slots(batch)
        self._state.write_draft(slots, draft.token_ids, draft.num_tokens)

        drafted = perf_counter()
        num_drafts: list[int] = draft.num_tokens.tolist()
        forward = self._forward(batch, slots, num_drafts)
        logits, logit_starts = self._logits(forward, num_drafts)
        verdict = self._verify(batch, draft, logits)

        verified = perf_counter()
        self._commit(batch, slots, verdict)
        self._drafter.observe(batch, verdict, forward.hidden)
        observed = perf_counter()
        committed = self._committed(batch, verdict, num_drafts)
        self._scheduler.commit(batch, committed)

        drafting = (drafted - proposing) + (observed - verified)
        target = verified - drafted
        times = StepTimes(drafting, target, perf_counter() - began - drafting - target)
        return StepResult(batch, committed, logits, logit_starts, forward, times)

    def forget(self, requests: Sequence[Request]) -> None:
        """Tell the drafter of requests that ended."""
        self._drafter.forget(requests)

    def _admit(self, batch: Batch) -> None:
        self._drafter.forget(batch.preempted)
        self._state.apply(batch)
        for item in batch.requests:
            if item.admitted:
                self._sampling.admit(item.request.slot, item.request)

    def _slots(self, batch: Batch) -> Tensor:
        slots = [item.request.slot for item in batch.requests]
        return torch.tensor(slots, device=self._state.device)

    def _forward(self, batch: Batch, slots: Tensor, num_drafts: Sequence[int]) -> Forward:
        """One pass of the target over prompt chunks, last tokens and draft tokens."""
        lengths = [
            item.num_new_tokens + drafts
            for item, drafts in zip(batch.requests, num_drafts, strict=True)
        ]
        return self._runner.forward(Rows(slots, self._state.num_computed[slots], lengths))

    def _logits(self, forward: Forward, num_drafts: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Logits of each request's last 1 + drafts rows, and where each request's begin."""
        rows: list[int] = []
        starts: list[int] = []
        for end, drafts in zip(forward.row_starts[1:], num_drafts, strict=True):
            starts.append(len(rows))
            rows.extend(range(end - 1 - drafts, end))
        return self._runner.logits(forward.hidden[rows]), starts

    def _verify(self, batch: Batch, draft: Draft, logits: Tensor) -> Verdict:
        """The verdict on every request; those whose prompt is not at its end gain nothing."""
        host_slots = tuple(item.request.slot for item in batch.requests)
        rows = SampleRows.build(
            host_slots,
            self._state.num_tokens[list(host_slots)],
            draft.token_ids,
            draft.num_tokens,
            draft.one_hot,
            draft.probs,
            self._state.device,
            draft.vocabulary,
        )
        verdict = verify(logits, rows, self._sampling, self._verification)
        ends = [item.reaches_end for item in batch.requests]
        if all(ends):
            return verdict
        at_end = torch.tensor(ends, device=logits.device)
        return replace(
            verdict,
            num_tokens=verdict.num_tokens * at_end,
            num_accepted=verdict.num_accepted * at_end,
        )

    def _commit(self, batch: Batch, slots: Tensor, verdict: Verdict) -> None:
        """On the device: append what was accepted; refused tokens lose their slots."""
        new = torch.tensor([item.num_new_tokens for item in batch.requests], device=slots.device)
        computed = self._state.num_computed[slots] + new + verdict.num_accepted
        self._state.commit(slots, computed, verdict.token_ids, verdict.num_tokens)
        self._sampling.commit(slots, verdict.token_ids, verdict.num_tokens)

    def _committed(
        self, batch: Batch, verdict: Verdict, num_drafts: Sequence[int]
    ) -> tuple[Committed, ...]:
        """The verdict in host numbers."""
        requests = [item.request for item in batch.requests]
        rows = zip(
            verdict.token_ids.tolist(),
            verdict.num_tokens.tolist(),
            verdict.num_accepted.tolist(),
            num_drafts,
            self._drafter.cached_tokens(requests),
            strict=True,
        )
        return tuple(
            Committed(tuple(tokens[:count]), drafts, accepted, cached)
            for tokens, count, accepted, drafts, cached in rows
        )
