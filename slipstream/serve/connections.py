"""HTTP connections that cannot be held for nothing: bounds below the ASGI application."""

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from slipstream.serve.errors import ApiError
from slipstream.serve.limits import ServeLimits


class RefusedHeadError(Exception):
    """A request's line and headers are not accepted; ends the parsing."""


class BoundedConnection(HttpToolsProtocol):
    """A connection with limits on its headers, on how long they take, and on unread answers.

    `connection_class` gives it the limits and what the connections of a server share.

    Attributes:
        quiet: connections that owe a whole request, the longest first.
    """

    limits: ServeLimits
    quiet: dict["BoundedConnection", None]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._refusal: ApiError | None = None
        self._head_bytes = 0
        self._in_head = True
        self._patience: asyncio.TimerHandle | None = None  # with a request that is not whole
        self._unread: asyncio.TimerHandle | None = None  # with an answer that is not read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Owe a request."""
        super().connection_made(transport)
        self._owe()
        if len(self.connections) > self.limits.max_connections:
            longest = next(iter(self.quiet))
            longest.refuse(
                HTTPStatus.SERVICE_UNAVAILABLE, "this server has too many open connections"
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._owe_nothing()
        self._cancel_unread()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse; headers are counted as they come, so that endless ones end."""
        if self.transport.is_closing():
            return
        self._head_bytes += len(data) if self._in_head else 0
        super().data_received(data)
        if self._in_head and self._head_bytes > self.limits.max_header_bytes:
            self._refuse_head()
        # Whatever does not lead to a request (empty lines, a body nobody wants) is not kept up.
        if self.cycle is None or self.cycle.response_complete:
            self._owe()

    def on_message_begin(self) -> None:
        """A further request on this connection."""
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        """Start the application; it watches over the body."""
        self._in_head, self._head_bytes = False, 0
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.max_header_bytes:
            self._refusal = self._too_large()
            raise RefusedHeadError
        super().on_headers_complete()
        self._owe_nothing()

    def on_message_complete(self) -> None:
        """The request is whole, also where its answer was given before that."""
        super().on_message_complete()
        self._owe_nothing()
        self._in_head, self._head_bytes = True, 0

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.limits.send_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """It does."""
        super().resume_writing()
        self._cancel_unread()

    def send_400_response(self, msg: str) -> None:
        """What cannot be parsed is refused in the same form as everything else."""
        error, self._refusal = self._refusal, None
        self._answer(error or ApiError(HTTPStatus.BAD_REQUEST, "this is not a request of HTTP/1.1"))

    def refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer and close."""
        self._answer(ApiError(status, message))

    def _too_large(self) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the request's line and headers take more than {self.limits.max_header_bytes} bytes; "
            "send fewer or shorter ones",
        )

    def _refuse_head(self) -> None:
        if not self.transport.is_closing():
            self._answer(self._too_large())

    def _answer(self, error: ApiError) -> None:
        body = error.body()
        self.transport.write(
            STATUS_LINE[error.status]
            + b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
            + str(len(body)).encode()
            + b"\r\n\r\n"
            + body
        )
        self.transport.close()
        self._owe_nothing()

    def _owe(self) -> None:
        if self._patience is None and not self.transport.is_closing():
            self._patience = self.loop.call_later(self.limits.receive_timeout, self._too_slow)
            self.quiet[self] = None

    def _owe_nothing(self) -> None:
        self.quiet.pop(self, None)
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _too_slow(self) -> None:
        self._patience = None
        answered: object = self.cycle  # None before the first request
        if answered is not None:  # something was answered on it: no second answer fits here
            self.quiet.pop(self, None)
            self.transport.close()
            return
        self.refuse(HTTPStatus.REQUEST_TIMEOUT, "the request did not come in time")

    def _cancel_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


def connection_class(own: ServeLimits) -> type[BoundedConnection]:
    """The class of one server's connections."""

    class Connection(BoundedConnection):
        pass

    Connection.limits, Connection.quiet = own, {}
    return Connection
