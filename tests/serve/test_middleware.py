"""What stands before the application, called as ASGI calls it."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.core.errors import UsageError
from slipstream.serve.limits import ServeLimits
from slipstream.serve.middleware import ApiKeyCheck, BodyLimits, DrainGate
from slipstream.serve.options import ServerOptions
from slipstream.serve.run import guarded


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body it was given."""
    message = await receive()
    assert message["more_body"] is False
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


def request(
    app: ASGIApp,
    parts: Sequence[bytes] = (b"",),
    headers: Sequence[tuple[bytes, bytes]] = (),
    path: str = "/v1/completions",
    ends: bool = True,
    method: str = "POST",
) -> tuple[int, bytes, dict[bytes, bytes]]:
    """Status, body and headers of the answer; a body that does not end is waited for."""

    async def call() -> list[Message]:
        waiting, sent = list(parts), []

        async def receive() -> Message:
            if not waiting:
                await asyncio.sleep(60)
            part = waiting.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(waiting) or not ends}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": list(headers),
            "client": ("127.0.0.1", 1),
        }
        await app(scope, receive, send)
        return sent

    sent = asyncio.run(call())
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], body, dict(sent[0]["headers"])


def error_of(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    return error


# ---------------------------------------------------------------------- keys


@pytest.mark.parametrize("key", ["first", "second key"])
@pytest.mark.parametrize("scheme", [b"Bearer ", b"bearer  "])
def test_every_key_lets_in(key: str, scheme: bytes) -> None:
    app = ApiKeyCheck(BodyLimits(echo, ServeLimits()), ["first", "second key"], ())
    status, body, _ = request(app, [b"hello"], [(b"authorization", scheme + key.encode())])
    assert (status, body) == (200, b"hello")


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"Bearer wrong")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"first")],
        [(b"authorization", b"Basic first")],
        [(b"authorization", b"Bearer firs")],
        [(b"authorization", b"Bearer \xff\xfe")],
        [(b"authorization", b"Bearer wrong"), (b"authorization", b"Bearer first")],
        [(b"x-api-key", b"first")],
    ],
)
def test_nothing_else_does(headers: list[tuple[bytes, bytes]]) -> None:
    app = ApiKeyCheck(echo, ["first"], ())
    status, body, answered = request(app, headers=headers)
    assert status == 401
    assert answered[b"www-authenticate"] == b"Bearer"
    assert error_of(body)["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/messages", [(b"x-api-key", b"first")], 200),
        ("/v1/messages/count_tokens", [(b"x-api-key", b" first ")], 200),
        ("/v1/messages", [(b"authorization", b"Bearer first")], 200),
        ("/v1/messages", [(b"x-api-key", b"wrong"), (b"authorization", b"Bearer first")], 200),
        ("/v1/messages", [(b"x-api-key", b"wrong")], 401),
        ("/v1/messages", [(b"x-api-key", b"wrong"), (b"x-api-key", b"first")], 401),
        ("/v1/messages", [(b"x-api-key", b"")], 401),
        ("/v1/messages", [], 401),
        ("/v1/messagesx", [(b"x-api-key", b"first")], 401),
        ("/v1/completions", [(b"x-api-key", b"first")], 401),
    ],
)
def test_messages_take_keys_in_a_header_of_their_own(
    path: str, headers: list[tuple[bytes, bytes]], status: int
) -> None:
    app = ApiKeyCheck(BodyLimits(echo, ServeLimits()), ["first"], ())
    answered, body, _ = request(app, [b"hello"], headers, path=path)
    assert answered == status
    if status == 401:
        assert ("type" in json.loads(body)) == (path == "/v1/messages")
        assert error_of(body)["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("size", "status", "kind"), [(5, 413, "request_too_large"), (4, 503, "overloaded_error")]
)
def test_messages_are_refused_in_their_form(size: int, status: int, kind: str) -> None:
    gate = DrainGate(echo)
    asyncio.run(gate.close())
    app = BodyLimits(gate, ServeLimits(max_body_bytes=4))
    answered, body, _ = request(app, [b"x" * size], path="/v1/messages")
    assert answered == status
    assert json.loads(body)["type"] == "error"
    assert {*error_of(body)} == {"type", "message"}
    assert error_of(body)["type"] == kind


def test_open_paths_need_no_key_and_neighbours_do() -> None:
    app = ApiKeyCheck(echo, ["first"], ("/health",))
    assert request(app, path="/health")[0] == 200
    assert request(app, path="/healthy")[0] == 401
    assert request(app, path="/health/")[0] == 401


