"""The engine: requests in, outputs out, one step at a time."""

import logging
from collections.abc import Sequence
from functools import partial
from time import perf_counter

from slipstream.core.errors import RanksLostError, UsageError
from slipstream.core.outputs import RequestMetrics
from slipstream.core.request import FinishReason, Request, derive_seed
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.structured import StructuredOutput
from slipstream.engine.adapters import Adapters
from slipstream.engine.detokenizer import Detokenizer
from slipstream.engine.drafting.kept_costs import KeptCosts
from slipstream.engine.drafting.step_costs import CostRow
from slipstream.engine.grammar import Grammars
from slipstream.engine.images import ImageReader
from slipstream.engine.isolation import Isolation
from slipstream.engine.launcher import Launcher
from slipstream.engine.logprobs import LogprobReader
from slipstream.engine.media import MediaReader
from slipstream.engine.metrics import EngineMetrics, StepEstimate
from slipstream.engine.prompts import EncodedPrompt
from slipstream.engine.ranks.ranks import Ranks
from slipstream.engine.resolve import Resolved
from slipstream.engine.samples import Sample, StepMark, Submission
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.step_results import Launched, StepResult
from slipstream.models.tokenizer import Tokenizer

logger = logging.getLogger("slipstream")

_PATIENCE = 0.01  # seconds that a call waits for adapters when there is nothing else to run
_PROBE = "probe"  # no request of a user has this id: those have numbers


