"""The application that clients talk to: it passes each request to a replica, and the answer back.

Replicas come and go while requests run. One that is refused, because its replica is about to stop,
goes to another; one whose replica dies before anything of the answer was sent on is sent to another
once; after that the client is told, in the form of its protocol.
"""

import asyncio
import json
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from time import monotonic

from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.deploy.metrics import Counts, merged
from slipstream.deploy.prompts import Prompt, read_prompt
from slipstream.deploy.routing import Replica, ReplicaRouting
from slipstream.deploy.upstream import Headers, Upstream, UpstreamError, UpstreamResponse
from slipstream.serve.errors import MESSAGES_PATH, as_api_error, is_messages
from slipstream.serve.limits import RequestError, StoppedError
from slipstream.serve.logs import current_request_id
from slipstream.serve.sse import ClientDisconnectedError, cancel_on_disconnect, error_event

logger = logging.getLogger("slipstream.serve")

_TO_ALL = ("/reset_prefix_cache", "/start_profile", "/stop_profile")
_OF_SERVE = "/-/"  # paths that Ray Serve's own proxy answers
_REFUSED = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS)
_PAUSE_SECONDS = 0.5  # before replicas that refused are asked again
_SUSPECT_SECONDS = 3.0  # without requests to a replica that did not answer
_ID = b"x-request-id"
_NUMBER = re.compile(rb'"sequence_number":(\d+)')
_GATHERING_SECONDS = 10.0


class NoReplicaError(RequestError):
    status, code = HTTPStatus.SERVICE_UNAVAILABLE, "unavailable"
    message = "no replica is ready; try again in a while"


class ReplicaLostError(RequestError):
    status, code = HTTPStatus.SERVICE_UNAVAILABLE, "replica_lost"
    message = "the replica that was answering has died; send the request again"


class NotAllDoneError(RequestError):
    """Some replicas failed a request that was sent to all of them."""

    status, code = HTTPStatus.BAD_GATEWAY, "partly_done"


@dataclass
class _Request:
    """A request with its whole body.

    Attributes:
        begun: something of the answer was sent on.
        last: the last part of a stream that was sent on.
    """

    path: str
    method: str
    target: bytes
    headers: Headers
    body: bytes
    prompt: Prompt
    send: Send
    begun: bool = False
    last: bytes = b""

    @property
    def generates(self) -> bool:
        """Whether the request waits for a replica, if there is none."""
        return self.method == "POST" and self.path != "/ping"


