"""The outputs of a request: text, logprobs, counts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from slipstream.core.batch import Committed
from slipstream.core.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenOrigin,
    token_origin,
)
from slipstream.core.request import FinishReason, Request, RequestStatus
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.detokenizer import Detokenizer
from slipstream.engine.metrics import EngineMetrics, StepEstimate

Candidates = Mapping[int, Logprob]


@dataclass
class Sample:
    """One of the n samples of a request."""

    index: int
    request: Request
    detokenizer: Detokenizer | None
    logprobs: list[Candidates] | None
    origins: list[TokenOrigin] = field(default_factory=list)
    cumulative_logprob: float = 0.0

    def take(self, gained: Committed, candidates: Sequence[Candidates] | None) -> str | None:
        """Append the tokens that the scheduler committed; returns the stop string that they
        complete, if any.

        After a stop string only the first `num_taken` output tokens remain.
        """
        tokens = self.request.token_ids[self.request.num_prompt_tokens + self.num_taken :]
        if self.logprobs is None and not (self.detokenizer and self.detokenizer.has_stops):
            self._take_whole(tokens, gained)
            return None
        for place, token in enumerate(tokens):
            self.origins.append(token_origin(place, gained.num_draft_tokens, gained.num_accepted))
            if self.logprobs is not None and candidates is not None:
                self.logprobs.append(candidates[place])
                self.cumulative_logprob += candidates[place][token].logprob
            if self.detokenizer is None or self._is_hidden_stop(token):
                continue
            stop = self.detokenizer.push(token)
            if stop is not None:
                return stop
        return None

    def mark(self) -> "SampleMark":
        """A snapshot of the state, to undo a step."""
        return SampleMark(self, self.num_taken, self.request.num_steps, self.cumulative_logprob)

    def _take_whole(self, tokens: Sequence[int], gained: Committed) -> None:
        """Append all tokens at once, if neither logprobs nor stop strings need them one by one."""
        drafts, accepted = gained.num_draft_tokens, gained.num_accepted
        self.origins += [token_origin(place, drafts, accepted) for place in range(len(tokens))]
        if self.detokenizer is not None and tokens:
            hidden = self._is_hidden_stop(tokens[-1])  # only the last can be a stop token
            self.detokenizer.extend(tokens[:-1] if hidden else tokens)

    def _is_hidden_stop(self, token: int) -> bool:
        """Whether this token ended the output and its text is not part of it."""
        request = self.request
        return (
            request.finish_reason is FinishReason.STOP
            and token in request.stop_token_ids
            and self.num_taken == request.num_output_tokens
            and not request.params.include_stop_str_in_output
        )

    @property
    def num_taken(self) -> int:
        return len(self.origins)

    def output(self) -> CompletionOutput:
        """A snapshot."""
        reason = self.request.finish_reason
        return CompletionOutput(
            index=self.index,
            text=self.detokenizer.settled_text if self.detokenizer else "",
            token_ids=list(self.request.output_token_ids),
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            from_draft=[origin.kind == "accepted" for origin in self.origins],
            finish_reason=reason.value if reason else None,
            stop_reason=self.request.stop_reason,
        )


@dataclass(frozen=True, slots=True)
class SampleMark:
    """The state of an unfinished sample between two steps."""

    sample: Sample
    num_taken: int
    num_steps: int
    cumulative_logprob: float

    def restore(self, detokenizer: Detokenizer | None) -> None:
        """Reset the sample to this state; its request is running.

        Args:
            detokenizer: a new one, which takes the place of the sample's.
        """
        sample, request = self.sample, self.sample.request
        del request.token_ids[request.num_prompt_tokens + self.num_taken :]
        request.status, request.num_steps = RequestStatus.RUNNING, self.num_steps
        request.finish_reason = request.stop_reason = None
        del sample.origins[self.num_taken :]
        if sample.logprobs is not None:
            del sample.logprobs[self.num_taken :]
        sample.cumulative_logprob = self.cumulative_logprob
        sample.detokenizer = detokenizer
        if detokenizer is not None:
            for token in request.output_token_ids:
                detokenizer.push(token)


@dataclass
class Submission:
    """A user's request: one prompt, one or more samples."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    samples: list[Sample]
    metrics: RequestMetrics
    prompt_logprobs: list[Candidates | None] | None
    error: Exception | None = None  # the error that ended it, if one did

    @property
    def finished(self) -> bool:
        return all(sample.request.finished for sample in self.samples)

    def count(self, gained: Committed, step: StepEstimate) -> None:
        if not gained.token_ids:
            return
        self.metrics.num_steps += 1
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = perf_counter()
        step.count(self.metrics, gained)

    def close(self) -> None:
        """Complete the metrics at the end."""
        self.metrics.finished_time = perf_counter()
        requests = [sample.request for sample in self.samples]
        self.metrics.num_cached_tokens = sum(request.num_cached_tokens for request in requests)
        self.metrics.num_preemptions = sum(request.num_preemptions for request in requests)

    def output(self) -> RequestOutput:
        """A snapshot."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
            outputs=[sample.output() for sample in self.samples],
            finished=self.finished,
            metrics=self.metrics.snapshot(),
        )


@dataclass(frozen=True, slots=True)
class StepMark:
    """The state that applying a step's results changes, as it was before.

    Attributes:
        metrics: the engine's, with a snapshot.
        samples: the unfinished samples of the step, with snapshots of their requests' metrics.
    """

    metrics: tuple[EngineMetrics, EngineMetrics]
    samples: Sequence[tuple[Submission, RequestMetrics, SampleMark]]

    @classmethod
    def of(cls, metrics: EngineMetrics, samples: Sequence[tuple[Submission, Sample]]) -> "StepMark":
        """A mark of the current state."""
        marks = [(owner, owner.metrics.snapshot(), sample.mark()) for owner, sample in samples]
        return cls((metrics, metrics.snapshot()), marks)

    def restore(self, detokenizer: Callable[[SamplingParams], Detokenizer | None]) -> None:
        """Undo the step; of requests that failed in it, only the counts are restored.

        Args:
            detokenizer: makes a new one.
        """
        metrics, counted = self.metrics
        metrics.restore(counted)
        for submission, counts, mark in self.samples:
            submission.metrics.restore(counts)
            if submission.error is None:
                mark.restore(detokenizer(submission.params))
