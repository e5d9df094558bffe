"""The increments of one request on their way from the engine's thread to their reader."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from slipstream.serve.progress import Progress


class Channel:
    """What came for one request and was not read yet. Used on the event loop only.

    Attributes:
        left: its reader is gone, so nobody wants what comes.
        closed: nothing further comes.
        accepted: set when the engine took the request in, or to the error with which it did not.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, num_samples: int) -> None:
        self.num_samples = num_samples
        self.left = self.closed = False
        self.accepted: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._progress: Progress | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def accept(self) -> None:
        """The engine has the request."""
        if not self.accepted.done():  # cancelled, where its sender left meanwhile
            self.accepted.set_result(None)

    def put(self, progress: Progress) -> None:
        """Add an increment; one that was not read yet takes it in."""
        if not self.left:
            self._progress = progress if self._progress is None else self._progress.then(progress)
        if progress.finished:
            self.closed = True
        self._wake()

    def close(self, error: Exception | None = None) -> None:
        """Nothing further comes; the reader meets the error behind what it has not read yet."""
        self.closed = True
        if not self.accepted.done():
            if error is None:
                self.accepted.cancel()
            else:
                self.accepted.set_exception(error)
        else:
            self._error = error
        self._wake()

    async def get(self) -> Progress | None:
        """All that came since the last call, once there is something; None at the end."""
        while self._progress is None and not self.closed:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        progress, self._progress = self._progress, None
        if progress is None and self._error is not None:
            error, self._error = self._error, None
            raise error
        return progress

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Stream:
    """Reads the increments of one request, for one reader on the event loop.

    What came while the reader was busy is handed out as one increment, so a slow reader costs
    memory for its own text only. Leaving early ends the request within one step: by `aclose`,
    `async with`, a cancelled read, or by dropping the stream.
    """

    def __init__(self, channel: Channel, abort: Callable[[Channel], None]) -> None:
        self._channel, self._abort = channel, abort

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Progress:
        try:
            progress = await self._channel.get()
        except asyncio.CancelledError:
            self._leave()
            raise
        if progress is None:
            raise StopAsyncIteration
        return progress

    async def aclose(self) -> None:
        """End the request, unless it has ended."""
        self._leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()

    def __del__(self) -> None:
        self._leave()

    def _leave(self) -> None:
        channel = self._channel
        if not (channel.closed or channel.left):
            channel.left = True
            self._abort(channel)
