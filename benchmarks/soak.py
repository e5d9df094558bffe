"""Hours of a served demo among clients that misbehave, signals, jumps of the clock and a full disk.

    python -m benchmarks.soak --minutes 30 [--seed 1] [--kill] [--faketime LIBRARY] [--output FILE]

Honest clients ask the four protocols without pause, and every text is compared with that of a
server without a drafter. Beside them others leave anywhere, read in sips, send hostile bodies and
half requests, and the server is stopped and continued (SIGSTOP); its log goes to a full disk.
With --kill it is killed or drained and started again, too, and what was under way must be reported
to its client as broken. With the library of Debian's package `faketime` its clock of the day jumps
by hours. A run fails (exit code 1) when a text differs, a request has neither an answer nor a
refusal, the server ends by itself, a request or block is held at the end, or memory of a server
that was never killed grows by 3 percent or more after its first ten minutes (a third of shorter
runs). The last line is one JSON document; a seed repeats the choices, not their timing.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import aiohttp

from benchmarks.hostile_bodies import hostile_bodies
from benchmarks.soak_clients import HOST, BrokenError, Mischief, RefusalError, ask, honest_bodies

LOG_BYTES = 64 << 10  # a server's files may grow to; the demo's log is longer in a minute
CLIENTS = 6
MOST_GROWTH = 0.03
WARM_SECONDS = 600.0
_HOURS = (-24, -1, 0, 1, 24 * 365)


class Process:
    """`slipstream serve demo` on a port that stays when it is started again."""

    def __init__(self, options: list[str], environment: dict[str, str] | None = None) -> None:
        # Python takes a file of bytecode that a full disk has cut for a whole one.
        fixed = {"PYTHONDONTWRITEBYTECODE": "1"}
        self._options = options
        self._environment = {**os.environ, **(environment or {}), **fixed}
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.port = int(free.getsockname()[1])
        self.generation = 0
        self.start()

    @property
    def base(self) -> str:
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        """Start it; `ready` tells when it answers."""
        self.generation += 1
        command = [sys.executable, "-m", "slipstream", "serve", "demo", "--threads", "1"]
        with tempfile.TemporaryFile() as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port), *self._options],
                stdout=log, stderr=log, env=self._environment, preexec_fn=_fill_disk_soon,
            )  # fmt: skip

    async def ready(self) -> None:
        """Wait for /health.

        Raises:
            RuntimeError: it ended, or did not answer within two minutes.
        """
        began = monotonic()
        async with aiohttp.ClientSession() as session:
            while self._process.poll() is None and monotonic() < began + 120:
                try:
                    async with session.get(f"{self.base}/health") as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientError:
                    await asyncio.sleep(0.2)
        raise RuntimeError(f"the server is not there (exit code {self._process.poll()})")

    @property
    def ended(self) -> bool:
        """Whether it is gone without having been asked to go."""
        return self._process.poll() is not None

    @property
    def resident(self) -> int:
        """Bytes of memory."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def send(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    async def wait(self) -> int:
        """Its exit code."""
        return await asyncio.to_thread(self._process.wait, 60)


@dataclass
class Findings:
    """What the run saw."""

    requests: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)  # seconds, bytes
    restart_seconds: list[float] = field(default_factory=list)
    wait_seconds: list[float] = field(default_factory=list)  # for whole answers

    def growth(self, warm: float) -> float:
        """Share by which the most memory behind `warm` seconds is above the most before them."""
        before = [size for when, size in self.memory if when <= warm]
        behind = [size for when, size in self.memory if when > warm]
        return max(behind) / max(before) - 1 if before and behind else 0.0


