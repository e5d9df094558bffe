"""Clients that do not behave, at full scale, against `slipstream serve` of the demo.

    python -m benchmarks.serve_abuse [--connections 2000] [--streams 1000] [--large-bodies 20]

Before, during and after the abuse the same honest load is served, whose texts must not change.
Prints each part's finding, the speed and the resident memory, and fails (exit code 1) when an
answer is not what it should be, /health takes more than 100 ms beside a hostile body, memory does
not return within 5 percent of its start, or a block of KV cache is still held. The last line is
one JSON document.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.hostile_bodies import Canary, hostile_bodies
from benchmarks.lean_client import HEAD, post_all, text

HOST = "127.0.0.1"
HONEST = [
    json.dumps(
        {
            "prompt": f"def function_{number}(",
            "max_tokens": 48,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    for number in range(64)
]
# Memory counts once it was written to: this writes to every block of the cache.
NUM_BLOCKS = 600
WARM_UP = [
    json.dumps(
        {"prompt": f"# {n}\n", "max_tokens": 1200, "ignore_eos": True, "stream": True}
    ).encode()
    for n in range(NUM_BLOCKS * 16 // 1200 + 1)
]
MEGABYTE = b"x" * (1 << 20)
MOST_GROWTH = 0.05
MOST_WARM_UPS, CALM_ROUNDS, CALM_GROWTH = 12, 2, 0.005
LONGEST_WAIT = 0.1  # seconds for an answer of /health
MOST_TRIES = 3  # for a body beside which it took longer: the machine may have been busy
SETTLING = 6.0  # seconds in which an idle server gives memory back


def bad_bodies() -> list[bytes]:
    """Every one is to be refused with a status of 4xx."""
    fields: list[tuple[str, str]] = [
        ("max_tokens", value)
        for value in ("NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "-1", '"x"', "[]", "{}")
    ]
    fields += [("temperature", value) for value in ("NaN", "1e999", "-1", "[[]]", '"hot"')]
    fields += [("seed", "9" * 400), ("n", "1e10"), ("n", "9" * 30), ("logprobs", "1e308")]
    fields += [("stop", "[1]"), ("stop", "{}"), ("logit_bias", '{"x": NaN}'), ("stream", '"maybe"')]
    fields += [("prompt", value) for value in ("[-1]", "[1e99]", "[99999999999999999999]", "17")]
    fields += [("prompt", '"\\ud800"'), ("prompt", "[" * 50 + "]" * 50), ("prompt", "null")]
    bodies = [f'{{"prompt": "a", "{name}": {value}}}'.encode() for name, value in fields]
    bodies += [b'{"prompt": "\xff\xfe\x80"}', b'{"prompt": "a"', b"", b"null", b"[]", b"\x00" * 100]
    bodies += [b"[" * 100_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b"[]" * 500_000]
    bodies += [b'{"prompt": "a", "unknown": 1}', b'{"prompt": "' + b"a " * 1_000_000 + b'"}']
    return bodies


class Server:
    """`slipstream serve` of the demo in a process of its own."""

    def __init__(self, options: list[str]) -> None:
        command = ["serve", "demo", "--port", "0", "--threads", "1", *options]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slipstream", *command],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200"},
        )
        assert self._process.stderr is not None
        found = None
        while found is None:
            line = self._process.stderr.readline()
            if not line:
                raise SystemExit("the server did not start")
            found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", line)
        self.port = int(found[1])

    def pump_log(self) -> None:
        """Read on, so that the server can write on; faults are shown."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if " ERROR " in line or " CRITICAL " in line or "Traceback" in line:
                print("server:", line.rstrip(), flush=True)

    @property
    def resident(self) -> int:
        """Bytes of memory."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> int:
        """Stop the server; returns its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)

    def kill(self) -> None:
        """Kill the server if it still runs."""
        self._process.kill()


