"""Incremental updates of a request: made on the engine's thread, read on the event loop.

An update holds only new output, so the cost of streaming is linear in the output's length.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Self

from slipstream.core.outputs import Logprob, RequestMetrics, TokenOrigin
from slipstream.engine.samples import Sample, Submission

Candidates = Mapping[int, Logprob]


# Not frozen: one is created per request and step, and frozen ones take three times as long.
@dataclass(slots=True)
class Delta:
    """New output of one sample.

    Attributes:
        index: index of the sample in its request.
        text: new text. May be empty although there are new tokens, if they end within a character
            or may begin a stop string; a later delta may then have text without tokens.
        token_ids: new tokens.
        logprobs: for each new token, its candidates by token id; None if not requested.
        origins: for each new token, its `TokenOrigin` (accepted, bonus, recovered or plain).
        finish_reason, stop_reason: as in `CompletionOutput`; None before the last delta.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[Candidates] | None
    origins: Sequence[TokenOrigin]
    finish_reason: str | None
    stop_reason: str | int | None


def join_deltas(deltas: Sequence[Delta]) -> Delta:
    """Join successive deltas (at least one) of the same sample."""
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
        deltas: at most one per sample.
        finished: whether this is the last update.
        metrics: a snapshot of the request's counts and times.
        prompt_logprobs: as in `RequestOutput`; set in one update only, and if requested.
    """

    deltas: Sequence[Delta]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: Sequence[Candidates | None] | None = None

    def then(self, later: "RequestUpdate") -> "RequestUpdate":
        """Merge this update with the one that follows it."""
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
    """Reads the output of one sample in increments."""

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
        """The new output since the last call; without deltas if there is none."""
        submission = self.submission
        deltas = [delta for sample in self._samples if (delta := sample.read()) is not None]
        prompt_logprobs = None
        if not self._prompt_read and submission.prompt_logprobs is not None:
            prompt_logprobs, self._prompt_read = submission.prompt_logprobs, True
        metrics = submission.metrics.snapshot()
        return RequestUpdate(deltas, submission.finished, metrics, prompt_logprobs)


class UpdateBuffer:
    """Buffers the unread updates of one request. Used on the event loop only.

    Args:
        interval: an update is held back until a sample has this number of new tokens; the first
            and the last update are not held back.

    Attributes:
        abandoned: the reader has gone, so updates are dropped.
        closed: there will be no further update.
        accepted: done when the engine has accepted the request; has the error if it was refused.
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
        if not self.accepted.done():  # it is cancelled if the client disconnected
            self.accepted.set_result(None)

    def put(self, update: RequestUpdate) -> None:
        """Add an update; it is merged with the unread one, if any."""
        if not self.abandoned:
            self._update = update if self._update is None else self._update.then(update)
        if update.finished:
            self.closed = True
        self._wake()

    def close(self, error: Exception | None = None) -> None:
        """End the updates; `error` is raised to the reader after the last unread update."""
        self.closed = True
        if self.accepted.done():
            self._error = error
        elif error is None:
            self.accepted.cancel()
        else:
            self.accepted.set_exception(error)
        self._wake()

    async def get(self) -> RequestUpdate | None:
        """Wait for the next update; None at the end. Raises the error that `close` was given."""
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

    Updates that arrive while the reader is busy are merged, so a slow reader only needs memory for
    its own output. If the reader stops early (calls `aclose`, is cancelled while it reads, or drops
    the stream), the request is aborted within one step.
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
        """Abort the request if it is still running."""
        self._abandon()

    def __del__(self) -> None:
        self._abandon()

    def _abandon(self) -> None:
        buffer = self._buffer
        if not (buffer.closed or buffer.abandoned):
            buffer.abandoned = True
            self._abort(buffer)