class Front:
    """Passes requests on.

    Args:
        app: answers the paths of Ray Serve's proxy; None where there is no such proxy.
        routing: a method of `ReplicaRouting`.
        wait_timeout: seconds that a request waits while no replica can take it.
    """

    def __init__(
        self, app: ASGIApp | None = None, routing: str = "prefix", wait_timeout: float = 60.0
    ) -> None:
        self._app, self._wait_timeout = app, wait_timeout
        self.routing, self.counts = ReplicaRouting(routing), Counts()
        self._upstreams: dict[str, Upstream] = {}
        self._suspects: dict[str, float] = {}  # until when
        self._changed = asyncio.Event()
        self._open: set[UpstreamResponse] = set()
        self._stopped = False

    @property
    def num_open(self) -> int:
        return len(self._open)

    def stop(self) -> None:
        """Abort all answers; clients get an error."""
        self._stopped = True
        for answer in [*self._open]:
            answer.close()
        self._changed.set()

    def update(self, replicas: Iterable[Replica]) -> None:
        """Replace the list of running replicas; called on the event loop."""
        self.routing.update(replicas)
        running = {it.id: it for it in self.routing.replicas}
        for name in self._upstreams.keys() - running.keys():
            self._upstreams.pop(name).close()
        for name in running.keys() - self._upstreams.keys():
            self._upstreams[name] = Upstream(running[name].host, running[name].port)
        self._suspects = {name: it for name, it in self._suspects.items() if name in running}
        self._changed.set()
        self._changed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_OF_SERVE):
            if self._app is not None:
                await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        body = (await receive())["body"]  # whole, by `BodyLimits`
        query = scope.get("query_string", b"")
        target = scope.get("raw_path") or path.encode()
        method, work = scope["method"], self._forward
        if path in ("/metrics", "/load", *_TO_ALL):
            # The HTTP server drops the body of a HEAD, which is combined as a GET's.
            method, work = "GET" if method == "HEAD" else method, self._ask_all
        request = _Request(
            path=path,
            method=method,
            target=target + (b"?" + query if query else b""),
            headers=_with_id(scope["headers"]),
            body=body,
            prompt=read_prompt(path, body),
            send=send,
        )
        try:
            await cancel_on_disconnect(receive, work(request))
        except ClientDisconnectedError:
            return
        except RequestError as error:
            await self._report_error(request, error, scope, receive)

    # ------------------------------------------------------------------ one replica

    async def _forward(self, request: _Request) -> None:
        """Pass the request to a replica; NoReplicaError or ReplicaLostError if none answers it."""
        # Requests for the server's state are not delayed.
        deadline = monotonic() + (self._wait_timeout if request.generates else 0)
        without: set[str] = set()
        dead = 0
        while True:
            now = monotonic()
            suspects = {name for name, until in self._suspects.items() if until > now}
            replica = self.routing.choose(request.prompt, without | suspects)
            if replica is None:
                await self._wait(deadline, without)
                continue
            without.add(replica.id)
            try:
                is_last = all(it.id in without for it in self.routing.replicas)
                if await self._send(replica, request, is_last):
                    return
                self.counts.refused += 1
            except UpstreamError:
                self._suspects[replica.id] = monotonic() + _SUSPECT_SECONDS
                dead += 1
                if self._stopped:  # by this end, not by the replica's
                    raise StoppedError from None
                if request.begun or dead > 1:
                    self.counts.lost += 1
                    raise ReplicaLostError from None
                self.counts.retried += 1

    async def _wait(self, deadline: float, without: set[str]) -> None:
        """Wait for a change of the replicas; NoReplicaError at the deadline."""
        left = deadline - monotonic()
        if left <= 0 or self._stopped:
            raise NoReplicaError
        try:
            async with asyncio.timeout(min(left, _PAUSE_SECONDS)):
                await self._changed.wait()
        except TimeoutError:
            without.clear()  # what refused may have room by now

    async def _send(self, replica: Replica, request: _Request, is_last: bool) -> bool:
        """Pass the request on, and the answer back; whether the replica took it.

        Args:
            is_last: no other replica is left to ask.

        Raises:
            UpstreamError: it died.
        """
        upstream, prompt = self._upstreams[replica.id], request.prompt
        self.routing.begin(replica, prompt)
        self.counts.sent[replica.id] += 1
        answer: UpstreamResponse | None = None
        try:
            answer = await upstream.ask(
                request.method, request.target, request.headers, request.body
            )
            self._open.add(answer)
            full = answer.status == HTTPStatus.TOO_MANY_REQUESTS and is_last
            if answer.status in _REFUSED and not full:
                return False
            await _pass_on(answer, request)
        except BaseException:
            if answer is not None:
                answer.close()
            raise
        finally:
            self.routing.end(replica)
            if answer is not None:
                self._open.discard(answer)
                upstream.done(answer)
        return True

    async def _report_error(
        self, request: _Request, error: RequestError, scope: Scope, receive: Receive
    ) -> None:
        """Send the client an error, as a response or at the end of its stream."""
        logger.warning("%s %s: %s", request.method, request.path, error)
        if not request.begun:
            response = as_api_error(error).response(request.path)
            await response(scope, receive, request.send)
            return
        event = lost_event(request.path, error, request.last)
        await request.send({"type": "http.response.body", "body": event, "more_body": False})

    # ------------------------------------------------------------------ all replicas

    async def _ask_all(self, request: _Request) -> None:
        """Send the request to every replica, and combine the answers; NotAllDoneError if some
        replicas failed or refused it."""
        asked = [self._page(it, request) for it in self.routing.replicas]
        results = await asyncio.gather(*asked)
        answers = [it for it in results if it[1]]
        refused = [it for it in answers if it[1] >= HTTPStatus.BAD_REQUEST]
        alike = len({(status, page) for _, status, _, page in results}) == 1
        if request.path in _TO_ALL and answers and not alike:
            _require_done([(name, status, page) for name, status, _, page in results])
        if refused:
            _, status, headers, page = refused[0]
            await _respond(request.send, status, headers, page)
            return
        pages = {name: page for name, _, _, page in answers}
        if not pages and request.path != "/metrics":
            raise NoReplicaError
        first = next(iter(pages.values()), b"")
        kind, whole = "application/json", first
        if request.path == "/metrics":
            kind = "text/plain; version=0.0.4; charset=utf-8"
            text = merged({name: page.decode() for name, page in pages.items()})
            whole = (text + self.counts.page()).encode()
        elif request.path == "/load":
            total = sum(json.loads(page)["server_load"] for page in pages.values())
            whole = json.dumps({"server_load": total}).encode()
        elif not alike:  # such as the traces of a profile
            each = {name: json.loads(page) for name, page in pages.items()}
            whole = json.dumps({**json.loads(first), "replicas": each}).encode()
        await _respond(request.send, HTTPStatus.OK, [(b"content-type", kind.encode())], whole)

    async def _page(self, replica: Replica, request: _Request) -> tuple[str, int, Headers, bytes]:
        """A replica's whole answer; status 0 if there was none."""
        upstream = self._upstreams[replica.id]
        try:
            async with asyncio.timeout(_GATHERING_SECONDS):
                answer = await upstream.ask(
                    request.method, request.target, request.headers, request.body
                )
                page = b"".join([part async for part in answer.body()])
        except (UpstreamError, TimeoutError):
            return replica.id, 0, [], b""
        upstream.done(answer)
        return replica.id, answer.status, answer.headers, page


