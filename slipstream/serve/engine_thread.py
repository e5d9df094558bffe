"""The one thread that owns the engine, and the way to it from the event loop.

    event loop                                    engine's thread
    submit, Stream.aclose ── inbox (a deque) ──>  taken in between two steps
    Stream <── one call_soon_threadsafe a step ── what every request gained

Neither side waits for the other: the loop appends to the inbox and goes on, and the engine leaves
a step's results for all requests in one call. An idle engine sleeps.
"""

import asyncio
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from time import monotonic

from slipstream.core.errors import UsageError
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.prompts import EncodedPrompt
from slipstream.engine.samples import Submission
from slipstream.serve.letters import Add, Letter, News, Note, Work
from slipstream.serve.limits import (
    DeadlineExceeded,
    Draining,
    EngineFailed,
    QueueFull,
    RequestFailed,
    ServeLimits,
    Stopped,
)
from slipstream.serve.progress import Cursor, Progress
from slipstream.serve.stream import Channel, Stream
from slipstream.serve.watcher import Watcher

logger = logging.getLogger("slipstream.serve")

_DEADLINE_INTERVAL = 0.02  # seconds between two looks at the deadlines


@dataclass(slots=True, eq=False)
class _Live:
    """A request that the engine has."""

    request_id: str
    engine_id: str
    deadline: float
    channel: Channel
    cursor: Cursor
    last_gain: float | None = None


