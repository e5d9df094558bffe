"""The outputs of requests, and their metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple

from slipstream.core.errors import GenerationError


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of one candidate for a token, by the target's raw logits.

    `rank` is the rank of the candidate, from 1; `decoded_token` is its text.
    """

    logprob: float
    rank: int
    decoded_token: str | None


class TokenOrigin(NamedTuple):
    """The origin of an output token.

    Attributes:
        kind: "accepted": an accepted draft token. Others are sampled from the target: "bonus"
            after a draft that was accepted as a whole, "recovered" instead of a rejected draft
            token, "plain" in a step without a draft.
        position: its position in the draft, from 0; None for "bonus" and "plain".
    """

    kind: Literal["accepted", "bonus", "recovered", "plain"]
    position: int | None


@cache
def token_origin(place: int, num_draft_tokens: int, num_accepted: int) -> TokenOrigin:
    """The origin of token number `place`, from 0, of the tokens that a request got in a step."""
    if place < num_accepted:
        return TokenOrigin("accepted", place)
    if not num_draft_tokens:
        return TokenOrigin("plain", None)
    if num_accepted == num_draft_tokens:
        return TokenOrigin("bonus", None)
    return TokenOrigin("recovered", place)


_SUMS = tuple(
    """
    num_drafts num_draft_tokens num_accepted_tokens num_steps refused_drafting_seconds
    decode_seconds plain_seconds
    """.split()
)
_SUMS_BY_PLACE = ("num_accepted_tokens_per_pos", "num_steps_by_draft_tokens")


@dataclass
class RequestMetrics:
    """Counts and times of one request, summed over its samples.

    A draft is the draft tokens of one step for one sample. AL (the acceptance length) is
    1 + num_accepted_tokens / num_drafts. Times are in seconds of a monotonic clock.

    Attributes:
        num_steps_by_draft_tokens: number of steps with output tokens, by their number of draft
            tokens: 0, 1, ...
        refused_drafting_seconds: time spent drafting tokens that were rejected.
        decode_seconds: time of steps without prompts for which plain decoding's cost is known.
        plain_seconds: estimated time of plain decoding for the tokens of these steps.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_steps: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None
    num_steps_by_draft_tokens: list[int] = field(default_factory=list)
    refused_drafting_seconds: float = 0.0
    decode_seconds: float = 0.0
    plain_seconds: float = 0.0

    def count_draft(
        self, num_draft_tokens: int, num_accepted: int, num_positions: int | None = None
    ) -> None:
        """Count the verification of one draft, or a step without a draft.

        Args:
            num_positions: number of different positions of the draft tokens: for a tree its depth;
                None for a chain, for which it is the number of draft tokens.
        """
        chosen = self.num_steps_by_draft_tokens
        if len(chosen) <= num_draft_tokens:
            chosen.extend([0] * (num_draft_tokens + 1 - len(chosen)))
        chosen[num_draft_tokens] += 1
        if not num_draft_tokens:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        counts = self.num_accepted_tokens_per_pos
        positions = num_draft_tokens if num_positions is None else num_positions
        if len(counts) < positions:
            counts.extend([0] * (positions - len(counts)))
        for position in range(num_accepted):
            counts[position] += 1

    def snapshot(self) -> "RequestMetrics":
        """A copy that later steps do not change."""
        # The constructor is the fastest way, and every step takes a copy of each request's.
        return RequestMetrics(
            self.num_drafts,
            self.num_draft_tokens,
            self.num_accepted_tokens,
            [*self.num_accepted_tokens_per_pos],
            self.num_steps,
            self.num_cached_tokens,
            self.num_preemptions,
            self.arrival_time,
            self.first_token_time,
            self.finished_time,
            [*self.num_steps_by_draft_tokens],
            self.refused_drafting_seconds,
            self.decode_seconds,
            self.plain_seconds,
        )

    def restore(self, earlier: "RequestMetrics") -> None:
        """Restore the values of a snapshot."""
        vars(self).update(vars(earlier))

    def add(self, other: "RequestMetrics", sign: int = 1) -> None:
        """Add the counts of speculation and of steps; subtract them if `sign` is -1."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + sign * getattr(other, name))
        for name in _SUMS_BY_PLACE:
            counts, added = getattr(self, name), getattr(other, name)
            counts.extend([0] * (len(added) - len(counts)))
            for place, count in enumerate(added):
                counts[place] += sign * count

    @property
    def acceptance_length(self) -> float:
        """AL; 1 if nothing was drafted."""
        return 1.0 + self.num_accepted_tokens / max(self.num_drafts, 1)

    @property
    def acceptance_per_position(self) -> list[float]:
        """For each position, the fraction of drafts whose token there was accepted."""
        return [count / max(self.num_drafts, 1) for count in self.num_accepted_tokens_per_pos]

    @property
    def estimated_speedup(self) -> float | None:
        """Estimated speed relative to plain decoding; None if the costs of steps are not known.
        They are measured for `num_speculative_tokens="auto"`, and by engines that warm up."""
        return self.plain_seconds / self.decode_seconds if self.decode_seconds > 0 else None

    @property
    def mean_draft_tokens(self) -> float:
        return self.num_draft_tokens / max(sum(self.num_steps_by_draft_tokens), 1)

    @property
    def time_to_first_token(self) -> float | None:
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a request, so far.

    Attributes:
        logprobs: per token, candidates by token id; None unless asked for.
        from_draft: per token, whether it is an accepted draft token.
        finish_reason: "stop", "length", "abort", or "error" (the grammar allows no further token,
            or the model's logits are not finite); None while it runs.
        stop_reason: the stop string or stop token id that ended it, if there is one; for an error,
            its cause.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: Sequence[Mapping[int, Logprob]] | None
    from_draft: Sequence[bool]
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request and its samples, so far.

    `prompt` is None if the prompt was given as token ids. The first entry of `prompt_logprobs` is
    None, since the first token has no prediction.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None
    outputs: Sequence[CompletionOutput]
    finished: bool
    metrics: RequestMetrics

    @property
    def num_tokens(self) -> int:
        """Number of output tokens of all samples."""
        return sum(len(sample.token_ids) for sample in self.outputs)

    def require_sound(self) -> None:
        """Raise GenerationError if a sample ended with an error."""
        for sample in self.outputs:
            if sample.finish_reason == "error":
                raise GenerationError(f"the output was broken off: {sample.stop_reason}")