def _require_done(results: Sequence[tuple[str, int, bytes]]) -> None:
    """Raise NotAllDoneError with every replica's result unless all replicas succeeded.

    Args:
        results: per replica its name, the HTTP status (0 if there was no answer) and the body.
    """
    done = [name for name, status, _ in results if 0 < status < HTTPStatus.BAD_REQUEST]
    if len(done) == len(results):
        return
    answers = (
        f"{name} did it" if name in done
        else f"{name} answered {status}: {page.decode(errors='replace')}" if status
        else f"{name} did not answer"
        for name, status, page in results
    )  # fmt: skip
    raise NotAllDoneError(
        f"{len(done)} of {len(results)} replicas did what was asked; " + "; ".join(answers)
    )


async def _pass_on(answer: UpstreamResponse, request: _Request) -> None:
    """Pass an answer to the client: a stream event by event, others when they are complete."""
    kinds = [value for name, value in answer.headers if name.lower() == b"content-type"]
    if not kinds or not kinds[0].startswith(b"text/event-stream"):
        whole = b"".join([part async for part in answer.body()])
        request.begun = True
        await _respond(request.send, answer.status, answer.headers, whole)
        return
    tail = b""
    async for part in answer.body():
        # Only whole events are passed on, so that an error event may follow at any time.
        end = part.rfind(b"\n\n") + 2
        if end < 2:
            tail += part
            continue
        event, tail = tail + part[:end], part[end:]
        if not request.begun:
            request.begun = True
            start = {"status": answer.status, "headers": _own_headers(answer.headers)}
            await request.send({"type": "http.response.start", **start})
        request.last = event
        await request.send({"type": "http.response.body", "body": event, "more_body": True})
    if not request.begun:
        await _respond(request.send, answer.status, answer.headers, tail)
        return
    await request.send({"type": "http.response.body", "body": tail, "more_body": False})


async def _respond(send: Send, status: int, headers: Headers, body: bytes) -> None:
    kept = [it for it in _own_headers(headers) if it[0].lower() != b"content-length"]
    kept.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": kept})
    await send({"type": "http.response.body", "body": body})


def lost_event(path: str, error: Exception, last: bytes) -> bytes:
    """The event that ends a stream whose replica has died, in the protocol of its path, after the
    `last` part of the stream."""
    api_error = as_api_error(error)
    if is_messages(path):
        return b"event: error\ndata: " + api_error.body(MESSAGES_PATH) + b"\n\n"
    if path.startswith("/v1/responses"):
        numbers = _NUMBER.findall(last)
        data = {
            "type": "error",
            "code": "server_error",
            "message": api_error.message,
            "param": None,
            "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
        }
        return b"event: error\ndata: " + json.dumps(data).encode() + b"\n\n"
    return error_event(error)


def _with_id(headers: Headers) -> Headers:
    """A request's headers with its id here, for the replica's log."""
    request_id = current_request_id()
    if not request_id:
        return headers
    return [*(it for it in headers if it[0] != _ID), (_ID, request_id.encode("ascii"))]


def _own_headers(headers: Headers) -> Headers:
    """An answer's headers, but for the id where it is added here."""
    return [it for it in headers if it[0].lower() != _ID] if current_request_id() else headers
