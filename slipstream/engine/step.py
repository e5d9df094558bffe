"""One step of the engine: schedule, propose, forward, verify, commit.

    batch = scheduler.schedule()        which requests, with how many tokens each
    Step.launch(batch)                  loads new requests and starts the work on the device
        Step.run                        propose, forward, verify, commit: no host decisions
    Step.finish                         waits for the results and hands them to the scheduler

Plain decoding is a step with empty drafts. All steps go through `run`: a captured step replays a
CUDA graph of it (`runner/graphs.py`); a step ahead is launched before the host has the results of
the last one; for requests with grammars the host changes the draft before it is verified
(`guidance.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.core.batch import Batch, StepReport
from slipstream.core.request import Request
from slipstream.core.step_form import StepLimits
from slipstream.engine.guidance import DraftSteering, Guidance, SteeredDraft
from slipstream.engine.ranks.division import Division
from slipstream.engine.ranks.ranks import ALONE, Ranks, require_agreement
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.step_results import (
    Launched,
    Outcome,
    Proposal,
    RatedRows,
    StepResult,
    TrimRates,
    pack,
)
from slipstream.kernels.devices import Download, label, upload
from slipstream.kernels.sampling import SampleRows, rates_by_request
from slipstream.runner.device_batch import DeviceBatch, PackedBatch
from slipstream.runner.device_state import DeviceState
from slipstream.runner.graphs import GraphRunner
from slipstream.runner.model_runner import Forward, ModelRunner
from slipstream.runner.rows import RowLayout, TreeRows
from slipstream.sampling.logits import TokenLogprobs, token_logprobs
from slipstream.sampling.state import SamplingState, Uses
from slipstream.sampling.verification import DraftedTrees, Verdict, verify, verify_trees
from slipstream.speculative.drafter import Draft, Drafter

# What a profiler's trace calls the parts of a step.
PART_LABELS = {
    "slipstream: draft": "draft",
    "slipstream: target": "target",
    "slipstream: verify": "verify",
}
_DRAFT, _TARGET, _VERIFY = PART_LABELS


class Step:
    """Runs steps over the models and the state.

    Args:
        graphs: captured steps; None where nothing is captured.
        guidance: for requests that follow a grammar.
        runs_ahead: whether to launch steps ahead; the drafter must need nothing from the host.
        rereads: the drafter needs the target's features of the last token of a cached prefix.
        ranks: the processes that hold the models together; `ALONE` is this process only.
        division: which of the requests this rank runs.
        check_every: number of steps after which the ranks compare their states; None: never.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        drafter: Drafter,
        state: DeviceState,
        sampling: SamplingState,
        synthetic_rates: Tensor | None,
        guidance: Guidance,
        graphs: GraphRunner | None,
        runs_ahead: bool,
        rereads: bool,
        ranks: Ranks = ALONE,
        division: Division = Division(ALONE),  # noqa: B008
        check_every: int | None = None,
    ) -> None:
        self._scheduler, self._runner, self._drafter = scheduler, runner, drafter
        self._state, self._sampling = state, sampling
        self._synthetic_rates, self._guidance, self._graphs = synthetic_rates, guidance, graphs
        self._limits: StepLimits = scheduler.limits
        self._runs_ahead, self._rereads = runs_ahead, rereads
        self._now = partial(state.ops.timestamp, state.device)
        self._ended = 0.0
        self._trim_rates = TrimRates(state.device)
        self._ranks, self._check_every, self._num_launched = ranks, check_every, 0
        self.division, self._launch_part = division, division.guarding(self._launch)
        self._rated: Outcome | None = None  # of the last step, if logprobs may be asked for
        # What follower ranks call when the leader calls its method of this name.
        self.followed: Mapping[str, Callable[..., Any]] = {
            "launch": self._launch_part,
            "forget": drafter.forget,
            "reset": self._reset,
            "rate": self._rate,
        }

    @property
    def runs_ahead(self) -> bool:
        """Whether decoding steps may be launched before the last one's results arrive."""
        return self._runs_ahead and self._graphs is not None

    # ------------------------------------------------------------------ the device's part

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
            logits = self._runner.logits(forward.layout.ends(forward.hidden, draft.num_tokens + 1))
        computed = self._now()
        with label(_VERIFY):
            verdict, largest = self._verify(batch, draft, logits, allowed, forward.layout)
            verdict = self._commit(batch, verdict)
            self._drafter.observe(batch, verdict, forward)
        cached = self._drafter.cached_tokens(batch.slots)
        times = (proposal.began, proposal.drafted, computed, self._now())
        return Outcome.of(verdict, largest, draft, cached, times, logits, forward)

    def propose(self, batch: DeviceBatch) -> Proposal:
        """The drafter's tokens, written behind the known tokens of every request."""
        began = self._now()
        if not batch.exact:
            # The host may have planned before the last step's results arrived. Apply its limits to
            # what the device knows: a seeded text must not depend on when a step was planned.
            room = torch.minimum(batch.num_draft_tokens, self._most_useful_drafts(batch.slots))
            batch = replace(batch, num_draft_tokens=room)
        draft = self._drafter.propose(batch) if batch.width else Draft.empty(batch)
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
        if confidences is None:  # then all rank alike
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
        starts = self._state.num_computed[batch.slots]
        tree = None
        if draft.tree is not None:
            tree = TreeRows(draft.tree, starts, 0, draft.num_tokens > 0)
        most = draft.token_ids.shape[1]
        return self._runner.forward(batch.target_rows(starts, draft.num_tokens, most, tree))

    def _verify(
        self,
        batch: DeviceBatch,
        draft: Draft,
        logits: Tensor,
        allowed: Tensor | None,
        layout: RowLayout,
    ) -> tuple[Verdict, Tensor]:
        """The verdict on every request's draft; and [R, K + 1], for each token of the verdict, the
        largest logit of its row, which is finite if all logits of the row are."""
        chances = draft.chances(self._sampling.columns)
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
            layout=layout.packed,
            draft_chances=chances if draft.shares else None,
        )
        largest = rows.by_request(self._sampling.columns.largest(logits).squeeze(-1))
        if allowed is not None:
            assert self._sampling.allowed_next is not None
            allowed.index_copy_(0, rows.first_row, self._sampling.allowed_next[batch.slots])
            rows = replace(rows, allowed=allowed)
        if draft.tree is None:
            rates = self._synthetic_rates
            if rates is not None:
                rates = rates_by_request(rates, self._sampling.seeds[batch.slots])
            verdict = verify(logits, rows, self._sampling, batch.uses, rates)
            return verdict, largest
        trees = DraftedTrees(
            nodes=draft.tree,
            slots=batch.slots,
            positions=rows.positions,
            token_ids=draft.token_ids,
            num_nodes=draft.num_tokens,
            most_accepted=self._acceptable(batch.slots),
            num_rows=logits.shape[0],
            allowed=allowed,
        )
        verdict = verify_trees(logits, trees, self._sampling, batch.uses)
        assert verdict.path is not None
        self._runner.keep_path(batch.slots, verdict.path, verdict.num_accepted)
        largest = largest.gather(1, verdict.path)
        return verdict, pad(largest, (0, verdict.token_ids.shape[1] - largest.shape[1]))

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
        return Verdict(verdict.token_ids, num_tokens, num_accepted, verdict.path)

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

    # ------------------------------------------------------------------ the host's part

    def launch(self, batch: Batch) -> Launched:
        """Start a step on the devices of all ranks, without waiting for its results."""
        return self._ranks.call("launch", self._launch_part, batch)

    @torch.inference_mode()
    def _launch(self, whole: Batch) -> Launched:
        began, batch = perf_counter(), self.division.own(whole)
        self._drafter.forget(batch.preempted)
        self._state.apply(batch)
        admitted = batch.admitted
        self._runner.begin([it.request.slot for it in admitted], [it.resumed for it in admitted])
        for item in whole.admitted:
            self._sampling.admit(item.request.slot, item.request)
        uses = self._sampling.uses(item.request.slot for item in whole.requests)
        graphs = self.division.begin(whole, self._graphs, uses)
        padded = graphs is not None and whole.is_decode
        guesses = self._drafter.prepare(batch)
        packed = self.division.agree(lambda: pack(batch, guesses, self._sampling, self._rereads))
        steering = None
        if Uses.GRAMMAR in packed.uses:
            steering = self._guidance.begin(batch, packed)
        self._trim_rates.set(packed.trims)
        outcome: Outcome | None = None
        if graphs is not None and padded:
            packed = self.division.in_shape(packed, whole, self._sampling)
            # Tokens that grammars add to drafts come too late to be counted as rows.
            outcome = graphs.run("step", self.run, packed, steering, packs=steering is None)
        elif batch.requests:
            outcome = self._run_exactly(batch, packed, steering, graphs)
        num_rows = self._runner.assist() if outcome is None else outcome.forward.num_rows
        asks = (item.request.params for item in whole.requests)
        rates = any(it.logprobs is not None or it.prompt_logprobs is not None for it in asks)
        self._rated = outcome if rates else None
        self._num_launched += 1
        if self._check_every is not None and self._num_launched % self._check_every == 0:
            require_agreement(self._ranks, self._state, self._sampling, packed.slots)
        results = self.division.collected(whole, outcome, num_rows, padded)
        return Launched(whole, results, Download(results.numbers), began, padded)

    def _run_exactly(
        self,
        batch: Batch,
        packed: PackedBatch,
        steering: DraftSteering | None,
        graphs: GraphRunner | None,
    ) -> Outcome:
        """Run a step that is not captured: on a CPU, or with prompt chunks, whose sizes vary.
        Drafting is replayed from a graph of its own, where there are graphs."""
        proposal = None
        if graphs is not None and packed.width and packed.guesses is None:
            proposal = graphs.run("propose", self.propose, packed).first(len(batch.requests))
        outcome = self.run(packed.on(self._state.device), steering, proposal)
        if any(item.is_prompt_chunk for item in batch.requests):
            self._drafter.read_prompts(batch, outcome.forward)
            slots = upload(packed.slots, self._state.device)
            outcome.set_cached(self._drafter.cached_tokens(slots))
        return outcome

    def launch_ahead(self, last: Launched) -> Launched | None:
        """Launch the step behind `last` before the results of `last` arrive; None if it cannot be
        planned without them, or would overwrite what the host still has to read."""
        if not (last.padded and self._runs_ahead):
            return None
        requests = [item.request for item in last.batch.requests]
        if any(it.params.logprobs is not None or it.guide is not None for it in requests):
            return None
        batch = self._scheduler.schedule_ahead(last.batch)
        return None if batch is None else self.launch(batch)

    def finish(self, launched: Launched) -> StepResult:
        """Wait for the step's results and take them in."""
        batch, results = launched.batch, launched.results
        live = [not item.request.finished for item in batch.requests]
        read = launched.read(self._limits.tree_depth, self._ranks.check)
        committed, first_rows, logit_starts, seconds, waited = read
        if not self._limits.num_speculative_tokens:  # without a drafter, time of the host
            seconds[0] = 0.0
        self._scheduler.commit(batch, committed)
        ended = perf_counter()
        times = launched.times(seconds, waited, self._ended, ended)
        self._ended = ended
        report = StepReport(batch, committed, live, times, launched.padded, results.num_rows)
        return StepResult(report, first_rows, logit_starts, results.path)

    def forget(self, requests: Sequence[Request]) -> None:
        """Let the drafter drop what it holds of requests that ended."""
        self._ranks.tell("forget", requests)
        self._drafter.forget(requests)

    def reset(self, running: Sequence[Request]) -> None:
        """Forget what the device holds of these requests, because a step failed."""
        self._ranks.settle()
        self._ranks.tell("reset", running)
        self._reset(running)

    def _reset(self, running: Sequence[Request]) -> None:
        self._rated = None
        self._drafter.forget(running)
        for request in running:
            request.lose_place()
        self._state.reset()
        self._sampling.reset()

    def rate(
        self, rows: RatedRows, token_ids: Sequence[int], num_top: int, normalised: bool
    ) -> TokenLogprobs:
        """Log probabilities of each row's token, and of the `num_top` likeliest tokens there."""
        return self._ranks.call("rate", self._rate, rows, token_ids, num_top, normalised)

    @torch.inference_mode()
    def _rate(
        self, rows: RatedRows, token_ids: Sequence[int], num_top: int, normalised: bool
    ) -> TokenLogprobs:
        def rate() -> TokenLogprobs:
            assert self._rated is not None, "no step is in flight while logprobs are computed"
            logits, chosen = self._rated.logits_at(rows, token_ids, self._runner)
            return token_logprobs(logits, chosen, num_top, normalised, self._sampling.columns)

        return self.division.rated(rows, num_top, rate)