class Soak:
    """One run: honest clients, mischief and signals beside one another, until time is up."""

    def __init__(self, server: Process, texts: dict[str, str], options: argparse.Namespace) -> None:
        self._server, self._texts, self._options = server, texts, options
        self._chance = random.Random(options.seed)
        self._mischief = Mischief(server.port, random.Random(options.seed + 1))
        self._began = monotonic()
        self._away = 0.0  # until when the server may be away, or its answers broken
        self.found = Findings()

    async def run(self) -> None:
        """All of it."""
        end = self._began + 60 * self._options.minutes
        tasks = [self._honest(end) for _ in range(CLIENTS)]
        hostile = self._send_hostile_bodies(end)
        await asyncio.gather(*tasks, hostile, self._disturb(end), self._watch(end))
        self.found.faults += self._mischief.faults
        await self._rest()

    async def _honest(self, end: float) -> None:
        bodies = honest_bodies()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session:
            while monotonic() < end:
                path, body = self._chance.choice(bodies)
                self.found.requests[await self._outcome(session, path, body)] += 1

    async def _outcome(
        self, session: aiohttp.ClientSession, path: str, body: dict[str, Any]
    ) -> str:
        began = monotonic()
        try:
            text = await ask(session, self._server.base, path, body)
        except RefusalError:
            await asyncio.sleep(0.2)
            return "refused, as stated"
        except BrokenError as error:
            await asyncio.sleep(0.2)
            if began > self._away:
                self.found.faults.append(f"{path} broke with nobody at fault: {error}")
            return "reported as broken beside a kill"
        except (ValueError, KeyError, TimeoutError) as error:
            self.found.faults.append(f"{path}: {type(error).__name__} {error}")
            return "wrong"
        self.found.wait_seconds.append(monotonic() - began)
        if text != self._texts[_key(path, body)]:
            self.found.faults.append(f"another text for {_key(path, body)}: {text!r}")
            return "wrong"
        return "answered, text equal"

    async def _disturb(self, end: float) -> None:
        deeds: list[Callable[[], Awaitable[None]]] = [
            *[self._mischief.leave] * 8, self._mischief.read_slowly, self._mischief.half_open,
            self._pause,
        ]  # fmt: skip
        if self._options.faketime:
            deeds.append(self._jump)
        if self._options.kill:
            deeds.append(self._restart)
        while monotonic() < end and await self._tried(self._chance.choice(deeds)):
            await asyncio.sleep(self._chance.random() * 0.4)

    async def _send_hostile_bodies(self, end: float) -> None:
        """One after another, so that all were sent once by the time that memory counts."""
        bodies = itertools.cycle(hostile_bodies())
        while monotonic() < end and await self._tried(partial(self._mischief.send, next(bodies))):
            await asyncio.sleep(0.1)

    async def _tried(self, deed: Callable[[], Awaitable[None]]) -> bool:
        """Do it; False if it met no server where there had to be one."""
        try:
            await deed()
        except OSError as error:
            if monotonic() > self._away:
                self.found.faults.append(f"no connection: {error}")
                return False
        return True

    async def _pause(self) -> None:
        self._mischief.counts["SIGSTOP"] += 1
        self._server.send(signal.SIGSTOP)
        await asyncio.sleep(self._chance.choice([0.2, 1, 3]))
        self._server.send(signal.SIGCONT)

    async def _jump(self) -> None:
        self._mischief.counts["jumps of the clock"] += 1
        hours = self._chance.choice(_HOURS)
        clock_file(self._options.seed).write_text(f"{3600 * hours:+d}")

    async def _restart(self) -> None:
        kind = self._chance.choice([signal.SIGKILL, signal.SIGTERM])
        self._mischief.counts[kind.name] += 1
        self._away = monotonic() + 300
        self._server.send(kind)
        code = await self._server.wait()
        if kind == signal.SIGTERM and code != 0:
            self.found.faults.append(f"exit code {code} after SIGTERM")
        gone = monotonic()
        self._server.start()
        await self._server.ready()
        self.found.restart_seconds.append(monotonic() - gone)
        self._away = monotonic() + 1  # requests of before are reported by then
        await asyncio.sleep(20 * self._chance.random())

    async def _watch(self, end: float) -> None:
        """Memory, and whether the server is still there."""
        told = 0.0
        while monotonic() < end:
            now = monotonic()
            if self._server.ended and now > self._away:
                self.found.faults.append("the server ended by itself")
                return
            if not self._server.ended:
                self.found.memory.append((now - self._began, self._server.resident))
            if now > told + 60:
                told = now
                print(f"{now - self._began:6.0f} s {self.document()}", flush=True)
            await asyncio.sleep(2)

    async def _rest(self) -> None:
        """Nothing may be held a while after the last request."""
        held = ""
        async with aiohttp.ClientSession() as session:
            for _ in range(60):
                async with session.get(f"{self._server.base}/metrics") as answer:
                    lines = (await answer.text()).splitlines()
                names = ("num_requests_running{", "num_requests_waiting{", "kv_cache_usage_perc{")
                kept = [line for line in lines if any(f"slipstream:{it}" in line for it in names)]
                held = ", ".join(line for line in kept if float(line.split()[-1]))
                if kept and not held:
                    return
                await asyncio.sleep(0.5)
        self.found.faults.append(f"the engine still holds {held}")

    def document(self) -> dict[str, Any]:
        """What was done and found so far."""
        warm = min(WARM_SECONDS, 20.0 * self._options.minutes)
        growth = None if self._options.kill else round(self.found.growth(warm), 4)
        return {
            "minutes": round((monotonic() - self._began) / 60, 1),
            "requests": dict(self.found.requests),
            "mischief": dict(self._mischief.counts),
            "resident_megabytes": round(self.found.memory[-1][1] / 1e6, 1),
            "memory_growth": growth,
            "longest_wait_seconds": round(max(self.found.wait_seconds, default=0.0), 1),
            "median_wait_seconds": round(median(self.found.wait_seconds or [0.0]), 2),
            "slowest_restart_seconds": round(max(self.found.restart_seconds, default=0.0), 1),
            "faults": self.found.faults[:20],
            "num_faults": len(self.found.faults),
        }