class Engine:
    """Owns the live requests and runs steps for them.

    Not thread-safe: one thread adds, steps and aborts.
    """

    def __init__(
        self,
        resolved: Resolved,
        scheduler: Scheduler,
        step: Launcher,
        logprobs: LogprobReader,
        tokenizer: Tokenizer | None,
        grammars: Grammars,
        costs: KeptCosts,
        adapters: Adapters,
        images: ImageReader,
        media: MediaReader,
        ranks: Ranks,
    ) -> None:
        self.resolved, self.tokenizer, self._grammars = resolved, tokenizer, grammars
        self.metrics, self._costs, self.adapters = EngineMetrics(), costs, adapters
        self.images, self.media = images, media
        self._scheduler, self._step, self._logprobs = scheduler, step, logprobs
        self.ranks, self.followed = ranks, {**step.followed, **adapters.followed}
        self._submissions: dict[str, Submission] = {}
        self._owners: dict[str, tuple[Submission, Sample]] = {}  # by the sample's request id
        self._arrivals = 0
        self._launched: Launched | None = None
        self._mark: StepMark | None = None  # to undo the step whose results are applied
        self._estimate = StepEstimate(1, 0.0)  # of that step
        self._isolation = Isolation(scheduler)

    @property
    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished or self._isolation.holds_any

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, to be read only."""
        return self._scheduler

    @property
    def costs(self) -> Sequence[CostRow]:
        """The costs of decode steps ; empty if they are not known."""
        return self._costs.rows if self.resolved.knows_costs else ()

    def compile(self, structured: StructuredOutput) -> None:
        """Compile a grammar before `add` needs it. May be called from any thread.

        Raises:
            UsageError: it is invalid, or this engine does not support it.
        """
        if self.resolved.synthetic_rates:
            raise UsageError(
                "structured output needs real verification of drafts; leave out "
                "rejection_sample_method synthetic"
            )
        self._grammars.compile(structured)

    def add(self, request_id: str, prompt: EncodedPrompt, params: SamplingParams) -> Submission:
        """Queue a request; its n samples are requests of their own.

        Raises:
            UsageError: the request can never be served as it is; nothing was queued.
        """
        if request_id in self._submissions:
            raise UsageError(f"request id {request_id!r} is in use; choose another")
        if params.structured is not None:
            self.compile(params.structured)
        samples = [self._sample(request_id, prompt, params, index) for index in range(params.n)]
        wants_prompt = params.prompt_logprobs is not None
        submission = Submission(
            request_id=request_id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            params=params,
            samples=samples,
            metrics=RequestMetrics(arrival_time=perf_counter()),
            prompt_logprobs=[None] if wants_prompt else None,
        )
        added: list[Request] = []
        try:
            for sample in samples:
                self._scheduler.add(sample.request)
                added.append(sample.request)
        except BaseException:
            for request in added:
                self._scheduler.finish(request, FinishReason.ABORT)
            raise
        self._submissions[request_id] = submission
        for sample in samples:
            self._owners[sample.request.request_id] = (submission, sample)
            self._isolation.add(sample.request)
        return submission

    def reset_prefix_cache(self) -> None:
        """Forget all computed prefixes; unfinished requests keep what they have."""
        self._scheduler.block_manager.forget_prefixes()

    def abort(self, request_id: str) -> Submission | None:
        """End a request at once; None when there is none of this id."""
        submission = self._submissions.get(request_id)
        if submission is None:
            return None
        for sample in submission.samples:
            self._end(sample, FinishReason.ABORT)
        self._close(submission)
        return submission

    def step(self) -> list[Submission]:
        """Run one step; returns the requests that gained tokens or ended, each once.

        On a GPU the next step may already be running when this returns. If applying the results of
        one request fails, that request ends with `Submission.error`. A step that raises is undone
        as a whole, and its requests are tried one by one, so that only the one that causes the
        failure ends with the error. An interrupt (any other BaseException) also undoes the step and
        is raised again; the next call continues from there.

        Raises:
            RanksLostError: a process that holds a share of the model has ended; nothing can run.
            Exception: steps fail whatever they run, even for a minimal request.
        """
        try:
            self._proceed_with_trials()
            return self._run_step()
        except RanksLostError:
            raise
        except Exception as error:
            return self._recover(error)
        except BaseException:
            self._take_back()
            self._close_finished()
            self._scheduler.restart(self._isolation.active(self._unfinished()))
            raise

    def _run_step(self) -> list[Submission]:
        launched, self._launched = self._launched, None
        # A step that ran ahead for requests that have all ended since is dropped. The device runs
        # it before the next one.
        if launched is not None and all(it.request.finished for it in launched.batch.requests):
            launched = None
        if launched is None:
            if not self.has_unfinished:
                return []
            batch = self._scheduler.schedule()
            if not batch.requests:  # all wait for adapters
                self.adapters.wait(_PATIENCE)
                return []
            launched = self._step.launch(batch)
        self._launched = self._step.launch_ahead(launched)
        owners = [
            self._owners[item.request.request_id]
            for item in launched.batch.requests
            if not item.request.finished
        ]
        self._mark = StepMark.of(self.metrics, owners)
        result = self._step.finish(launched)
        self.metrics.count_step(result.report)
        self._scheduler.policy.observe(result.report)
        changed = self._take_all(result)
        self._mark = None
        for submission in changed:
            if submission.finished:
                self._close(submission)
        return changed

    def _take_all(self, result: StepResult) -> list[Submission]:
        """Apply a step's results; returns the submissions that gained tokens or failed."""
        changed: dict[str, Submission] = {}
        report = result.report
        known = self._costs if self.resolved.knows_costs else None
        self._estimate = StepEstimate.of(report, known)
        for index, (item, gained) in enumerate(
            zip(report.batch.requests, report.committed, strict=True)
        ):
            if not report.live[index]:
                continue
            submission, sample = self._owners[item.request.request_id]
            if submission.error is None:
                before = sample.num_taken
                try:
                    self._take(submission, sample, result, index)
                except Exception as error:  # a fault of this request alone: the others go on
                    self._fail(submission, error)
                else:  # an error while counting undoes the whole step, so that counts add up
                    submission.count(gained, self._estimate)
                    taken = sample.num_taken - before
                    adapter = sample.request.adapter
                    self.metrics.count_tokens(gained, taken, self._estimate, adapter)
            if gained.token_ids or gained.broken or submission.error is not None:
                changed[submission.request_id] = submission
        return list(changed.values())

    def _recover(self, error: Exception) -> list[Submission]:
        """Handle a step that raised `error`: end the request that causes it, so that others go on.

        Until the cause is known, the requests of the step lose its work and are run one by one.
        That does not change greedy and coupled text. Other sampled text keeps its distribution, but
        may differ, since drafts may end at other places.

        Returns:
            The submissions that ended.
        """
        try:
            took_part = self._take_back()
        except RanksLostError as lost:  # other ranks wait for exchanges that this one did not reach
            raise RanksLostError(f"a step failed: {error!r}; {lost}") from error
        ended = self._close_finished()
        blamed = self._isolation.failed(took_part, self._unfinished())
        self._scheduler.restart([] if blamed is None else [blamed])
        if blamed is None:
            logger.warning("a step failed; its requests are tried one by one", exc_info=error)
        else:
            submission, _ = self._owners[blamed.request_id]
            self._fail(submission, error)
            self._close(submission)
            ended.append(submission)
        self._scheduler.check_invariants()
        try:
            self._probe()
        except Exception as cause:
            raise error from cause
        return ended

    def _proceed_with_trials(self) -> None:
        """End the trial (a request running alone) if it is over, and begin the next one."""
        if self._isolation.is_over:
            self._take_back()
            self._scheduler.restart([])
            self._isolation.end_trial()
        self._isolation.proceed()

    def _take_back(self) -> list[Request]:
        """Undo the step that failed, however far it got; returns the requests that took part.

        Afterwards no unfinished request has any state on the device.
        """
        self._launched = None
        if self._mark is not None:
            self._mark.restore(partial(Detokenizer.of, self.tokenizer))
            self._mark = None
        took_part = [it for it in self._unfinished() if it.has_place]
        self._step.reset(took_part)
        for request in took_part:
            self._renew_guide(request)
        return took_part

    def _close_finished(self) -> list[Submission]:
        """Close and return the submissions that had finished when a step failed."""
        ended = [it for it in self._submissions.values() if it.finished]
        for submission in ended:
            self._close(submission)
        return ended

    def _unfinished(self) -> list[Request]:
        return [it.request for _, it in self._owners.values() if not it.request.finished]

    def _probe(self) -> None:
        """Run a request of one token, to see whether steps work at all; raises what they raise."""
        held, self._isolation = self._isolation, Isolation(self._scheduler)
        counted = self.metrics.snapshot()
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        try:
            self.add(_PROBE, EncodedPrompt(None, [0], ()), params)
            while self._scheduler.has_unfinished:
                self._run_step()
        finally:
            self.abort(_PROBE)
            self._isolation = held
            self.metrics.restore(counted)

    def _renew_guide(self, request: Request) -> None:
        """Rebuild the grammar's state from the output: a failed step may have advanced it."""
        structured = request.params.structured
        if request.guide is not None and structured is not None:
            request.guide = self._grammars.guide(structured, request.stop_token_ids)
            for token in request.output_token_ids:
                request.guide.advance(token)

    def _fail(self, submission: Submission, error: Exception) -> None:
        """End a request with an error. Its detokenizer may be the cause, so it is not called."""
        submission.error = error
        for sample in submission.samples:
            self._isolation.release(sample.request)
            self._scheduler.finish(sample.request, FinishReason.ABORT)
            self._step.forget([sample.request])

    def _take(self, submission: Submission, sample: Sample, result: StepResult, index: int) -> None:
        """Apply one request's share of a step's results."""
        report = result.report
        item, gained = report.batch.requests[index], report.committed[index]
        if submission.prompt_logprobs is not None and sample.index == 0:
            self._logprobs.take_prompt(submission, item, result, index)
        candidates = None
        if submission.params.logprobs is not None and gained.token_ids:
            candidates = self._logprobs.of_tokens(
                result, index, gained.token_ids, submission.params
            )
        stop = sample.take(gained, candidates)
        if stop is not None:
            self._stop_at(sample, stop)
        if sample.request.finished:
            if stop is None and sample.detokenizer is not None:
                sample.detokenizer.finish()
            self._step.forget([sample.request])

    def _stop_at(self, sample: Sample, stop: str) -> None:
        """A stop string ended the sample: drop the surplus tokens of this step."""
        request = sample.request
        del request.token_ids[request.num_prompt_tokens + sample.num_taken :]
        if request.finished:  # by the last token of this step, after or at the stop string
            request.finish_reason, request.stop_reason = FinishReason.STOP, stop
        else:
            self._scheduler.finish(request, FinishReason.STOP, stop)

    def _end(self, sample: Sample, reason: FinishReason) -> None:
        if not sample.request.finished:
            self._isolation.release(sample.request)
            self._scheduler.finish(sample.request, reason)
            self._step.forget([sample.request])
            if sample.detokenizer is not None:
                sample.detokenizer.finish()

    def _close(self, submission: Submission) -> None:
        for sample in submission.samples:
            self._owners.pop(sample.request.request_id, None)
        submission.close()
        # Last, so that a close that is interrupted can be repeated.
        del self._submissions[submission.request_id]

    def _sample(
        self, request_id: str, prompt: EncodedPrompt, params: SamplingParams, index: int
    ) -> Sample:
        resolved, limits, number = self.resolved, self.resolved.limits, self._arrivals
        self._arrivals += 1
        seed = params.seed
        if seed is None:  # derived twice, so that no sample of a request with a seed has it
            seed = derive_seed(derive_seed(resolved.seed, 1), number + 1)
        eos = () if params.ignore_eos else resolved.eos_token_ids
        most = limits.max_model_len - len(prompt.token_ids)
        drafts = params.num_speculative_tokens
        request = Request(
            request_id=request_id if params.n == 1 else f"{request_id}/{index}",
            token_ids=list(prompt.token_ids),
            params=params,
            seed=derive_seed(seed, index),
            stop_token_ids=frozenset(eos) | frozenset(params.stop_token_ids),
            max_tokens=max(1, most if params.max_tokens is None else min(most, params.max_tokens)),
            num_speculative_tokens=limits.num_speculative_tokens if drafts is None else drafts,
            arrival=number,
            bad_words=prompt.bad_words,
            verification=resolved.verification_of(params),
            priority=prompt.priority,
            cache_salt=prompt.cache_salt,
            adapter=prompt.adapter,
            spans=prompt.spans,
        )
        if params.structured is not None:
            request.guide = self._grammars.guide(params.structured, request.stop_token_ids)
        detokenizer = Detokenizer.of(self.tokenizer, params)
        return Sample(index, request, detokenizer, None if params.logprobs is None else [])