@pytest.mark.parametrize("key", ["", " key", "schlüssel"])
def test_keys_that_no_header_can_hold_are_refused(key: str) -> None:
    with pytest.raises(UsageError, match="API key"):
        ServerOptions(api_key=(key,))


# ---------------------------------------------------------------------- bodies


def test_a_body_in_parts_arrives_whole() -> None:
    app = BodyLimits(echo, ServeLimits(max_body_bytes=10))
    assert request(app, [b"hello", b"", b"world"])[:2] == (200, b"helloworld")


@pytest.mark.parametrize(
    ("parts", "headers"),
    [
        ([b"hello", b"worlds"], []),
        ([b"x" * 1000], []),
        ([b""], [(b"content-length", b"11")]),
        ([b"x"], [(b"content-length", b"99999999999999999999")]),
    ],
)
def test_a_body_that_is_too_large_is_refused(
    parts: list[bytes], headers: list[tuple[bytes, bytes]]
) -> None:
    status, body, _ = request(BodyLimits(echo, ServeLimits(max_body_bytes=10)), parts, headers)
    assert status == 413
    assert "--max-body-bytes" in error_of(body)["message"]


def test_an_endless_body_is_refused_before_its_end() -> None:
    app = BodyLimits(echo, ServeLimits(max_body_bytes=10))
    assert request(app, [b"x" * 11], ends=False)[0] == 413


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    app = BodyLimits(echo, ServeLimits(receive_timeout=0.05))
    status, _, headers = request(app, [b"half"], ends=False)
    assert status == 408
    assert headers[b"connection"] == b"close"


def test_a_client_that_leaves_gets_no_answer() -> None:
    async def call() -> list[Message]:
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        await BodyLimits(echo, ServeLimits())(scope, receive, send)
        return sent

    assert asyncio.run(call()) == []


# ---------------------------------------------------------------------- the door


def test_a_closed_door_waits_for_those_inside_and_lets_nobody_in() -> None:
    async def test() -> None:
        release = asyncio.Event()

        async def slow(scope: Scope, receive: Receive, send: Send) -> None:
            await release.wait()
            await echo(scope, receive, send)

        door, sent = DrainGate(slow), []

        async def call(path: str) -> None:
            async def receive() -> Message:
                return {"type": "http.request", "body": b"", "more_body": False}

            async def send(message: Message) -> None:
                sent.append(message)

            await door({"type": "http", "method": "GET", "path": path}, receive, send)

        inside = asyncio.create_task(call("/v1/completions"))
        await asyncio.sleep(0)
        closing = asyncio.create_task(door.close())
        await asyncio.sleep(0)
        assert door.closed
        for path in ("/v1/completions", "/health"):
            await call(path)
            assert sent[-2]["status"] == 503
        assert not closing.done()
        release.set()
        await inside
        await closing
        assert sent[-2]["status"] == 200
        await call("/metrics")
        assert sent[-2]["status"] == 200

    asyncio.run(test())


# ---------------------------------------------------------------------- all of it


def test_other_origins_are_not_let_in_unless_named() -> None:
    origin = [(b"origin", b"https://example.org"), (b"access-control-request-method", b"POST")]
    plain, _ = guarded(echo, ServerOptions())
    _, _, headers = request(plain, headers=origin, method="OPTIONS")
    assert not [name for name in headers if name.startswith(b"access-control")]
    named, _ = guarded(
        echo, ServerOptions(allowed_origins=("https://example.org",), api_key=("key",))
    )
    status, _, headers = request(named, headers=origin, method="OPTIONS")
    assert (status, headers[b"access-control-allow-origin"]) == (200, b"https://example.org")
    other = [(b"origin", b"https://example.com"), origin[1]]
    assert b"access-control-allow-origin" not in request(named, headers=other, method="OPTIONS")[2]


@pytest.mark.parametrize("given", [b"abc-123", b"", b"two words", b"x" * 200, b"\xff"])
def test_every_answer_names_its_request(given: bytes) -> None:
    app, _ = guarded(echo, ServerOptions(api_key=("key",)))
    status, _, headers = request(app, headers=[(b"x-request-id", given)])
    assert status == 401
    own = headers[b"x-request-id"]
    assert own == given if given == b"abc-123" else own.startswith(b"req-")


def test_limits_must_be_limits() -> None:
    with pytest.raises(UsageError, match="max_waiting"):
        ServeLimits(max_waiting=-1)
    with pytest.raises(UsageError, match="receive_timeout"):
        ServeLimits(receive_timeout=0)
    with pytest.raises(UsageError, match="request_timeout"):
        ServeLimits(request_timeout=float("nan"))
