"""The thread that owns the engine, and its interface to the event loop.

    event loop                                          engine's thread
    submit, UpdateStream.aclose ── inbox (a deque) ──>  run between two steps
    UpdateStream <── one call_soon_threadsafe a step ── updates of all requests

Neither side blocks on the other. The event loop appends calls to the inbox, and the engine's thread
passes the updates of all requests in a step to the loop with one call. An idle engine sleeps.
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
from functools import partial
from itertools import count
from time import monotonic

from slipstream.core.errors import RanksLostError, UsageError
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.prompts import EncodedPrompt
from slipstream.engine.samples import Submission
from slipstream.serve.limits import (
    DeadlineExceededError,
    DrainingError,
    EngineFailedError,
    QueueFullError,
    RequestFailedError,
    ServeLimits,
    StoppedError,
)
from slipstream.serve.observers import Observer
from slipstream.serve.updates import UpdateBuffer, UpdateReader, UpdateStream

logger = logging.getLogger("slipstream.serve")

_DEADLINE_INTERVAL = 0.02  # seconds between two checks of the deadlines

Delivery = tuple[UpdateBuffer, Callable[[], None]]


@dataclass(slots=True, eq=False)
class _Running:
    """A request that the engine has accepted."""

    request_id: str
    engine_id: str
    deadline: float
    buffer: UpdateBuffer
    reader: UpdateReader
    last_update: float | None = None


class EngineThread:
    """Runs an engine in a thread of its own, and accepts requests from the event loop.

    Args:
        engine: after `start`, only this thread may change its state.
        limits: the length of the waiting queue, the request timeout and the stream interval.
        observers: called on the engine's thread, for metrics and logs.

    Attributes:
        draining: whether new requests are refused because the server is shutting down.
        num_open: number of submitted samples that have not ended.
    """

    def __init__(
        self, engine: Engine, limits: ServeLimits, observers: Sequence[Observer] = ()
    ) -> None:
        self._engine, self.limits, self._observers = engine, limits, tuple(observers)
        self._places = engine.resolved.limits.max_num_seqs
        self._numbers = count()
        # Written by the event loop, read by the engine's thread:
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        # Used by the engine's thread:
        self._running: dict[UpdateBuffer, _Running] = {}
        self._by_engine_id: dict[str, _Running] = {}
        self._outbox: list[Delivery] = []
        self._next_deadline_check = 0.0
        self._num_waiting = 0  # read by the loop
        # Used by the event loop:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: set[UpdateBuffer] = set()
        self._queued_work: set[Future[None]] = set()
        self.num_open = 0
        self._ends: deque[float] = deque(maxlen=64)  # times at which recent requests ended
        self._nothing_open: asyncio.Event | None = None
        self.draining = self._failed = False

    # ------------------------------------------------------------------ on the event loop

    def start(self) -> None:
        """Start the thread; must be called on the event loop that will submit requests."""
        self._loop = asyncio.get_running_loop()
        self._nothing_open = asyncio.Event()
        self._nothing_open.set()
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._failed

    @property
    def num_waiting(self) -> int:
        """Lower bound on the number of samples that wait for a slot."""
        return max(self.num_open - self._places, self._num_waiting, 0)

    async def submit(
        self,
        request_id: str,
        prompts: Sequence[EncodedPrompt],
        params: SamplingParams,
        stream_interval: int | None = None,
    ) -> list[UpdateStream]:
        """Submit one engine request per prompt; returns a stream for each when all are accepted.

        If one is refused, all are aborted. After its last update, a stream may raise
        RequestFailedError, DeadlineExceededError, EngineFailedError or StoppedError.

        Args:
            request_id: for the logs; need not be unique.

        Raises:
            UsageError: a request is invalid, or too large for this server.
            QueueFullError, DrainingError, EngineFailedError: the server cannot take requests now.
        """
        self.check_room(params.n * len(prompts))
        assert self._loop is not None, "start comes first"
        deadline = monotonic() + (self.limits.request_timeout or math.inf)
        interval = max(self.limits.stream_interval, stream_interval or 1)
        buffers = [UpdateBuffer(self._loop, params.n, interval) for _ in prompts]
        streams = [UpdateStream(buffer, self._abandon) for buffer in buffers]
        self._open.update(buffers)
        self.num_open += params.n * len(prompts)
        self._set_open()
        for buffer, prompt in zip(buffers, prompts, strict=True):
            self._inbox.append(partial(self._add, request_id, prompt, params, deadline, buffer))
        self._wake.set()
        try:
            # Wait for all, so that every error is retrieved.
            waits = [buffer.accepted for buffer in buffers]
            for refusal in await asyncio.gather(*waits, return_exceptions=True):
                if refusal is not None:
                    raise refusal
        except BaseException:
            for stream in streams:
                await stream.aclose()
            raise
        return streams

    async def between_steps(self, function: Callable[[], None]) -> None:
        """Call a function on the engine's thread between two steps; re-raises its exceptions, or
        EngineFailedError or StoppedError if the thread ended before."""
        if not self.alive:
            raise EngineFailedError
        done: Future[None] = Future()
        self._queued_work.add(done)
        self._inbox.append(partial(_call_for, done, function))
        self._wake.set()
        try:
            await asyncio.wrap_future(done)
        finally:
            self._queued_work.discard(done)

    async def drain(self) -> None:
        """Refuse new requests, and wait until all submitted ones have ended."""
        self.draining = True
        if self._nothing_open is not None:
            await self._nothing_open.wait()

    async def stop(self) -> None:
        """Abort all requests, and end the thread after its current step."""
        self.draining = self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        await asyncio.sleep(0)  # run the last deliveries of the thread

    def check_room(self, num_samples: int) -> None:
        """Raise the error that `submit` would raise for a request of `num_samples` samples."""
        if self._failed or not self._thread.is_alive():
            raise EngineFailedError
        if self.draining:
            raise DrainingError
        most = self._places + self.limits.max_waiting
        if num_samples > most:
            raise UsageError(
                f"the request asks for {num_samples} samples, but this server takes on at most "
                f"{most} at once ({self._places} run, {self.limits.max_waiting} wait); split it "
                "into several requests, or start the server with a larger --max-waiting"
            )
        # If the KV cache is short of blocks, requests wait although slots are free.
        kept = self._num_waiting
        too_many = kept > 0 and kept + num_samples > self.limits.max_waiting
        if too_many or self.num_open + num_samples > most:
            waiting = self.num_waiting
            raise QueueFullError(waiting, self._retry_after(waiting))

    def _retry_after(self, num_waiting: int) -> int:
        """Estimated seconds until the samples that wait now have been served; from 1 to 60."""
        if len(self._ends) < 2:
            return 1
        rate = (len(self._ends) - 1) / max(monotonic() - self._ends[0], 1e-3)
        return max(1, min(60, math.ceil(num_waiting / rate)))

    def _abandon(self, buffer: UpdateBuffer) -> None:
        """Abort a request whose reader has gone; called on the event loop."""
        self._inbox.append(partial(self._abort, buffer, None))
        self._wake.set()

    def _deliver(self, deliveries: Iterable[Delivery]) -> None:
        for buffer, call in deliveries:
            call()
            if buffer.closed and buffer in self._open:
                self._open.discard(buffer)
                self.num_open -= buffer.num_samples
                self._ends.append(monotonic())
        self._set_open()

    def _set_open(self) -> None:
        assert self._nothing_open is not None
        if self._open:
            self._nothing_open.clear()
        else:
            self._nothing_open.set()

    def _resolve_rest(self) -> None:
        """Fail all that is pending when the thread has ended, so that no caller hangs."""
        error = EngineFailedError if self._failed else StoppedError
        self._failed = True
        self._deliver([(buffer, partial(buffer.close, error())) for buffer in self._open])
        for done in self._queued_work:
            if not done.done():
                done.set_exception(error())

    # ------------------------------------------------------------------ on the engine's thread

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._handle_inbox()
                self._check_deadlines()
                if self._engine.has_unfinished:
                    self._step()
                    self._send()
                else:
                    self._num_waiting = 0
                    self._send()
                    self._wake.wait()
                    self._wake.clear()
            self._handle_inbox()
            self._abort_all(StoppedError())
        except BaseException as error:
            reason = error if isinstance(error, RanksLostError) else "start the server again"
            logger.critical("the engine has failed; %s", reason, exc_info=reason is not error)
            self._failed = True
            with suppress(Exception):  # a failed engine may raise again
                self._abort_all(EngineFailedError())
        self._send()
        self._call_loop(self._resolve_rest)

    def _send(self) -> None:
        if self._outbox:
            deliveries, self._outbox = self._outbox, []
            self._call_loop(self._deliver, deliveries)

    def _call_loop(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed, so there are no readers
            self._stopping = True

    def _handle_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _add(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        deadline: float,
        buffer: UpdateBuffer,
    ) -> None:
        if buffer.abandoned:  # its abort, which comes next, finds no request
            self._outbox.append((buffer, buffer.close))
            return
        engine_id = str(next(self._numbers))
        try:
            submission = self._engine.add(engine_id, prompt, params)
        except UsageError as error:
            self._outbox.append((buffer, partial(buffer.close, error)))
        except Exception as error:
            logger.exception("request %s failed before it ran", request_id)
            self._outbox.append((buffer, partial(buffer.close, _failed(error))))
        else:
            reader = UpdateReader(submission)
            running = _Running(request_id, engine_id, deadline, buffer, reader)
            self._running[buffer] = self._by_engine_id[engine_id] = running
            self._outbox.append((buffer, buffer.accept))
            for observer in self._observers:
                observer.request_added(request_id, submission)

    def _abort(self, buffer: UpdateBuffer, error: Exception | None, reason: str = "abort") -> None:
        """Abort a request if it is still running."""
        running = self._running.get(buffer)
        if running is not None:
            self._engine.abort(running.engine_id)
            self._end(running, reason, partial(buffer.close, error))

    def _abort_all(self, error: Exception) -> None:
        for buffer in [*self._running]:
            self._abort(buffer, error)

    def _check_deadlines(self) -> None:
        now = monotonic()
        if now < self._next_deadline_check:
            return
        self._next_deadline_check = now + _DEADLINE_INTERVAL
        for running in [it for it in self._running.values() if it.deadline <= now]:
            self._abort(running.buffer, DeadlineExceededError(), "timeout")

    def _step(self) -> None:
        changed = self._engine.step()
        self._num_waiting = self._engine.scheduler.num_waiting
        now = monotonic()
        for submission in changed:
            self._update(self._by_engine_id[submission.request_id], submission, now)
        for observer in self._observers:
            observer.step_done(self._engine)

    def _update(self, running: _Running, submission: Submission, now: float) -> None:
        """Queue the new output of one request for delivery, or its error."""
        if submission.error is not None:
            logger.error("request %s failed", running.request_id, exc_info=submission.error)
            failure = _failed(submission.error)
            self._end(running, "error", partial(running.buffer.close, failure))
            return
        update = running.reader.read()
        gap = None if running.last_update is None else now - running.last_update
        running.last_update = now
        for observer in self._observers:
            observer.tokens_added(submission, gap)
        reasons = [delta.finish_reason for delta in update.deltas]
        if "error" in reasons and not update.finished:  # the answer is an error, so drop the others
            self._engine.abort(running.engine_id)
            update.finished = True
        if update.finished:
            reason = "error" if "error" in reasons else reasons[-1] or "stop"
            self._end(running, reason, partial(running.buffer.put, update))
        else:
            self._outbox.append((running.buffer, partial(running.buffer.put, update)))

    def _end(self, running: _Running, reason: str, delivery: Callable[[], None]) -> None:
        del self._running[running.buffer], self._by_engine_id[running.engine_id]
        for observer in self._observers:
            observer.request_ended(running.request_id, running.reader.submission, reason)
        self._outbox.append((running.buffer, delivery))


def _call_for(done: "Future[None]", function: Callable[[], None]) -> None:
    """Call a function and set its outcome in `done`, unless `done` was cancelled."""
    if not done.set_running_or_notify_cancel():
        return
    try:
        function()
    except Exception as error:
        done.set_exception(error)
    else:
        done.set_result(None)


def _failed(cause: Exception) -> RequestFailedError:
    error = RequestFailedError()
    error.__cause__ = cause
    return error