class EngineThread:
    """Runs an engine beside the event loop.

    Args:
        engine: nobody else may use it from `start` on.
        limits: how many may wait, and for how long.
        watcher: for metrics and logs.
    """

    def __init__(self, engine: Engine, limits: ServeLimits, watcher: Watcher) -> None:
        self._engine, self.limits, self._watcher = engine, limits, watcher
        self._places = engine.resolved.limits.max_num_seqs
        self._numbers = count()
        # For the engine's thread:
        self._inbox: deque[Letter] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        # Of the engine's thread:
        self._lives: dict[Channel, _Live] = {}
        self._by_engine_id: dict[str, _Live] = {}
        self._outbox: list[tuple[Channel, News]] = []
        self._next_deadline_check = 0.0
        self._num_waiting = 0  # read by the loop
        # Of the event loop:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: set[Channel] = set()
        self._queued_work: set[Work] = set()
        self._open_samples = 0
        self._ends: deque[float] = deque(maxlen=64)  # when the last requests ended
        self._nothing_open: asyncio.Event | None = None
        self._draining = self._failed = False

    # ------------------------------------------------------------------ on the event loop

    def start(self) -> None:
        """Begin; on the event loop that is to be served."""
        self._loop = asyncio.get_running_loop()
        self._nothing_open = asyncio.Event()
        self._nothing_open.set()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests can be run."""
        return self._thread.is_alive() and not self._failed

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the server is to stop."""
        return self._draining

    @property
    def num_open(self) -> int:
        """Samples that were taken on and have not ended."""
        return self._open_samples

    @property
    def num_waiting(self) -> int:
        """Samples that wait for a place, at least."""
        return max(self._open_samples - self._places, self._num_waiting, 0)

    async def submit(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        deadline: float | None = None,
    ) -> Stream:
        """Hand a request to the engine; returns once the engine has it, or has refused it.

        Reading the stream may raise RequestFailed, DeadlineExceeded or EngineFailed behind what
        there was of the request.

        Args:
            request_id: for the logs; need not be unique.
            deadline: on `time.monotonic()`'s clock; None is `request_timeout` from now.

        Raises:
            UsageError: it can never be served as it is.
            QueueFull, Draining, EngineFailed: it cannot be served now.
        """
        return (await self.submit_all(request_id, [prompt], params, deadline))[0]

    async def submit_all(
        self,
        request_id: str,
        prompts: Sequence[EncodedPrompt],
        params: SamplingParams,
        deadline: float | None = None,
    ) -> list[Stream]:
        """Like `submit` for several prompts, which enter the same step, all of them or none."""
        self.check_room(params.n * len(prompts))
        assert self._loop is not None, "start comes first"
        if deadline is None:
            deadline = monotonic() + (self.limits.request_timeout or math.inf)
        channels = [Channel(self._loop, params.n) for _ in prompts]
        streams = [Stream(channel, self._leave) for channel in channels]
        self._open.update(channels)
        self._open_samples += params.n * len(prompts)
        self._set_open()
        for channel, prompt in zip(channels, prompts, strict=True):
            self._inbox.append(Add(request_id, prompt, params, deadline, channel))
        self._wake.set()
        try:
            # All are waited for, so that no refusal is left unread.
            waits = [channel.accepted for channel in channels]
            for refusal in await asyncio.gather(*waits, return_exceptions=True):
                if refusal is not None:
                    raise refusal
        except BaseException:
            for stream in streams:
                await stream.aclose()
            raise
        return streams

    async def between_steps(self, function: Callable[[], None]) -> None:
        """Have the engine's thread do something, which may raise, before its next step.

        Raises:
            EngineFailed, Stopped: the thread ended before it came to it.
        """
        if not self.alive:
            raise EngineFailed
        work = Work(function, Future())
        self._queued_work.add(work)
        self._inbox.append(work)
        self._wake.set()
        try:
            await asyncio.wrap_future(work.done)
        finally:
            self._queued_work.discard(work)

    async def drain(self) -> None:
        """Refuse what is new from now on; returns when nothing runs any more."""
        self._draining = True
        if self._nothing_open is not None:
            await self._nothing_open.wait()

    async def stop(self) -> None:
        """End at once what runs, and the thread behind its current step."""
        self._draining = self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        await asyncio.sleep(0)  # what the thread left last is delivered

    def check_room(self, num_samples: int) -> None:
        """Raise what `submit` would for a request of so many samples, before work goes into it."""
        if self._failed or not self._thread.is_alive():
            raise EngineFailed
        if self._draining:
            raise Draining
        most = self._places + self.limits.max_waiting
        if num_samples > most:
            raise UsageError(
                f"the request asks for {num_samples} samples, but this server takes on at most "
                f"{most} at once; ask for fewer (n for each prompt)"
            )
        # Blocks may run out before places do: then fewer run than there are places.
        kept = self._num_waiting
        too_many = kept > 0 and kept + num_samples > self.limits.max_waiting
        if too_many or self._open_samples + num_samples > most:
            waiting = self.num_waiting
            raise QueueFull(waiting, self._retry_after(waiting))

    def _retry_after(self, num_waiting: int) -> int:
        """Seconds in which those who wait are likely to be served, at the present rate."""
        if len(self._ends) < 2:
            return 1
        rate = (len(self._ends) - 1) / max(monotonic() - self._ends[0], 1e-3)
        return max(1, min(60, math.ceil(num_waiting / rate)))

    def _leave(self, channel: Channel) -> None:
        """Its reader left."""
        self._inbox.append(channel)
        self._wake.set()

    def _deliver(self, batch: Iterable[tuple[Channel, News]]) -> None:
        """What the engine's thread left."""
        for channel, news in batch:
            if isinstance(news, Progress):
                channel.put(news)
            elif news is Note.ACCEPTED:
                channel.accept()
            else:
                channel.close(news if isinstance(news, Exception) else None)
            if channel.closed and channel in self._open:
                self._open.discard(channel)
                self._open_samples -= channel.num_samples
                self._ends.append(monotonic())
        self._set_open()

    def _set_open(self) -> None:
        assert self._nothing_open is not None
        if self._open:
            self._nothing_open.clear()
        else:
            self._nothing_open.set()

    def _resolve_rest(self) -> None:
        """The thread has ended: whatever it did not come to would be waited for without end."""
        kind = EngineFailed if self._failed else Stopped
        self._failed = True
        self._deliver([(channel, kind()) for channel in self._open])
        for work in self._queued_work:
            if not work.done.done():
                work.done.set_exception(kind())

    # ------------------------------------------------------------------ on the engine's thread

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._take_in()
                self._check_deadlines()
                if self._engine.has_unfinished:
                    self._step()
                    self._send()
                else:
                    self._num_waiting = 0
                    self._send()
                    self._wake.wait()
                    self._wake.clear()
            self._take_in()
            self._abort_all(Stopped())
        except BaseException:
            logger.critical("the engine has failed; start the server again", exc_info=True)
            self._failed = True
            with suppress(Exception):  # as far as it still goes
                self._abort_all(EngineFailed())
        self._send()
        self._call(self._resolve_rest)

    def _send(self) -> None:
        if self._outbox:
            batch, self._outbox = self._outbox, []
            self._call(self._deliver, batch)

    def _call(self, function: object, *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)  # type: ignore[arg-type]
        except RuntimeError:  # the loop is closed, so nobody reads
            self._stopping = True

    def _take_in(self) -> None:
        while self._inbox:
            letter = self._inbox.popleft()
            if isinstance(letter, Channel):
                self._abort(letter)
            elif isinstance(letter, Work):
                letter.do()
            else:
                self._add(letter)

    def _add(self, add: Add) -> None:
        if add.channel.left:  # and its abort, which follows, finds nothing
            self._outbox.append((add.channel, Note.GONE))
            return
        engine_id = str(next(self._numbers))
        try:
            submission = self._engine.add(engine_id, add.prompt, add.params)
        except UsageError as error:
            self._outbox.append((add.channel, error))
        except Exception as error:
            logger.exception("request %s failed before it ran", add.request_id)
            self._outbox.append((add.channel, _failed(error)))
        else:
            live = _Live(add.request_id, engine_id, add.deadline, add.channel, Cursor(submission))
            self._lives[add.channel] = self._by_engine_id[engine_id] = live
            self._outbox.append((add.channel, Note.ACCEPTED))

    def _abort(self, channel: Channel, news: News = Note.GONE) -> None:
        """Its reader left; where the request has ended already there is nothing to do."""
        live = self._lives.get(channel)
        if live is not None:
            self._engine.abort(live.engine_id)
            self._end(live, "abort", news)

    def _abort_all(self, error: Exception) -> None:
        for live in [*self._lives.values()]:
            self._abort(live.channel, error)

    def _check_deadlines(self) -> None:
        now = monotonic()
        if now < self._next_deadline_check:
            return
        self._next_deadline_check = now + _DEADLINE_INTERVAL
        for live in [live for live in self._lives.values() if live.deadline <= now]:
            self._engine.abort(live.engine_id)
            self._end(live, "timeout", DeadlineExceeded())

    def _step(self) -> None:
        changed = self._engine.step()
        self._num_waiting = self._engine.scheduler.num_waiting
        now = monotonic()
        for submission in changed:
            self._pass_on(self._by_engine_id[submission.request_id], submission, now)
        self._watcher.stepped(self._engine)

    def _pass_on(self, live: _Live, submission: Submission, now: float) -> None:
        """What a step gave one request."""
        if submission.error is not None:
            logger.error("request %s failed", live.request_id, exc_info=submission.error)
            self._end(live, "error", _failed(submission.error))
            return
        before = live.cursor.num_tokens
        progress = live.cursor.advance()
        gained = live.cursor.num_tokens - before
        gap = None if live.last_gain is None else now - live.last_gain
        live.last_gain = now
        self._watcher.gained(submission, gained, gap)
        reasons = [delta.finish_reason for delta in progress.deltas]
        if "error" in reasons:  # of one sample: nobody reads the others
            if not progress.finished:
                self._engine.abort(live.engine_id)
                progress.finished = True
            self._end(live, "error", progress)
        elif progress.finished:
            self._end(live, reasons[-1] or "stop", progress)
        else:
            self._outbox.append((live.channel, progress))

    def _end(self, live: _Live, reason: str, news: News) -> None:
        del self._lives[live.channel], self._by_engine_id[live.engine_id]
        self._watcher.ended(live.request_id, live.cursor.submission, reason)
        self._outbox.append((live.channel, news))


def _failed(cause: Exception) -> RequestFailed:
    error = RequestFailed()
    error.__cause__ = cause
    return error
