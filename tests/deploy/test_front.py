"""The front before replicas that die, refuse and stall."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from starlette.types import Message, Scope

from slipstream.deploy.front import Front
from slipstream.deploy.metrics import merged
from slipstream.deploy.routing import Directory, Replica

EVENT = b'data: {"choices": []}\n\n'


def whole(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def is_whole(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"chunked" in head:
        return body.endswith(b"0\r\n\r\n")
    return b"content-length: %d\r\n" % len(body) in head + b"\r\n"


class FakeReplica:
    """Answers each request by what it was made with, and hangs up where that is not whole.

    Attributes:
        requests: heads and bodies that came.
    """

    def __init__(self, name: str, *answers: bytes) -> None:
        self.name, self.answers, self.requests = name * 12, answers, list[bytes]()
        self._writers: list[asyncio.StreamWriter] = []

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Replica]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        yield Replica(id=self.name, host="127.0.0.1", port=port)
        server.close()
        for writer in self._writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        await self.answer(reader, writer)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
                body = await reader.readexactly(int(fields.get(b"content-length", b"0")))
                self.requests.append(head + body)
                answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
                writer.write(answer)
                await writer.drain()
                if not is_whole(answer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            return
        finally:
            writer.close()


@asynccontextmanager
async def served(*replicas: FakeReplica, **options: Any) -> AsyncIterator[Front]:
    async with AsyncExitStack() as stack:
        front = Front(None, routing="load", **options)
        front.update([await stack.enter_async_context(it.listening()) for it in replicas])
        yield front
        front.update([])


async def post(
    front: Front, path: str = "/v1/completions", body: bytes = b"{}", method: str = "POST"
) -> tuple[int, bytes]:
    """The status and the whole body."""
    sent: list[Message] = []
    arrived = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if arrived:
            return arrived.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {"type": "http", "path": path, "method": method, "headers": []}
    async with asyncio.timeout(20):
        await front({**scope, "raw_path": path.encode(), "query_string": b""}, receive, send)
    assert not sent[-1].get("more_body", False)
    return sent[0]["status"], b"".join(it.get("body", b"") for it in sent)


def test_answers_pass_whole_or_as_events() -> None:
    async def run() -> None:
        stream = STREAM + chunk(EVENT) + chunk(EVENT[:9]) + chunk(EVENT[9:]) + chunk(b"")
        async with served(FakeReplica("a", whole(b'{"a": 1}'), stream)) as front:
            assert await post(front) == (200, b'{"a": 1}')
            assert await post(front) == (200, EVENT * 2)
            assert front.counts.sent == {"a" * 12: 2}

    asyncio.run(run())


def test_a_replica_that_dies_before_its_first_event_is_replaced_once() -> None:
    async def run(*dying: bytes) -> tuple[int, bytes, Front]:
        replicas = [FakeReplica("abc"[i], it) for i, it in enumerate(dying)]
        async with served(*replicas, wait_timeout=1.0) as front:
            return *(await post(front)), front

    answer = whole(b'{"a": 1}')
    for dead in (b"", STREAM, answer[:-1], STREAM + chunk(EVENT[:-2])):
        status, body, front = asyncio.run(run(dead, answer))
        assert (status, body) == (200, b'{"a": 1}')
        assert front.counts.retried == 1
    status, body, front = asyncio.run(run(b"", b"", answer))
    assert status == 503
    assert json.loads(body)["error"]["code"] == "replica_lost"
    assert front.counts.lost == 1


def test_a_stream_that_breaks_off_ends_as_its_protocol_has_it() -> None:
    async def run(path: str, event: bytes) -> bytes:
        broken = STREAM + chunk(event) + chunk(EVENT[:7])
        async with served(FakeReplica("a", broken), FakeReplica("b", broken)) as front:
            status, body = await post(front, path)
            assert status == 200
            assert front.counts.retried == 0
            assert body.startswith(event)
            return body.removeprefix(event)

    end = asyncio.run(run("/v1/chat/completions", EVENT))
    assert end.startswith(b'data: {"error": {"message": "the replica that was answering has died')
    assert end.endswith(b"\n\ndata: [DONE]\n\n")
    end = asyncio.run(run("/v1/messages", EVENT))
    assert end.startswith(b'event: error\ndata: {"type": "error", "error": {"type": "overloaded')
    end = asyncio.run(run("/v1/responses", b'data: {"sequence_number":41}\n\n'))
    assert json.loads(end.removeprefix(b"event: error\ndata: "))["sequence_number"] == 42


def test_refusals_go_elsewhere_and_the_last_is_passed_on() -> None:
    async def run(*answers: bytes) -> tuple[int, bytes]:
        replicas = [FakeReplica("abc"[i], it) for i, it in enumerate(answers)]
        async with served(*replicas, wait_timeout=0.2) as front:
            answer = await post(front)
            assert front.counts.retried == 0
            return answer

    stopping, full = (whole(b"{}", status) for status in ("503 Unavailable", "429 Too Many"))
    good = whole(b'{"a": 1}')
    assert asyncio.run(run(stopping, full, good)) == (200, b'{"a": 1}')
    assert asyncio.run(run(full, full)) == (429, b"{}")
    status, body = asyncio.run(run(stopping, stopping))
    assert (status, json.loads(body)["error"]["code"]) == (503, "unavailable")


def test_requests_wait_for_a_replica_but_questions_about_health_do_not() -> None:
    async def run() -> None:
        async with served() as front:
            status, _ = await post(front, "/health", b"", "GET")
            assert status == 503
            waiting = asyncio.create_task(post(front))
            await asyncio.sleep(0.05)
            async with FakeReplica("a", whole(b"{}")).listening() as replica:
                front.update([replica])
                assert await waiting == (200, b"{}")
                front.update([])

    asyncio.run(run())


def test_stopping_tells_clients() -> None:
    async def run() -> bytes:
        class Stalls(FakeReplica):
            async def answer(self, *streams: Any) -> None:
                streams[1].write(STREAM + chunk(EVENT))
                await streams[0].read()

        async with served(Stalls("a")) as front:
            answering = asyncio.create_task(post(front))
            while not front.num_open:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            front.stop()
            return (await answering)[1]

    assert b"the server stopped before the request was done" in asyncio.run(run())


def test_some_paths_are_asked_of_all() -> None:
    async def run() -> None:
        page = b"# HELP n Number\n# TYPE n gauge\nn 1.0\n"
        answers = (whole(page), whole(b'{"server_load": 2}'), whole(b'{"success": true}'))
        fakes = [FakeReplica(name, *answers) for name in "ab"]
        async with served(*fakes) as front:
            _, body = await post(front, "/metrics", b"", "GET")
            lines = body.decode().splitlines()
            samples = ['n{replica="aaaaaaaaaaaa"} 1.0', 'n{replica="bbbbbbbbbbbb"} 1.0']
            assert lines[:4] == ["# HELP n Number", "# TYPE n gauge", *samples]
            assert await post(front, "/load", b"", "GET") == (200, b'{"server_load": 4}')
            assert await post(front, "/reset_prefix_cache") == (200, b'{"success": true}')
            assert [len(it.requests) for it in fakes] == [3, 3]

    asyncio.run(run())


def test_a_head_is_answered_as_a_get_where_all_are_asked() -> None:
    async def run() -> None:
        fakes = [FakeReplica(name, whole(b'{"server_load": 2}')) for name in "ab"]
        async with served(*fakes) as front:
            status, dropped = await post(front, "/load", b"", "HEAD")  # by the HTTP server
            assert (status, dropped) == (200, b'{"server_load": 4}')
        assert all(it.requests[0].startswith(b"GET /load ") for it in fakes)
        async with served() as front:
            assert (await post(front, "/metrics", b"", "HEAD"))[0] == 200

    asyncio.run(run())


def test_a_refusal_of_metrics_is_passed_on() -> None:
    async def run() -> None:
        async with served(FakeReplica("a", whole(b"{}", "401 Unauthorized"))) as front:
            assert await post(front, "/metrics", b"", "GET") == (401, b"{}")

    asyncio.run(run())


def test_families_of_metrics_stand_together() -> None:
    page = (
        "# HELP t_seconds Times\n# TYPE t_seconds histogram\n"
        't_seconds_bucket{le="1.0"} 1.0\nt_seconds_count 1.0\n'
        "# HELP n_total N\n# TYPE n_total counter\nn_total 3.0\n"
    )
    lines = merged({"a": page, "b": page}).splitlines()
    assert lines == [
        *("# HELP t_seconds Times", "# TYPE t_seconds histogram"),
        *('t_seconds_bucket{replica="a",le="1.0"} 1.0', 't_seconds_count{replica="a"} 1.0'),
        *('t_seconds_bucket{replica="b",le="1.0"} 1.0', 't_seconds_count{replica="b"} 1.0'),
        *("# HELP n_total N", "# TYPE n_total counter"),
        *('n_total{replica="a"} 3.0', 'n_total{replica="b"} 3.0'),
    ]


def test_replicas_that_change_when_the_event_loop_has_ended_do_no_harm() -> None:
    directory, told = Directory(), list[int]()

    async def serve() -> None:
        directory.follow(lambda replicas: told.append(len(replicas)))
        directory.update([Replica(id="a" * 12, host="127.0.0.1", port=1)])
        await asyncio.sleep(0)
        directory.leave()

    asyncio.run(serve())
    directory.update([])
    assert told == [0, 1]


def test_the_results_of_all_replicas_are_told() -> None:
    done, other = whole(b'{"running": true}'), whole(b'{"running": false}')
    refused = whole(b"{}", "409 Conflict")
    failed = whole(b"[]", "500 Internal Server Error")
    a, b, c = (name * 12 for name in "abc")

    async def told(*answers: bytes) -> tuple[int, Any]:
        replicas = (FakeReplica(*it) for it in zip("abc", answers, strict=False))
        async with served(*replicas) as front:
            status, body = await post(front, "/stop_profile")
            return status, json.loads(body)

    async def run() -> None:
        status, body = await told(done, refused, b"")
        results = f"{a} did it; {b} answered 409: {{}}; {c} did not answer"
        assert (status, body["error"]["code"]) == (502, "partly_done")
        assert body["error"]["message"] == f"1 of 3 replicas did what was asked; {results}"
        status, body = await told(refused, failed)
        assert status == 502
        assert body["error"]["message"].startswith("0 of 2 replicas did what was asked; ")
        assert await told(refused, refused) == (409, {})
        assert await told(done, done) == (200, {"running": True})
        each = {a: {"running": True}, b: {"running": False}}
        assert await told(done, other) == (200, {"running": True, "replicas": each})

    asyncio.run(run())
