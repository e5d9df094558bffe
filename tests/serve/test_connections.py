"""Clients that do not behave, over real sockets, against a small application."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from slipstream.serve.limits import ServeLimits
from slipstream.serve.listening import BoundedConnection, bind, connection_class
from slipstream.serve.options import ServerOptions
from slipstream.serve.run import guarded

LIMITS = ServeLimits(
    receive_timeout=0.3,
    send_timeout=0.3,
    keep_alive_timeout=1,
    max_header_bytes=2000,
    max_body_bytes=5000,
    max_connections=8,
)
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with its body, or with far more than anybody reads."""
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/flood":
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
    await send({"type": "http.response.body", "body": message["body"]})


class Server:
    """A server in a thread."""

    def __init__(self) -> None:
        whole, _ = guarded(application, ServerOptions(limits=LIMITS))
        self.kind: type[BoundedConnection] = connection_class(LIMITS)
        config = uvicorn.Config(
            whole, http=self.kind, ws="none", lifespan="off", log_config=None, timeout_keep_alive=1
        )
        self.uvicorn = uvicorn.Server(config)
        self._socket = bind("127.0.0.1", 0)
        self.port = self._socket.getsockname()[1]

    def run(self) -> None:
        self.uvicorn.run(sockets=[self._socket])

    @property
    def num_connections(self) -> int:
        return len(self.uvicorn.server_state.connections)

    def connect(self) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.port))
        client.settimeout(20)
        return client

    def ask(self, *parts: bytes) -> bytes:
        """The whole answer to what is sent on one connection, until it is closed."""
        with self.connect() as client:
            for part in parts:
                with suppress(ConnectionError):
                    client.sendall(part)
            return read_all(client)


def read_all(client: socket.socket) -> bytes:
    answer = b""
    with suppress(ConnectionError):
        while part := client.recv(65536):
            answer += part
    return answer


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@contextmanager
def running() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.uvicorn.started:
        assert thread.is_alive()
    try:
        yield server
    finally:
        server.uvicorn.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as server:
        yield server


def test_a_request_is_answered_and_the_connection_kept(server: Server) -> None:
    with server.connect() as client:
        for _ in range(3):
            client.sendall(POST)
            assert b"hello" in client.recv(65536)
        client.sendall(GET + GET)  # pipelined
        answer = b""
        while answer.count(b"HTTP/1.1 200") < 2:
            answer += client.recv(65536)
        assert read_all(client) == b""  # closed once it was idle too long


@pytest.mark.parametrize(
    "half",
    [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n", b"\r\n\r\n\r\n"],
    ids=["nothing", "line", "headers", "empty lines"],
)
def test_half_a_head_is_not_waited_for(server: Server, half: bytes) -> None:
    assert status_of(server.ask(half)) == 408


def test_half_a_body_is_not_waited_for(server: Server) -> None:
    answer = server.ask(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
    assert status_of(answer) == 408


def test_half_a_second_request_is_not_waited_for(server: Server) -> None:
    answer = server.ask(GET, b"GET / HTTP/1.1\r\nHo")
    assert answer.count(b"HTTP/1.1") == 1
    assert status_of(answer) == 200


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 3000 + b"\r\n\r\n",
        b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 600 + b"\r\n",
        b"GET / HTTP/1.1\r\nX-Endless: " + b"a" * 3000,
    ],
    ids=["header", "path", "many", "endless"],
)
def test_large_heads_are_refused(server: Server, head: bytes) -> None:
    answer = server.ask(head)
    assert status_of(answer) == 431
    assert b"application/json" in answer
    assert "2000 bytes" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 5,
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    ],
)
def test_garbage_is_refused(server: Server, garbage: bytes) -> None:
    answer = server.ask(garbage)
    assert status_of(answer) in (400, 408)


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "chunked"])
def test_a_large_body_is_refused_and_the_rest_of_it_not_kept(
    server: Server, declared: bool
) -> None:
    parts = [b"10000\r\n" + b"x" * 65536 + b"\r\n"] * 40
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    if declared:
        parts = [b"x" * 65536] * 40
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n"
    assert status_of(server.ask(head, *parts)) == 413


def test_an_answer_that_nobody_reads_is_cut_off(server: Server) -> None:
    with server.connect() as client:
        client.sendall(b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_for(lambda: server.num_connections == 1)
        wait_for(lambda: server.num_connections == 0)


def test_those_who_send_nothing_make_room_for_others(server: Server) -> None:
    silent = [server.connect() for _ in range(20)]
    try:
        answer = server.ask(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert status_of(answer) == 200
        assert status_of(read_all(silent[0])) == 503
    finally:
        for client in silent:
            client.close()
    wait_for(lambda: server.num_connections == 0)
    assert server.kind.incomplete == {}


def wait_for(condition: object) -> None:
    async def wait() -> None:
        async with asyncio.timeout(20):
            while not condition():  # type: ignore[operator]
                await asyncio.sleep(0.01)

    asyncio.run(wait())
