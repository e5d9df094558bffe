"""Incremental updates of a request: made on the engine's thread, read on the event loop.

Updates hold what is new, not the whole output, so that the cost of streaming stays linear.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Self

from slipstream.core.outputs import Logprob, RequestMetrics, TokenOrigin
from slipstream.engine.samples import Sample, Submission

Candidates = Mapping[int, Logprob]


# Created for every request in every step; frozen ones would take three times as long.
@dataclass(slots=True)
class Delta:
    """New output of one sample.

    Attributes:
        index: of the sample.
        text: new text. It may be empty although there are tokens (part of a character, the possible
            beginning of a stop string), and the other way round.
        token_ids: new tokens.
        logprobs: per new token, candidates by token id; None unless asked for.
        origins: per new token, where it came from.
        finish_reason, stop_reason: as in `CompletionOutput`; set in the last delta.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[Candidates] | None
    origins: Sequence[TokenOrigin]
    finish_reason: str | None
    stop_reason: str | int | None


def join_deltas(deltas: Sequence[Delta]) -> Delta:
    """Successive deltas of one sample as one."""
    last = deltas[-1]
    return Delta(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=[*chain.from_iterable(delta.token_ids for delta in deltas)],
        logprobs=(
            None
            if last.logprobs is None
            else [*chain.from_iterable(delta.logprobs or () for delta in deltas)]
        ),
        origins=[*chain.from_iterable(delta.origins for delta in deltas)],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )


@dataclass(slots=True)
class RequestUpdate:
    """New output of one request.

    Attributes:
        deltas: at most one for each sample.
        finished: this is the last update.
        metrics: the request's counts and times so far.
        prompt_logprobs: as in `RequestOutput`; in the first update, if asked for.
    """

    deltas: Sequence[Delta]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: Sequence[Candidates | None] | None = None

    def then(self, later: "RequestUpdate") -> "RequestUpdate":
        """This update and the next one as one."""
        deltas = {delta.index: delta for delta in self.deltas}
        for delta in later.deltas:
            earlier = deltas.get(delta.index)
            deltas[delta.index] = delta if earlier is None else join_deltas([earlier, delta])
        return RequestUpdate(
            list(deltas.values()),
            later.finished,
            later.metrics,
            later.prompt_logprobs if self.prompt_logprobs is None else self.prompt_logprobs,
        )


@dataclass(slots=True)
class _SampleReader:
    """Reads one sample's output; counts what was read."""

    sample: Sample
    tokens: int = 0
    characters: int = 0
    finished: bool = False

    def read(self) -> Delta | None:
        sample, request, detokenizer = self.sample, self.sample.request, self.sample.detokenizer
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
class UpdateReader:
    """Reads the output of a request in increments, on the engine's thread."""

    submission: Submission
    _samples: list[_SampleReader] = field(init=False)
    _prompt_read: bool = False

    def __post_init__(self) -> None:
        self._samples = [_SampleReader(sample) for sample in self.submission.samples]

    def read(self) -> RequestUpdate:
        """What is new since the last call."""
        submission = self.submission
        deltas = [delta for sample in self._samples if (delta := sample.read()) is not None]
        prompt_logprobs = None
        if not self._prompt_read and submission.prompt_logprobs is not None:
            prompt_logprobs, self._prompt_read = submission.prompt_logprobs, True
        metrics = submission.metrics.snapshot()
        return RequestUpdate(deltas, submission.finished, metrics, prompt_logprobs)


class UpdateBuffer:
    """Updates of one request that were not read yet. Used on the event loop only.

    Args:
        interval: new tokens of a sample that all updates but the first and the last wait for.

    Attributes:
        abandoned: its reader is gone, so updates are dropped.
        closed: no further update comes.
        accepted: resolved when the engine has accepted the request, or with the error why not.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, num_samples: int, interval: int = 1
    ) -> None:
        self.num_samples = num_samples
        self._interval, self._began = interval, False
        self.abandoned = self.closed = False
        self.accepted: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._update: RequestUpdate | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def accept(self) -> None:
        """The engine has accepted the request."""
        if not self.accepted.done():  # cancelled, if its sender left meanwhile
            self.accepted.set_result(None)

    def put(self, update: RequestUpdate) -> None:
        """Add an update; it is merged with one that was not read yet."""
        if not self.abandoned:
            self._update = update if self._update is None else self._update.then(update)
        if update.finished:
            self.closed = True
        self._wake()

    def close(self, error: Exception | None = None) -> None:
        """No further update comes; the error is raised after the last unread one."""
        self.closed = True
        if self.accepted.done():
            self._error = error
        elif error is None:
            self.accepted.cancel()
        else:
            self.accepted.set_exception(error)
        self._wake()

    async def get(self) -> RequestUpdate | None:
        """Wait for an update; None at the end."""
        while not self._ready():
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        update, self._update, self._began = self._update, None, True
        if update is None and self._error is not None:
            error, self._error = self._error, None
            raise error
        return update

    def _ready(self) -> bool:
        if self.closed or self._update is None:
            return self.closed
        return not self._began or self._interval <= max(
            (len(delta.token_ids) for delta in self._update.deltas), default=0
        )

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done() and self._ready():
            self._waiter.set_result(None)


class UpdateStream:
    """Iterates over the updates of one request, for one reader on the event loop.

    Updates that come while the reader is busy are merged, so a slow reader costs memory for its own
    text only. Leaving early (`aclose`, a cancelled read, dropping the stream) ends the request
    within one step.
    """

    def __init__(self, buffer: UpdateBuffer, abort: Callable[[UpdateBuffer], None]) -> None:
        self._buffer, self._abort = buffer, abort

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestUpdate:
        try:
            update = await self._buffer.get()
        except asyncio.CancelledError:
            self._abandon()
            raise
        if update is None:
            raise StopAsyncIteration
        return update

    async def aclose(self) -> None:
        """End the request, unless it has ended."""
        self._abandon()

    def __del__(self) -> None:
        self._abandon()

    def _abandon(self) -> None:
        buffer = self._buffer
        if not (buffer.closed or buffer.abandoned):
            buffer.abandoned = True
            self._abort(buffer)
