"""What a request gained since it was last looked at: increments, so that streaming stays linear."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.core.outputs import Logprob, RequestMetrics, TokenOrigin
from slipstream.engine.samples import Sample, Submission

Candidates = Mapping[int, Logprob]


# Made for every request in every step: not frozen, which would take three times as long.
@dataclass(slots=True)
class Delta:
    """What one sample gained.

    Attributes:
        index: of the sample.
        text: new text; may be empty though there are tokens (half a character, the possible
            beginning of a stop string), and the other way round.
        token_ids: new tokens.
        logprobs: per new token, candidates by token id; None unless asked for.
        origins: per new token, where it came from.
        finish_reason, stop_reason: as in `CompletionOutput`; the last delta has them.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[Candidates] | None
    origins: Sequence[TokenOrigin]
    finish_reason: str | None
    stop_reason: str | int | None

    @property
    def from_draft(self) -> list[bool]:
        """Per new token, whether it is an accepted draft token."""
        return [origin.kind == "accepted" for origin in self.origins]

    def then(self, later: "Delta") -> "Delta":
        """This and what came behind it, as one."""
        return Delta(
            self.index,
            self.text + later.text,
            [*self.token_ids, *later.token_ids],
            None if self.logprobs is None else [*self.logprobs, *(later.logprobs or ())],
            [*self.origins, *later.origins],
            later.finish_reason,
            later.stop_reason,
        )


@dataclass(slots=True)
class Progress:
    """What one request gained.

    Attributes:
        deltas: at most one for each sample.
        finished: nothing comes behind this.
        metrics: the request's counts and times up to here.
        prompt_logprobs: as in `RequestOutput`; with the first progress, if asked for.
    """

    deltas: Sequence[Delta]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: Sequence[Candidates | None] | None = None

    def then(self, later: "Progress") -> "Progress":
        """This and what came behind it, as one."""
        deltas = {delta.index: delta for delta in self.deltas}
        for delta in later.deltas:
            earlier = deltas.get(delta.index)
            deltas[delta.index] = delta if earlier is None else earlier.then(delta)
        return Progress(
            list(deltas.values()),
            later.finished,
            later.metrics,
            later.prompt_logprobs if self.prompt_logprobs is None else self.prompt_logprobs,
        )


@dataclass(slots=True)
class _Seen:
    """How much of a sample was handed out."""

    tokens: int = 0
    characters: int = 0
    finished: bool = False

    def delta(self, sample: Sample) -> Delta | None:
        request, detokenizer = sample.request, sample.detokenizer
        if self.finished or (sample.num_taken == self.tokens and not request.finished):
            return None
        text = ""
        if detokenizer is not None:
            settled = detokenizer.settled_length
            text = detokenizer.text[self.characters : settled]
            self.characters = max(self.characters, settled)
        first, self.tokens = self.tokens, sample.num_taken
        self.finished = request.finished
        start = request.num_prompt_tokens
        reason = request.finish_reason
        return Delta(
            sample.index,
            text,
            request.token_ids[start + first : start + self.tokens],
            None if sample.logprobs is None else sample.logprobs[first : self.tokens],
            sample.origins[first : self.tokens],
            None if reason is None else reason.value,
            request.stop_reason,
        )


@dataclass(slots=True)
class Cursor:
    """Reads a submission piece by piece."""

    submission: Submission
    num_tokens: int = 0
    _samples: list[_Seen] = field(init=False)
    _prompt_read: bool = False

    def __post_init__(self) -> None:
        self._samples = [_Seen() for _ in self.submission.samples]

    def advance(self) -> Progress:
        """What came since the last call."""
        submission, deltas = self.submission, []
        for seen, sample in zip(self._samples, submission.samples, strict=True):
            delta = seen.delta(sample)
            if delta is not None:
                deltas.append(delta)
                self.num_tokens += len(delta.token_ids)
        prompt_logprobs = None
        if not self._prompt_read and submission.prompt_logprobs is not None:
            prompt_logprobs, self._prompt_read = submission.prompt_logprobs, True
        return Progress(deltas, submission.finished, submission.metrics.snapshot(), prompt_logprobs)