async def get(port: int, path: str) -> str:
    """The body of an answer."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer.partition(b"\r\n\r\n")[2].decode()


async def gauges(port: int) -> dict[str, float]:
    """The numbers of requests and blocks that the engine has."""
    lines = (await get(port, "/metrics")).splitlines()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return {
        name: float(line.rpartition(" ")[2])
        for line in lines
        for name in names
        if line.startswith(f"slipstream:{name}" + "{")
    }


class Abuse:
    """The parts, one after the other; `faults` holds what went wrong."""

    def __init__(self, server: Server, options: argparse.Namespace) -> None:
        self._server, self._options = server, options
        self._port = server.port
        self._chance = random.Random(0)
        self._texts: list[str] = []
        self._writers: list[asyncio.StreamWriter] = []
        self.faults: list[str] = []
        self.facts: dict[str, Any] = {}

    async def run(self) -> None:
        """Run all attacks."""
        await self._warm_up()
        await self._speed("before")
        await asyncio.sleep(SETTLING)
        start = self._server.resident
        held = await self._half_open()
        await self._speed("with half-open connections")
        await self._part("half-open connections", lambda: self._closed(held))
        await self._part("disconnects", self._disconnects)
        await self._part("large bodies", self._large_bodies)
        await self._part("bad bodies", self._bad_bodies)
        await self._part("hostile bodies", self._hostile_bodies)
        await self._rest()
        await self._speed("after")
        await self._rest()
        await asyncio.sleep(SETTLING)
        end = self._server.resident
        self.facts["resident_megabytes"] = [round(start / 1e6, 1), round(end / 1e6, 1)]
        self.facts["memory_growth"] = round(end / start - 1, 4)
        print(f"memory: {start / 1e6:.1f} MB before, {end / 1e6:.1f} MB after", flush=True)
        if end > start * (1 + MOST_GROWTH):
            self.faults.append(f"memory grew by {end / start - 1:.1%}")

    async def _warm_up(self) -> None:
        """Until honest loads take no more memory: torch keeps a compiled matmul for every number of
        rows that it has met, up to about a thousand."""
        await post_all(self._port, 32, WARM_UP)
        for concurrency in (1, 8):
            await post_all(self._port, concurrency, HONEST)
        most, calm = self._server.resident, 0
        for _ in range(MOST_WARM_UPS):
            for concurrency in (32, 64):
                await post_all(self._port, concurrency, HONEST)
            now = self._server.resident
            calm = calm + 1 if now < most * (1 + CALM_GROWTH) else 0
            most = max(most, now)
            if calm == CALM_ROUNDS:
                break
        for body in hostile_bodies():  # they fill the caches of texts and of compiled grammars
            await self._post(body.content, body.path.encode())

    async def _part(self, name: str, part: Callable[[], Awaitable[Any]]) -> None:
        found = await part()
        self.facts[name] = found
        print(f"{name}: {found}; {self._server.resident / 1e6:.1f} MB", flush=True)

    async def _speed(self, when: str) -> None:
        """Honest load: the best of a few runs, and the texts of all."""
        best = 0.0
        for _ in range(3):
            answers, seconds = await post_all(self._port, 32, HONEST)
            texts = [text(answer) for answer in answers]
            self._texts = self._texts or texts
            if texts != self._texts:
                self.faults.append(f"texts changed {when}")
            best = max(best, 48 * len(HONEST) / seconds)
        self.facts[f"tokens per second {when}"] = round(best, 1)
        print(f"{when}: {best:.0f} tokens/s; {self._server.resident / 1e6:.1f} MB", flush=True)

    async def _half_open(self) -> list[asyncio.StreamReader]:
        halves = [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Half: "]
        halves += [HEAD % len(HONEST[0]) + HONEST[0][:20]]
        readers = []
        for number in range(self._options.connections):
            reader, writer = await asyncio.open_connection(HOST, self._port)
            writer.write(halves[number % len(halves)])
            self._writers.append(writer)
            readers.append(reader)
        print(f"half-open connections: {len(readers)} are open", flush=True)
        return readers

    async def _closed(self, readers: list[asyncio.StreamReader]) -> dict[str, int]:
        """The server itself closes them, with 408."""
        answers = await asyncio.gather(*(_read(reader) for reader in readers))
        for writer in self._writers:
            writer.close()
        self._writers.clear()
        return self._check("half-open connections", Counter(map(_status, answers)), {"408"})

    async def _disconnects(self) -> dict[str, int]:
        """Leave anywhere: while the request is sent, before the answer, within it."""
        ways: Counter[str] = Counter()
        left = iter(range(self._options.streams))

        async def work() -> None:
            for _ in left:
                ways[await self._leave_somewhere()] += 1

        await asyncio.gather(*(work() for _ in range(64)))
        return dict(ways)

    async def _leave_somewhere(self) -> str:
        request = {
            "prompt": f"class Name{self._chance.random()}:\n",
            "max_tokens": 2000,
            "ignore_eos": True,
            "stream": self._chance.random() < 0.8,
            "n": self._chance.choice([1, 1, 2]),
        }
        body = json.dumps(request).encode()
        whole = HEAD % len(body) + body
        sent = self._chance.choice([len(whole), len(whole), self._chance.randrange(len(whole))])
        reader, writer = await asyncio.open_connection(HOST, self._port)
        writer.write(whole[:sent])
        with suppress(TimeoutError):
            async with asyncio.timeout(self._chance.choice([0, 0.1, 0.5, 2])):
                await reader.readexactly(self._chance.randrange(1, 20_000))
        if self._chance.random() < 0.5:
            writer.transport.abort()  # a reset, instead of an orderly end
        writer.close()
        return "whole request" if sent == len(whole) else "half a request"

    async def _large_bodies(self) -> dict[str, int]:
        statuses: Counter[str] = Counter()
        for number in range(self._options.large_bodies):
            head = HEAD % (100 << 20)
            part = MEGABYTE
            if number % 2:
                head = re.sub(rb"Content-Length: \d+", b"Transfer-Encoding: chunked", head)
                part = b"%x\r\n" % len(MEGABYTE) + MEGABYTE + b"\r\n"
            reader, writer = await asyncio.open_connection(HOST, self._port)
            writer.write(head)
            with suppress(ConnectionError):
                for _ in range(100):
                    writer.write(part)
                    await writer.drain()
            statuses[_status(await _read(reader, 65536))] += 1
            writer.close()
        return self._check("large bodies", statuses, {"413"})

    async def _bad_bodies(self) -> dict[str, int]:
        statuses: Counter[str] = Counter()
        for body in bad_bodies():
            status = await self._post(body)
            statuses[status] += 1
            if not status.startswith("4"):
                self.faults.append(f"{status} for {body[:80]!r}")
        return dict(statuses)

    async def _hostile_bodies(self) -> dict[str, Any]:
        """Send each body alone, beside a canary request that must not wait for it."""
        statuses: Counter[str] = Counter()
        longest = 0.0
        with Canary(HOST, self._port) as canary:
            for body in hostile_bodies():
                waits: list[float] = []
                while len(waits) < MOST_TRIES and (not waits or min(waits) > LONGEST_WAIT):
                    await asyncio.sleep(0.01)
                    canary.longest = 0.0
                    status = await self._post(body.content, body.path.encode())
                    await asyncio.sleep(0.01)
                    waits.append(canary.longest)
                longest = max(longest, min(waits))
                statuses[status] += 1
                if min(waits) > LONGEST_WAIT:
                    self.faults.append(f"/health took {min(waits):.3f} s beside {body.name}")
                if status[0] not in "24":
                    self.faults.append(f"{status} for {body.name}")
        return {**statuses, "longest wait in seconds": round(longest, 3)}

    async def _post(self, body: bytes, path: bytes = b"/v1/completions") -> str:
        """The status of the answer."""
        head = (HEAD % len(body)).replace(b"/v1/completions", path)
        reader, writer = await asyncio.open_connection(HOST, self._port)
        writer.write(head.replace(b"Host", b"Connection: close\r\nHost") + body)
        status = _status(await _read(reader))
        writer.close()
        return status

    def _check(self, name: str, statuses: "Counter[str]", expected: set[str]) -> dict[str, int]:
        if set(statuses) - expected:
            self.faults.append(f"{name} were answered with {dict(statuses)}")
        return dict(statuses)

    async def _rest(self) -> None:
        """Check that nothing is left; the last disconnects may take a moment."""
        for _ in range(100):
            held = await gauges(self._port)
            if not any(held.values()):
                break
            await asyncio.sleep(0.1)
        self.facts["held"] = held
        if any(held.values()) or len(held) != 3:
            self.faults.append(f"the engine still holds {held}")


async def _read(reader: asyncio.StreamReader, most: int = -1) -> bytes:
    with suppress(ConnectionError):
        return await reader.read(most)
    return b""


def _status(answer: bytes) -> str:
    return answer.split(b" ", 2)[1].decode() if answer else "closed"


async def _main(options: argparse.Namespace) -> int:
    server = Server(["--num-kv-blocks", str(NUM_BLOCKS)])
    try:
        pumping = asyncio.create_task(asyncio.to_thread(server.pump_log))
        abuse = Abuse(server, options)
        await abuse.run()
        abuse.facts["exit_code"] = server.stop()
        await pumping
    finally:
        server.kill()
    for fault in abuse.faults:
        print("FAULT:", fault)
    print(json.dumps({**abuse.facts, "faults": abuse.faults}))
    return 1 if abuse.faults or abuse.facts["exit_code"] else 0


def main() -> None:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--connections", type=int, default=2000)
    cli.add_argument("--streams", type=int, default=1000)
    cli.add_argument("--large-bodies", type=int, default=20)
    raise SystemExit(asyncio.run(_main(cli.parse_args())))


if __name__ == "__main__":
    main()
