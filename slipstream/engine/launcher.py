"""The host's part of steps: loads requests, starts the device's part (`step.py`), reads results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from slipstream.core.batch import Batch, ScheduledRequest, StepReport
from slipstream.core.request import Request
from slipstream.engine.guidance import DraftSteering, Guidance
from slipstream.engine.ranks.division import Division
from slipstream.engine.ranks.ranks import Ranks, require_agreement
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.step import Step
from slipstream.engine.step_results import (
    Launched,
    Outcome,
    RatedRows,
    StepResult,
    pack,
)
from slipstream.kernels.devices import Download, upload
from slipstream.runner.device_batch import DeviceBatch, PackedBatch
from slipstream.runner.device_state import DeviceState
from slipstream.runner.graphs import GraphRunner
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.prefix_groups import PrefixGroups
from slipstream.sampling.logits import TokenLogprobs, token_logprobs
from slipstream.sampling.state import SamplingState, Uses
from slipstream.speculative.drafter import Drafter, Needs


class Launcher(Step):
    """Launches steps, and takes in their results.

    Args:
        graphs: captured steps; None where nothing is captured.
        guidance: for requests that follow a grammar.
        runs_ahead: whether to launch steps ahead; the drafter must need nothing from the host.
        needs: what the drafter reads of the target's passes.
        ranks: the processes that hold the models together.
        division: which of the requests this rank runs.
        check_every: number of steps after which the ranks compare their states; None: never.
        groups: see `pack`.
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
        needs: Needs,
        ranks: Ranks,
        division: Division,
        check_every: int | None,
        groups: PrefixGroups | None,
    ) -> None:
        super().__init__(scheduler.limits, runner, drafter, state, sampling, synthetic_rates)
        self._scheduler, self._guidance, self._graphs = scheduler, guidance, graphs
        self._runs_ahead, self._needs, self._groups = runs_ahead, needs, groups
        self._ended = 0.0  # when the last step ended
        self._ranks, self._check_every, self._num_launched = ranks, check_every, 0
        self.division, self._launch_part = division, division.guarding(self._launch)
        self._sent: tuple[PackedBatch, DeviceBatch] | None = None  # the last exact batch
        self._rated: Outcome | None = None  # of the last step, if logprobs may be asked for
        # The functions that follower ranks call when the leader calls its method of this name.
        self.followed: Mapping[str, Callable[..., Any]] = {
            "launch": self._launch_part,
            "forget": drafter.forget,
            "reset": self._reset,
            "rate": self._rate,
        }

    @property
    def runs_ahead(self) -> bool:
        """Whether steps may be launched before the last one's results arrive."""
        return self._runs_ahead and self._graphs is not None

    def launch(self, batch: Batch) -> Launched:
        """Start a step on the devices of all ranks, without waiting for its results."""
        return self._ranks.call("launch", self._launch_part, batch)

    @torch.inference_mode()
    def _launch(self, whole: Batch) -> Launched:
        began, batch = perf_counter(), self.division.own(whole)
        self._sampling.admit({item.request.slot: item.request for item in whole.admitted})
        uses = self._sampling.uses([item.request.slot for item in whole.requests])
        graphs = self.division.begin(whole, self._graphs, uses)
        padded = graphs is not None and whole.is_decode
        self._drafter.forget(batch.preempted)
        self._state.apply(batch)
        admitted = batch.admitted
        self._runner.save_last(batch.checkpoints)
        self._runner.begin([it.request.slot for it in admitted], [it.resumed for it in admitted])
        guesses = self._drafter.prepare(batch)
        given = batch, guesses, self._sampling, self._needs, self._groups
        packed = self.division.agree(lambda: pack(*given))
        steering = None
        if Uses.GRAMMAR in packed.uses:
            steering = self._guidance.begin(batch, packed)
        self._trim_rates.set(packed.trims)
        outcome: Outcome | None = None
        if graphs is not None and padded:
            packed = self.division.in_shape(packed, whole, self._sampling)
            # With grammars rows are not packed: the host adds tokens when rows are counted already.
            outcome = graphs.run("step", self.run, packed, steering, packs=steering is None)
        elif batch.requests:
            outcome = self._run_exactly(batch, packed, steering, graphs)
        num_rows = self._runner.assist() if outcome is None else outcome.forward.num_rows
        asks = [item.request.params for item in whole.requests]
        rates = any([it.logprobs is not None or it.prompt_logprobs is not None for it in asks])
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
        if graphs is not None:
            packed = replace(packed, uses=graphs.widened(packed.uses))
        if graphs is not None and packed.width and packed.guesses is None:
            proposal = graphs.run("propose", self.propose, packed).first(len(batch.requests))
        sent = self._sent
        if sent is None or sent[0] != packed:
            sent = packed, packed.on(self._state.device, not self.runs_ahead)
        self._sent = None if packed.prompts else sent  # images are not kept
        outcome = self.run(sent[1], steering, proposal)
        if not batch.is_decode and any(item.is_prompt_chunk for item in batch.requests):
            self._drafter.read_prompts(batch, outcome.forward)
            slots = upload(packed.slots, self._state.device)
            outcome.set_cached(self._drafter.cached_tokens(slots))
        return outcome

    def launch_ahead(self, last: Launched) -> Launched | None:
        """Launch the step after `last` before the results of `last` arrive; None if it cannot be
        planned without them, or would overwrite what the host still has to read."""
        if not self.runs_ahead or any(map(_is_awaited, last.batch.requests)):
            return None
        batch = self._scheduler.schedule_ahead(last.batch)
        return None if batch is None else self.launch(batch)

    def finish(self, launched: Launched) -> StepResult:
        """Wait for the step's results and take them in."""
        batch, results = launched.batch, launched.results
        live = [not item.request.finished for item in batch.requests]
        read = launched.read(self._limits.tree_depth, self._ranks.check)
        committed, first_rows, logit_starts, seconds, waited = read
        if not self._limits.num_speculative_tokens:  # without a drafter this is the host's time
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
        self._rated = self._sent = None
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


def _is_awaited(item: ScheduledRequest) -> bool:
    """Whether the host needs this request's results before it launches a further step: it reads
    logits of this step, or the request's next tokens depend on the host."""
    request, asked = item.request, item.request.params
    if item.reads_prompt:
        return True
    needs = asked.logprobs is not None or request.guide is not None or request.bad_words
    return item.reaches_end and bool(needs)
