"""One step of the engine: schedule, propose, forward, verify, commit.

    batch = scheduler.schedule()        which requests, with how many tokens each
    Launcher.launch(batch)              loads new requests and starts the work on the device
        Step.run                        propose, forward, verify, commit: no host decisions
    Launcher.finish                     waits for the results and hands them to the scheduler

Plain decoding is a step with empty drafts. All steps go through `run`: a captured step replays a
CUDA graph of it (`runner/graphs.py`); a step ahead is launched before the host has the results of
the last one (`launcher.py`); for requests with grammars the host changes the draft before it is
verified (`guidance.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from slipstream.core.step_form import StepLimits
from slipstream.engine.guidance import SteeredDraft
from slipstream.engine.step_results import Outcome, Proposal, TrimRates
from slipstream.kernels.devices import label
from slipstream.kernels.sampling import SampleRows, rates_by_request
from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.device_state import DeviceState
from slipstream.runner.model_runner import Forward, ModelRunner
from slipstream.runner.rows import TreeRows
from slipstream.sampling.state import SamplingState
from slipstream.sampling.verification import DraftedTrees, Verdict, verify, verify_trees
from slipstream.speculative.drafter import Draft, Drafter

# Names of the parts of a step in a profiler's trace.
PART_LABELS = {
    "slipstream: draft": "draft",
    "slipstream: target": "target",
    "slipstream: verify": "verify",
}
_DRAFT, _TARGET, _VERIFY = PART_LABELS


class Step:
    """The device's part of a step, over the models and the state."""

    def __init__(
        self,
        limits: StepLimits,
        runner: ModelRunner,
        drafter: Drafter,
        state: DeviceState,
        sampling: SamplingState,
        synthetic_rates: Tensor | None,
    ) -> None:
        self._limits, self._runner, self._drafter = limits, runner, drafter
        self._state, self._sampling = state, sampling
        self._synthetic_rates = synthetic_rates
        self._now = partial(state.ops.timestamp, state.device)
        self._trim_rates = TrimRates(state.device)

    def run(
        self,
        batch: DeviceBatch,
        steer: Callable[[Draft], SteeredDraft] | None = None,
        proposal: Proposal | None = None,
    ) -> Outcome:
        """Propose, forward, verify, commit, and let the drafter observe.

        It reads tensors alone, and waits for the device only if the batch is exact (not padded).
        So a call over fixed tensors can be captured in a graph, which `steer` cuts in two.

        Args:
            steer: changes the draft on the host, for requests that follow grammars.
            proposal: a draft that was made already; None: the drafter makes one here.
        """
        if proposal is None:
            with label(_DRAFT):
                proposal = self.propose(batch)
        draft, allowed = proposal.draft, None
        if steer is None:
            draft = self._trim(batch, draft)
        else:
            batch, draft, allowed = steer(draft).replace(batch, draft)
            self._write(batch, draft)
        with label(_TARGET):
            forward = self._forward(batch, draft)
            logits = self._runner.logits(self._judged(batch, draft, forward))
        computed = self._now()
        with label(_VERIFY):
            layout = forward.layout.judged(batch.judges_all)
            verdict = self._verify(batch, draft, logits, allowed, layout)
            verdict = self._commit(batch, verdict)
            self._drafter.observe(batch, verdict, forward)
        cached = self._drafter.cached_tokens(batch.slots)
        times = (proposal.began, proposal.drafted, computed, self._now())
        ops = self._state.ops
        return Outcome.of(ops, verdict, draft, cached, times, logits, forward)

    def propose(self, batch: DeviceBatch) -> Proposal:
        """The drafter's tokens, written after the known tokens of every request."""
        began, drafts = self._now(), batch.width > 0
        if drafts and batch.draft_counts is not None:
            drafts = any(batch.draft_counts)  # else exact passes would have no rows
        elif drafts:
            # The host may have planned before the last step's results arrived. Apply its limits to
            # what the device knows: a seeded text must not depend on when a step was planned.
            room = torch.minimum(batch.num_draft_tokens, self._most_useful_drafts(batch.slots))
            batch = batch.asking_for(room, batch.width)
            drafts = batch.width > 0  # an exact batch has the width of its longest draft now
        draft = self._drafter.propose(batch) if drafts else Draft.empty(batch)
        if not draft.written:
            self._write(batch, draft)
        return Proposal(draft, began, self._now())

    def _trim(self, batch: DeviceBatch, draft: Draft) -> Draft:
        """Keep the draft tokens that are most likely to be accepted, as many as there are rows for.

        This does not bias the output. Whether a position is kept depends on the confidences up to
        it and on other requests, never on the token drafted there (as with `ChainStops`, see
        speculative/chains.py); later positions of a chain rank behind earlier ones.
        """
        confidences = draft.confidences
        if batch.num_rows is None or draft.tree is not None or not batch.width:
            return draft
        if confidences is None:  # then all are ranked equal
            confidences = torch.zeros_like(draft.token_ids, dtype=torch.float32)
        kept = self._state.ops.trim_drafts(
            *(confidences, draft.num_tokens, batch.factors, self._trim_rates.chances),
            *(batch.num_new_tokens, batch.num_rows),
        )
        return replace(draft, num_tokens=kept)

    def _write(self, batch: DeviceBatch, draft: Draft) -> None:
        tables = self._state.tables
        self._state.ops.write_tokens(tables, batch.slots, draft.token_ids, draft.num_tokens)

    def _forward(self, batch: DeviceBatch, draft: Draft) -> Forward:
        """One pass of the target over prompt chunks, last tokens and draft tokens."""
        starts = self._state.num_computed.index_select(0, batch.slots)
        tree = None
        if draft.tree is not None:
            tree = TreeRows(draft.tree, starts, 0, draft.num_tokens > 0)
        most = draft.token_ids.shape[1]
        return self._runner.forward(batch.target_rows(starts, draft.num_tokens, most, tree))

    def _judged(self, batch: DeviceBatch, draft: Draft, forward: Forward) -> Tensor:
        """[N, hidden_size], the rows of a pass whose logits are needed to verify the draft."""
        if batch.judges_all:
            return forward.hidden
        if batch.exact and not draft.token_ids.shape[1]:  # the host need not wait for their number
            return forward.layout.last(forward.hidden)
        return forward.layout.ends(forward.hidden, draft.num_tokens + 1)

    def _verify(
        self,
        batch: DeviceBatch,
        draft: Draft,
        logits: Tensor,
        allowed: Tensor | None,
        layout: tuple[Tensor, Tensor, Tensor] | None,
    ) -> Verdict:
        """The verdict on every request's draft, given the `SampleRows.layout` of the logits if it
        is known."""
        columns = self._sampling.columns
        # Ops that get whole rows of logits compute these numbers themselves.
        peaks = None if columns.gather is None else columns.peaks(logits)
        chances = draft.chances(columns)
        rows = SampleRows.build(
            batch.slots,
            self._state.num_tokens[batch.slots],
            draft.token_ids,
            draft.num_tokens,
            draft.one_hot,
            draft.probs,
            draft.vocabulary,
            num_rows=logits.shape[0],
            certain=draft.certain_tokens(chances) if draft.tree is None else None,
            layout=layout,
            draft_chances=chances if draft.shares else None,
            peaks=peaks,
        )
        if allowed is not None:
            assert self._sampling.allowed_next is not None
            allowed.index_copy_(0, rows.first_row, self._sampling.allowed_next[batch.slots])
            rows = replace(rows, allowed=allowed)
        if draft.tree is None:
            rates = self._synthetic_rates
            if rates is not None:
                rates = rates_by_request(rates, self._sampling.seeds[batch.slots])
            return verify(logits, rows, self._sampling, batch.uses, rates)
        trees = DraftedTrees(
            *(draft.tree, batch.slots, rows.positions, draft.token_ids, draft.num_tokens),
            most_accepted=self._acceptable(batch.slots),
            num_rows=logits.shape[0],
            allowed=allowed,
            peaks=peaks,
        )
        verdict = verify_trees(logits, trees, self._sampling, batch.uses)
        assert verdict.path is not None
        self._runner.keep_path(batch.slots, verdict.path, verdict.num_accepted)
        return verdict

    def _commit(self, batch: DeviceBatch, verdict: Verdict) -> Verdict:
        """Append the accepted tokens. The slots of rejected ones are free again, and requests whose
        prompt is not computed to its end gain nothing."""
        num_tokens, num_accepted = self._state.ops.commit(
            self._state.tables,
            batch.slots,
            batch.num_new_tokens,
            batch.at_end,
            verdict.token_ids,
            verdict.num_tokens,
            verdict.num_accepted,
        )
        self._sampling.commit(batch.slots, verdict.token_ids, num_tokens, batch.uses)
        if self._runner.has_states:
            self._runner.commit(batch.slots, num_accepted)
        return replace(verdict, num_tokens=num_tokens, num_accepted=num_accepted)

    def _most_useful_drafts(self, slots: Tensor) -> Tensor:
        """[R] int64, the most draft tokens that may be useful; see `Scheduler._most_drafts`."""
        limits, acceptable = self._limits, self._acceptable(slots)
        if not limits.drafts_trees:
            return acceptable
        longest = min(limits.drafter_max_model_len, limits.max_model_len - 1)
        places = (longest - self._state.num_tokens[slots]).clamp_min(0)
        return torch.where(acceptable > 0, places, 0)

    def _acceptable(self, slots: Tensor) -> Tensor:
        """[R] int64, the most draft tokens that may be accepted."""
        most = self._state.most_drafted[slots].clamp_max(self._limits.drafter_max_model_len)
        return (most - self._state.num_tokens[slots]).clamp_min(0)
