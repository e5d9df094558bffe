"""Server-sent events, and cancellation of work when the client disconnects."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipstream.serve.errors import ApiError, as_api_error
from slipstream.serve.logs import SEND_BODY

logger = logging.getLogger("slipstream.serve")

DONE = b"data: [DONE]\n\n"

Result = TypeVar("Result")


class ClientDisconnectedError(Exception):
    """The client closed the connection before the response was complete."""


class ChunkWriter:
    """Encodes the chunks of one streamed answer as events; common fields are encoded only once.

    Args:
        common: fields that every chunk has, such as `id` and `model`.
        with_usage: whether chunks have the field `usage`, which may be null.
    """

    def __init__(self, common: Mapping[str, Any], with_usage: bool) -> None:
        self._start = b"data: " + to_json(common)[:-1] + b',"choices":'
        self._with_usage = with_usage

    def chunk(
        self,
        choices: Sequence[Mapping[str, Any]],
        usage: Any = None,
        more: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Encode one chunk as an event, with the further fields `more`."""
        end = b"}\n\n"
        if more:
            end = b"," + to_json(more)[1:-1] + end
        if self._with_usage:
            end = b',"usage":' + to_json(usage, exclude_none=True, inf_nan_mode="null") + end
        return self._start + to_json(choices, inf_nan_mode="null") + end


def stream_error(error: Exception) -> ApiError:
    """The API error for a stream that fails after its status was sent; logs internal errors."""
    api_error = as_api_error(error)
    if api_error.code == "internal_error":
        logger.error("a stream failed", exc_info=error)
    return api_error


def error_event(error: Exception) -> bytes:
    """The events that end a failed stream: the error, then [DONE]."""
    return b"data: " + stream_error(error).body() + b"\n\n" + DONE


class EventStream(Response):
    """Streams events to the client, and closes their generator when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_all() -> None:
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
            await cancel_on_disconnect(receive, send_all())
        except (ClientDisconnectedError, OSError):
            return


async def cancel_on_disconnect(receive: Receive, work: Awaitable[Result]) -> Result:
    """Await the work; cancel it, and raise ClientDisconnectedError, if the client disconnects."""
    working = asyncio.ensure_future(work)
    disconnecting = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnectedError
        return working.result()
    finally:
        for task in (working, disconnecting):
            task.cancel()
        await asyncio.gather(working, disconnecting, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
