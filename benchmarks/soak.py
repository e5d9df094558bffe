"""Hours of a served demo among clients that misbehave, signals, jumps of the clock and a full disk.

    python -m benchmarks.soak --minutes 30 [--seed 1] [--kill] [--replicas N] [--faketime LIBRARY]

Honest clients ask the four protocols without pause, and every text is compared with that of a
server without a drafter. Beside them others leave anywhere, read in sips, send hostile bodies and
half requests, and the server is stopped and continued (SIGSTOP); its log goes to a full disk.
With --kill it is killed or drained and started again, too, and what was under way must be reported
to its client as broken. With --replicas N there are so many behind the front, and it is they that
are stopped, killed and replaced (a rolling update). With the library of Debian's package `faketime`
its clock of the day jumps by hours. A run fails (exit code 1) when a text differs, a request has
neither an answer nor a refusal, the server ends by itself, a request or block is held at the end,
or memory of a server that was never killed grows by 3 percent or more after its first ten minutes
(a third of shorter runs). Growth is of the median of as many last minutes over that of the first
minutes' second half: large bodies make memory go up and down, and the most of a long time is above
that of a short one where nothing grows. That, of minutes' medians, is reported beside it. The last
line is one JSON document; a seed repeats the choices, not their timing.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
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
from benchmarks.soak_clients import BrokenError, Mischief, RefusalError, ask, honest_bodies
from benchmarks.soak_servers import Deployment, Server, Single

CLIENTS = 6
MOST_GROWTH = 0.03
WARM_SECONDS = 600.0
_HOURS = (-24, -1, 0, 1, 24 * 365)


@dataclass
class Findings:
    """The findings of the run."""

    requests: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)  # seconds, bytes
    restart_seconds: list[float] = field(default_factory=list)
    wait_seconds: list[float] = field(default_factory=list)  # for whole answers

    def growth(self, warm: float) -> float:
        """Share by which memory of the last `warm` seconds is above that of the first ones.

        Medians; of the first ones the second half counts. 0 where less than twice as many passed.
        """
        end = max((when for when, _ in self.memory), default=0.0)
        before = [size for when, size in self.memory if warm / 2 <= when <= warm]
        last = [size for when, size in self.memory if when > end - warm]
        return median(last) / median(before) - 1 if before and end >= 2 * warm else 0.0

    def peak(self, warm: float) -> float:
        """Share by which the largest minute after `warm` seconds is above the largest before."""
        minutes = itertools.groupby(self.memory, key=lambda at: (at[0] > warm, at[0] // 60))
        most = dict.fromkeys((False, True), 0.0)
        for (later, _), group in minutes:
            most[later] = max(most[later], median(size for _, size in group))
        return most[True] / most[False] - 1 if all(most.values()) else 0.0


class Soak:
    """One run: honest clients, mischief and signals beside one another, until time is up."""

    def __init__(self, server: Server, texts: dict[str, str], options: argparse.Namespace) -> None:
        self._server, self._texts, self._options = server, texts, options
        self._chance = random.Random(options.seed)
        self._mischief = Mischief(server.port, random.Random(options.seed + 1))
        self._began = monotonic()
        self._away = 0.0  # until when the server may be away, or its answers broken
        self.found = Findings()

    async def run(self) -> None:
        """Run the whole soak."""
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
            deeds += (
                [self._kill_replica, self._update] if self._options.replicas else [self._restart]
            )
        while monotonic() < end and await self._tried(self._chance.choice(deeds)):
            await asyncio.sleep(self._chance.random() * 0.4)

    async def _send_hostile_bodies(self, end: float) -> None:
        """One after another, so that all were sent once by the time that memory counts."""
        bodies = itertools.cycle(hostile_bodies())
        send = self._mischief.send
        while monotonic() < end and await self._tried(partial(send, next(bodies), self._is_away)):
            await asyncio.sleep(0.1)

    def _is_away(self, began: float) -> bool:
        """Whether the server may have been killed since then."""
        return began <= self._away

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
        for stopped in self._chance.sample(self._server.workers(), 1):
            os.kill(stopped, signal.SIGSTOP)
            await asyncio.sleep(self._chance.choice([0.2, 1, 3]))
            os.kill(stopped, signal.SIGCONT)

    async def _jump(self) -> None:
        self._mischief.counts["jumps of the clock"] += 1
        hours = self._chance.choice(_HOURS)
        clock_file(self._options.seed).write_text(f"{3600 * hours:+d}")

    async def _kill_replica(self) -> None:
        """Kill one where there are as many as there are to be."""
        workers = self._server.workers()
        if len(workers) >= self._options.replicas:
            self._mischief.counts["replicas killed"] += 1
            self._away = monotonic() + 5
            os.kill(self._chance.choice(workers), signal.SIGKILL)

    async def _update(self) -> None:
        if len(self._server.workers()) == self._options.replicas:
            self._mischief.counts["rolling updates"] += 1
            self._server.send(signal.SIGHUP)
            await asyncio.sleep(20)

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
        """Check that nothing is held a while after the last request."""
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
        """The work and the findings so far."""
        warm = min(WARM_SECONDS, 20.0 * self._options.minutes)
        growths = round(self.found.growth(warm), 4), round(self.found.peak(warm), 4)
        growth, peak = (None, None) if self._options.kill else growths
        return {
            "minutes": round((monotonic() - self._began) / 60, 1),
            "requests": dict(self.found.requests),
            "mischief": dict(self._mischief.counts),
            "resident_megabytes": round(self.found.memory[-1][1] / 1e6, 1),
            "memory_growth": growth,
            "memory_growth_of_minutes": peak,
            "longest_wait_seconds": round(max(self.found.wait_seconds, default=0.0), 1),
            "median_wait_seconds": round(median(self.found.wait_seconds or [0.0]), 2),
            "slowest_restart_seconds": round(max(self.found.restart_seconds, default=0.0), 1),
            "faults": self.found.faults[:20],
            "num_faults": len(self.found.faults),
        }


def clock_file(seed: int) -> Path:
    """The file from which libfaketime reads the shift of the clock, in seconds."""
    return Path(f"/tmp/slipstream-soak-clock-{os.getpid()}-{seed}")


def _key(path: str, body: dict[str, Any]) -> str:
    return f"{path} {json.dumps(body, sort_keys=True)}"


async def plain_texts() -> dict[str, str]:
    """The answers of a server without a drafter, one at a time."""
    server = Single(["--no-speculation"])
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
    small = ["--num-kv-blocks", "400", "--max-num-seqs", "8"]
    server = (
        Deployment(["--replicas", str(options.replicas), *small])
        if options.replicas
        else Single(small, _fake_clock(options))
    )
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
    cli.add_argument("--replicas", type=int, help="serve by so many; --kill: kill and update them")
    cli.add_argument("--faketime", metavar="LIBRARY", help="libfaketime.so.1")
    cli.add_argument("--output", type=Path)
    raise SystemExit(asyncio.run(_main(cli.parse_args())))


if __name__ == "__main__":
    main()
