"""Middleware in front of the application; plain ASGI, so that streams are not buffered."""

import asyncio
from collections.abc import Collection, Sequence
from hashlib import sha256
from hmac import compare_digest
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.serve.errors import ApiError, as_api_error, is_messages
from slipstream.serve.limits import DrainingError, ServeLimits

_STILL_OPEN = ("/load", "/metrics", "/version")  # while the server drains


class ApiKeyCheck:
    """Refuses requests without a valid key in `Authorization: Bearer KEY` (401).

    On paths of the Messages protocol, `X-Api-Key: KEY` is accepted, too.

    Args:
        keys: at least one; all are compared, in constant time.
        open_paths: paths that need no key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str]) -> None:
        self._app, self._open_paths = app, frozenset(open_paths)
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._has_key(scope):
            error = ApiError(
                HTTPStatus.UNAUTHORIZED,
                "this server needs an API key; send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response(scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        if scope["path"] in self._open_paths:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
        keys = [key if scheme.lower() == b"bearer" else b""]
        if is_messages(scope["path"]):
            keys += [value for name, value in scope["headers"] if name == b"x-api-key"][:1]
        digests = [sha256(key.strip()).digest() for key in keys]
        return any([compare_digest(it, own) for it in digests for own in self._digests])


class BodyLimits:
    """Receives the whole body of a request before the application runs, and passes it on as one
    message. Refuses bodies that are too large (413) or arrive too slowly (408)."""

    def __init__(self, app: ASGIApp, limits: ServeLimits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None if the client has disconnected."""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if int(declared) > self._limits.max_body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._limits.receive_timeout):
                return await self._receive(receive)
        except TimeoutError:
            raise ApiError(
                HTTPStatus.REQUEST_TIMEOUT,
                "the request's body did not arrive in time",
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


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` callable that returns the body first, and then calls `receive`."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


class DrainGate:
    """Counts the requests in progress; once closed, it refuses new ones (503).

    Requests in progress may finish; /load, /metrics and /version are still answered.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._num_requests = 0
        self.closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def empty(self) -> bool:
        return not self._num_requests

    async def close(self) -> None:
        """Refuse new requests, and wait until none is in progress."""
        self.closed = True
        await self._empty.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _STILL_OPEN:
            await self._app(scope, receive, send)
        elif self.closed:
            await as_api_error(DrainingError()).response(scope["path"])(scope, receive, send)
        else:
            self._num_requests += 1
            self._empty.clear()
            try:
                await self._app(scope, receive, send)
            finally:
                self._num_requests -= 1
                if not self._num_requests:
                    self._empty.set()


class LoadCount:
    """Counts the requests to some paths that are being answered."""

    def __init__(self) -> None:
        self.num_requests = 0

    def middleware(self, app: ASGIApp, paths: Collection[str]) -> ASGIApp:
        async def counting(scope: Scope, receive: Receive, send: Send) -> None:
            counts = scope["type"] == "http" and scope["path"] in paths
            self.num_requests += counts
            try:
                await app(scope, receive, send)
            finally:
                self.num_requests -= counts

        return counting


class RootPath:
    """Removes the path prefix under which a proxy exposes the server, such as /models/a, unless the
    proxy did."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app, self._root_path = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if path == self._root_path or path.startswith(self._root_path + "/"):
                path = path[len(self._root_path) :] or "/"
            # The OpenAPI document lists the root path as its server.
            scope = {**scope, "path": path, "root_path": self._root_path}
        await self._app(scope, receive, send)
