"""A client that costs next to nothing: bytes are kept as they come and read when all is over.

    python -m benchmarks.lean_client PORT CONCURRENCY BODIES.json RESULT.json

Sends every body of the list to /v1/completions, so many at once, and writes the texts and the
seconds. A process of its own, so that the server's process is measured alone.
"""

import asyncio
import json
import sys
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)
_END = b"0\r\n\r\n"


class _Answer(asyncio.Protocol):
    """Collects one chunked answer."""

    def __init__(self, done: "asyncio.Future[None]") -> None:
        self.parts: list[bytes] = []
        self._done = done

    def data_received(self, data: bytes) -> None:
        self.parts.append(data)
        if data.endswith(_END) and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


async def post(port: int, body: bytes) -> bytes:
    """The whole answer, headers and chunk sizes included."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    transport, answer = await loop.create_connection(lambda: _Answer(done), "127.0.0.1", port)
    transport.write(HEAD % len(body) + body)
    await done
    transport.close()
    return b"".join(answer.parts)


async def post_all(port: int, concurrency: int, bodies: list[bytes]) -> tuple[list[bytes], float]:
    """The answers in the order of the bodies, and the seconds they took."""
    answers: list[bytes] = [b""] * len(bodies)
    left = iter(range(len(bodies)))

    async def work() -> None:
        for index in left:
            answers[index] = await post(port, bodies[index])

    began = perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return answers, perf_counter() - began


def events(answer: bytes) -> list[dict[str, Any]]:
    """The events of a whole stream; ValueError where it is not whole."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n")[0] or not body.endswith(_END):
        raise ValueError(f"not a whole stream: {answer[:300]!r}")
    content = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        content += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    found = [event.removeprefix(b"data: ") for event in content.split(b"\n\n") if event]
    if found.pop() != b"[DONE]":
        raise ValueError(f"no end of the stream: {answer[-300:]!r}")
    return [json.loads(event) for event in found]


def text(answer: bytes) -> str:
    """The text of the only sample."""
    return "".join(choice["text"] for event in events(answer) for choice in event["choices"])


def main() -> None:
    port, concurrency, source, target = sys.argv[1:]
    bodies = [json.dumps(body).encode() for body in json.loads(Path(source).read_text())]
    answers, seconds = asyncio.run(post_all(int(port), int(concurrency), bodies))
    result = {
        "seconds": seconds,
        "texts": [text(answer) for answer in answers],
        "chunks": sum(answer.count(b"data: {") for answer in answers),
        "cpu_seconds": process_time(),
    }
    Path(target).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
