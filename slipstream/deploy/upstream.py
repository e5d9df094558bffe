"""A small HTTP/1.1 client for the front: bytes are passed on as they come."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from time import monotonic
from typing import cast

import httptools

Headers = list[tuple[bytes, bytes]]

_CONNECT_SECONDS = 2.0
_IDLE_SECONDS = 5.0  # less than servers keep connections
_MOST_READ = 1 << 16  # bytes
# Headers of a single connection; every server on the way writes its own `date`.
_HOP = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"expect", b"date")
)


class UpstreamError(Exception):
    """The server cannot be reached, or the connection was lost."""


class UpstreamResponse:
    """One connection, and the answer that is read from it.

    Attributes:
        status, headers: complete when `ask` returns.
        received: whether anything of the answer has come.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._idle_since = 0.0
        self._clear()

    def _clear(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.headers = 0, cast(Headers, [])
        self._parts: list[bytes] = []
        self.received = self._has_head = self._complete = self._bare = False

    # ------------------------------------------------------------------ called by httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header, unless it concerns the connection only."""
        if name.lower() not in _HOP:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status, self._has_head = self._parser.get_status_code(), True
        if self._bare:  # no length that the parser reads would be true
            self._complete = True
            self.close()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self._complete = True

    # ------------------------------------------------------------------ called by the front

    async def ask(self, request: bytes) -> None:
        """Send a request and wait for the answer's head; UpstreamError without a connection."""
        self._clear()
        self._bare = request.startswith(b"HEAD ")
        self._writer.write(request)
        while not self._has_head:
            await self._more()

    async def body(self) -> AsyncIterator[bytes]:
        """The parts of the body, joined if they came together; UpstreamError if it breaks off."""
        while True:
            if self._parts:
                part = b"".join(self._parts)
                self._parts.clear()
                yield part
            elif self._complete:
                return
            else:
                await self._more()

    @property
    def reusable(self) -> bool:
        """Whether the next request can come by this connection."""
        fresh = monotonic() - self._idle_since < _IDLE_SECONDS
        closed = self._writer.is_closing() or self._reader.at_eof()
        return not closed and self._complete and fresh

    def rest(self) -> None:
        """Mark the connection as idle, after its answer was read."""
        self._idle_since = monotonic()

    def close(self) -> None:
        """End the connection, and so the request."""
        self._writer.transport.abort()

    async def _more(self) -> None:
        try:
            data = await self._reader.read(_MOST_READ)
            self.received |= bool(data)
            self._parser.feed_data(data)
        except (OSError, httptools.HttpParserError) as error:
            self.close()
            raise UpstreamError from error
        if not data:
            raise UpstreamError


class Upstream:
    """A server, with a pool of connections."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._idle: deque[UpstreamResponse] = deque(maxlen=64)

    async def ask(
        self, method: str, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> UpstreamResponse:
        """Send a request; returns the answer when its head is complete. Return it with `done`.
        UpstreamError if the server cannot be reached, or closed the connection."""
        request = self._request(method, target, headers, body)
        while self._idle:
            answer = self._idle.pop()
            if not answer.reusable:
                answer.close()
                continue
            try:
                return await self._send(answer, request)
            except UpstreamError:
                if answer.received:
                    raise
                # An idle connection may be closed just when it is used.
        return await self._send(await self._connect(), request)

    def done(self, answer: UpstreamResponse) -> None:
        """Reuse the connection of an answer that was read to its end, or close it."""
        answer.rest()
        if answer.reusable:
            self._idle.append(answer)
        else:
            answer.close()

    def close(self) -> None:
        """Close the connections that are idle."""
        while self._idle:
            self._idle.pop().close()

    async def _send(self, answer: UpstreamResponse, request: bytes) -> UpstreamResponse:
        try:
            await answer.ask(request)
        except BaseException:
            answer.close()
            raise
        return answer

    async def _connect(self) -> UpstreamResponse:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                return UpstreamResponse(*await asyncio.open_connection(self._host, self._port))
        except OSError as error:  # TimeoutError is one
            raise UpstreamError from error

    def _request(
        self, method: str, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> bytes:
        lines = [method.encode("ascii") + b" " + target + b" HTTP/1.1"]
        lines += [
            name + b": " + value
            for name, value in headers
            if name not in _HOP and name != b"content-length"
        ]
        if body or method not in ("GET", "HEAD", "OPTIONS"):
            lines.append(b"content-length: %d" % len(body))
        return b"\r\n".join([*lines, b"", body])