def _fill_disk_soon() -> None:
    """In the server's process: files cannot grow beyond a few lines, as if the disk were full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (LOG_BYTES, LOG_BYTES))


def clock_file(seed: int) -> Path:
    """Where the library of faketime reads the shift of the clock, in seconds."""
    return Path(f"/tmp/slipstream-soak-clock-{os.getpid()}-{seed}")


def _key(path: str, body: dict[str, Any]) -> str:
    return f"{path} {json.dumps(body, sort_keys=True)}"


async def plain_texts() -> dict[str, str]:
    """The answers of a server without a drafter, one at a time."""
    server = Process(["--no-speculation"])
    try:
        await server.ready()
        async with aiohttp.ClientSession() as session:
            return {
                _key(path, body): await ask(session, server.base, path, body)
                for path, body in honest_bodies()
            }
    finally:
        server.send(signal.SIGKILL)
        await server.wait()


def _fake_clock(options: argparse.Namespace) -> dict[str, str]:
    if not options.faketime:
        return {}
    clock_file(options.seed).write_text("+0")
    return {
        "LD_PRELOAD": options.faketime,
        "FAKETIME_TIMESTAMP_FILE": str(clock_file(options.seed)),
        "FAKETIME_CACHE_DURATION": "1",  # or every look at a clock reads the file
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        # Waits with a timeout would end at once else, so that threads that wait for Python's lock
        # spin and everybody is some ten times slower.
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",
    }


async def _main(options: argparse.Namespace) -> int:
    texts = await plain_texts()
    # A small cache, so that requests are preempted, too; memory counts once it was written to.
    server = Process(["--num-kv-blocks", "400", "--max-num-seqs", "8"], _fake_clock(options))
    try:
        await server.ready()
        soak = Soak(server, texts, options)
        await soak.run()
        report = soak.document()
        server.send(signal.SIGTERM)
        report["exit_code"] = await server.wait()
    finally:
        if not server.ended:
            server.send(signal.SIGKILL)
        clock_file(options.seed).unlink(missing_ok=True)
    failed = bool(report["num_faults"] or report["exit_code"])
    failed = failed or (report["memory_growth"] or 0.0) >= MOST_GROWTH
    print(json.dumps({**report, "failed": failed}))
    if options.output:
        options.output.write_text(json.dumps({**report, "failed": failed}, indent=2))
    return int(failed)


def main() -> None:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--minutes", type=float, default=30.0)
    cli.add_argument("--seed", type=int, default=0)
    cli.add_argument("--kill", action="store_true", help="kill and drain the server, too")
    cli.add_argument("--faketime", metavar="LIBRARY", help="libfaketime.so.1")
    cli.add_argument("--output", type=Path)
    raise SystemExit(asyncio.run(_main(cli.parse_args())))


if __name__ == "__main__":
    main()
