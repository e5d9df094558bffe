"""Server-sent events, and answers that end when their reader leaves."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipstream.serve.errors import as_api_error
from slipstream.serve.logs import SEND_BODY

logger = logging.getLogger("slipstream.serve")

DONE = b"data: [DONE]\n\n"

Answer = TypeVar("Answer")


class ClientGoneError(Exception):
    """The client closed the connection before its answer was there."""


class Frames:
    """Writes the chunks of one streamed answer; what is common to them is written once.

    Args:
        head: the fields before `choices`.
        with_usage: every chunk has a field `usage`.
    """

    def __init__(self, head: Mapping[str, Any], with_usage: bool) -> None:
        self._head = b"data: " + to_json(head)[:-1] + b',"choices":'
        self._with_usage = with_usage

    def chunk(self, choices: Sequence[Mapping[str, Any]], usage: Any = None) -> bytes:
        """One event."""
        end = b"}\n\n"
        if self._with_usage:
            end = b',"usage":' + to_json(usage, exclude_none=True, inf_nan_mode="null") + end
        return self._head + to_json(choices, inf_nan_mode="null") + end


def failure_frame(error: Exception) -> bytes:
    """An error behind what was sent already."""
    told = as_api_error(error)
    if told.code == "internal_error":
        logger.error("a stream failed", exc_info=error)
    return b"data: " + told.body() + b"\n\n" + DONE


class EventStream(Response):
    """Sends events as they come; when the client leaves, the generator is closed."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request."""

        async def pump() -> None:
            async with aclosing(self._events) as events:
                await send(
                    {
                        "type": "http.response.start",
                        "status": self.status_code,
                        "headers": self.raw_headers,
                    }
                )
                send_body = scope.get(SEND_BODY, send)
                async for event in events:
                    await send_body(
                        {"type": "http.response.body", "body": event, "more_body": True}
                    )
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await unless_gone(receive, pump())
        except (ClientGoneError, OSError):
            return


async def unless_gone(receive: Receive, work: Awaitable[Answer]) -> Answer:
    """The result of the work, which is cancelled when the client leaves.

    Raises:
        ClientGoneError: it left.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
