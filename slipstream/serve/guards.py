"""What stands before the application: plain ASGI, so that streams pass through untouched."""

import asyncio
from collections.abc import Collection, Sequence
from hashlib import sha256
from hmac import compare_digest
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.serve.errors import ApiError, as_api_error
from slipstream.serve.limits import Draining, ServeLimits


class ApiKeys:
    """Lets in whoever knows one of the keys, as `Authorization: Bearer KEY`.

    Args:
        keys: at least one; every one is compared, in the same time whatever was sent.
        open_paths: what needs no key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str]) -> None:
        self._app, self._open_paths = app, frozenset(open_paths)
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "http" and not self._may_enter(scope):
            error = ApiError(
                HTTPStatus.UNAUTHORIZED,
                "this server needs an API key; send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _may_enter(self, scope: Scope) -> bool:
        if scope["path"] in self._open_paths:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
        digest = sha256(key.strip()).digest()
        known = [compare_digest(digest, own) for own in self._digests]
        return scheme.lower() == b"bearer" and any(known)


class Bodies:
    """Reads a request's body before the application does: whole, small enough and in time. What
    follows sees it as one message."""

    def __init__(self, app: ASGIApp, limits: ServeLimits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 408 or 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replayed(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None when the client left."""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if int(declared) > self._limits.max_body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._limits.receive_timeout):
                return await self._receive(receive)
        except TimeoutError:
            raise ApiError(
                HTTPStatus.REQUEST_TIMEOUT,
                "the request's body did not come in time",
                headers={"Connection": "close"},
            ) from None

    async def _receive(self, receive: Receive) -> bytes | None:
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            more, size = message.get("more_body", False), size + len(part)
            if size > self._limits.max_body_bytes:
                raise self._too_large()
            parts.append(part)
        return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the request's body has more than {self._limits.max_body_bytes} bytes; send less, or "
            "start the server with a larger --max-body-bytes",
        )


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Gives the body once, and then what comes behind it."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


class Door:
    """Counts the requests inside, and lets no more in once it is closed.

    Requests that are inside when it closes are answered to their end; /metrics and /version can
    still be read.
    """

    def __init__(
        self, app: ASGIApp, still_open: Collection[str] = ("/metrics", "/version")
    ) -> None:
        self._app, self._still_open = app, frozenset(still_open)
        self._inside = 0
        self._closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def closed(self) -> bool:
        """Whether new requests are answered with 503."""
        return self._closed

    @property
    def empty(self) -> bool:
        """Whether no request is inside."""
        return not self._inside

    async def close(self) -> None:
        """Answer new requests with 503; returns when nobody is inside any more."""
        self._closed = True
        await self._empty.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 503."""
        if scope["type"] != "http" or scope["path"] in self._still_open:
            await self._app(scope, receive, send)
        elif self._closed:
            await as_api_error(Draining()).response()(scope, receive, send)
        else:
            await self._pass(scope, receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._inside += 1
        self._empty.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()
