"""Replicas on this machine: routing, a replica that is killed, a rolling update, overhead.

    python -m benchmarks.replicas [routing|killed|update|overhead ...] [--conversations N]

Needs the extra `deploy`. Every server runs the demo with one thread per engine. Requests stream,
and an answer is whole where its stream ends as the protocol has it.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp

CONCURRENCY = 16
TURNS = 3
WORDS = ["def", "return", "import", "class", "value", "index", "result", "option", "reader"]
MARK = f"SLIPSTREAM_BENCHMARK={os.getpid()}"


@dataclass
class Server:
    """A running command."""

    process: subprocess.Popen[str]
    url: str


def replicas() -> list[int]:
    """The processes of replicas that this program has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            named = (folder / "cmdline").read_bytes().startswith(b"ray::ServeReplica")
            if named and MARK.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@contextmanager
def running(*command: str) -> Iterator[Server]:
    """A server of the demo, from its first answer on."""
    line = [sys.executable, "-m", "slipstream", *command, "--port", "0", "--threads", "1"]
    env = {**os.environ, MARK.split("=")[0]: MARK.split("=")[1], "COLUMNS": "200", "NO_COLOR": "1"}
    process = subprocess.Popen(
        [*line, "--disable-uvicorn-access-log", "--log-level", "warning"],
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    assert process.stderr is not None
    url = ""
    for text in process.stderr:
        if found := re.search(r"is served at (http://\S+)/v1", text):
            url = found[1]
            break
    threading.Thread(target=process.stderr.read, daemon=True).start()
    try:
        yield Server(process, url)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()


@dataclass
class Tally:
    """The outcomes of requests.

    Attributes:
        ends: whole, reported (the stream or a 503 says that a replica has died), and what must not
            be: refused or lost, by whether an event had come.
        prompt, cached: tokens.
        first: seconds to the first event.
    """

    ends: Counter[str] = field(default_factory=Counter)
    prompt: int = 0
    cached: int = 0
    first: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found in a cache."""
        return self.cached / max(self.prompt, 1)


async def ask(session: aiohttp.ClientSession, url: str, tally: Tally, **fields: Any) -> str:
    """The text of one streamed answer."""
    body = {"stream": True, "temperature": 0, "stream_options": {"include_usage": True}, **fields}
    began, text, num_events, error, done = perf_counter(), "", 0, "", False
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                error = (await answer.json())["error"]["code"]
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    done = done or line.startswith(b"data: [DONE]")
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    error = event["error"]["code"]
                    continue
                if not num_events:
                    tally.first.append(perf_counter() - began)
                num_events += 1
                text += "".join(it["delta"].get("content") or "" for it in event["choices"])
                if usage := event.get("usage"):
                    tally.prompt += usage["prompt_tokens"]
                    tally.cached += usage["prompt_tokens_details"]["cached_tokens"]
    except (aiohttp.ClientError, ConnectionError) as problem:
        error = type(problem).__name__
        done = False
    begun = "begun" if num_events else "not begun"
    if done and not error:
        tally.ends["whole"] += 1
    else:
        told = "reported" if error == "replica_lost" else f"failed ({error})"
        tally.ends[f"{begun}, {told}"] += 1
    return text


async def at_once(work: Sequence[Callable[[], Awaitable[None]]], concurrency: int) -> float:
    """Do all of it, so many at once; the seconds."""
    left = iter(work)

    async def one() -> None:
        for item in left:
            await item()

    began = perf_counter()
    await asyncio.gather(*(one() for _ in range(concurrency)))
    return perf_counter() - began


def question(source: random.Random, num_words: int = 60) -> str:
    return " ".join(source.choices(WORDS, k=num_words)) + f" {source.randrange(10**9)}"


async def converse(server: Server, number: int, tally: Tally, seed: int) -> float:
    """Hold this number of conversations of `TURNS` turns, all turns in random order."""
    source = random.Random(seed)
    told: list[list[dict[str, str]]] = [[] for _ in range(number)]
    waits = [asyncio.Lock() for _ in range(number)]
    order = [place for place in range(number) for _ in range(TURNS)]
    source.shuffle(order)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        def turn(place: int, text: str) -> Callable[[], Awaitable[None]]:
            async def run() -> None:
                async with waits[place]:
                    messages = [*told[place], {"role": "user", "content": text}]
                    answer = await ask(session, server.url, tally, messages=messages, max_tokens=12)
                    told[place] = [*messages, {"role": "assistant", "content": answer or "-"}]

            return run

        return await at_once([turn(it, question(source)) for it in order], CONCURRENCY)


async def page(server: Server) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/metrics") as answer:
        return await answer.text()


async def sent(server: Server) -> list[float]:
    """Requests that each replica was sent."""
    return [float(it) for it in re.findall(r"front_requests_total\{\S+ (\S+)", await page(server))]


async def ready(server: Server) -> int:
    """Replicas that answer."""
    return (await page(server)).count("\nslipstream:num_requests_running{")


async def routing(server: Server, number: int, name: str) -> float:
    tally = Tally()
    seconds = await converse(server, number, tally, seed=1)
    loads = await sent(server)
    print(
        f"{name}: {number} conversations, {sum(tally.ends.values())} requests in {seconds:.1f} s; "
        f"hit rate {tally.hit_rate:.3f}; requests by replica {loads}, largest/mean "
        f"{max(loads) / statistics.mean(loads):.3f}; {dict(tally.ends)}",
        flush=True,
    )
    return tally.hit_rate


async def killed(server: Server, number: int) -> None:
    """Kill a replica in the middle, and wait until there are as many again."""
    tally, size = Tally(), await ready(server)
    load = asyncio.create_task(converse(server, number, tally, seed=2))
    while sum(tally.ends.values()) < number:
        await asyncio.sleep(0.02)
    victim = replicas()[0]
    os.kill(victim, signal.SIGKILL)
    began = perf_counter()
    while victim in replicas() or await ready(server) < size:
        await asyncio.sleep(0.1)
    back = perf_counter() - began
    await load
    print(f"one of {size} killed: {dict(tally.ends)}; {size} again after {back:.1f} s", flush=True)


async def update(server: Server, number: int) -> None:
    """Replace all replicas while requests run, until `number` of them are answered."""
    tally, source = Tally(), random.Random(3)
    before, old = {*replicas()}, Counter[str]()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        server.process.send_signal(signal.SIGHUP)
        began, replaced = perf_counter(), 0.0

        async def run() -> None:
            messages = [{"role": "user", "content": question(source, 10)}]
            await ask(session, server.url, tally, messages=messages, max_tokens=8)

        while sum(tally.ends.values()) < number or not replaced:
            await at_once([run] * 100, CONCURRENCY)
            if not replaced and not before & {*replicas()}:
                replaced, old = perf_counter() - began, tally.ends.copy()
    print(
        f"rolling update: {dict(tally.ends)}, of them {sum(old.values())} in the {replaced:.1f} s "
        "until the last old replica had ended",
        flush=True,
    )


async def overhead(rounds: int) -> None:
    """One replica behind the front against the server alone, by turns."""
    with running("serve", "demo") as alone, running("deploy", "demo") as deployed:
        first: dict[str, list[float]] = {"alone": [], "deployed": []}
        rates: dict[str, list[float]] = {"alone": [], "deployed": []}
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            for turn in range(rounds + 1):
                for name, server in (("alone", alone), ("deployed", deployed)):
                    source, tally = random.Random(turn), Tally()

                    def asking(
                        url: str, tally: Tally, source: random.Random, most: int
                    ) -> Callable[[], Awaitable[None]]:
                        async def run() -> None:
                            messages = [{"role": "user", "content": question(source, 30)}]
                            await ask(session, url, tally, messages=messages, max_tokens=most)

                        return run

                    await at_once([asking(server.url, tally, source, 4)] * 40, 1)
                    seconds = await at_once(
                        [asking(server.url, Tally(), source, 48)] * 64, CONCURRENCY
                    )
                    if turn:  # the first warms up
                        first[name] += tally.first
                        rates[name].append(64 / seconds)
    times = {name: 1e3 * statistics.median(it) for name, it in first.items()}
    speeds = {name: statistics.median(it) for name, it in rates.items()}
    ratio = statistics.median(b / a for a, b in zip(*rates.values(), strict=True))
    print(
        f"first event: {times['alone']:.2f} ms alone, {times['deployed']:.2f} ms deployed; at "
        f"concurrency {CONCURRENCY}: {speeds['alone']:.1f} and {speeds['deployed']:.1f} a second, "
        f"median ratio {ratio:.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["routing", "killed", "update", "overhead"])
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=8, help="of the overhead's measurement")
    given = parser.parse_args()
    command = ["deploy", "demo", "--replicas", "3", "--replica-cpus", "0.3", "--routing"]
    if "routing" in given.parts:
        with running(*command, "round_robin") as server:
            plain = asyncio.run(routing(server, given.conversations, "round robin"))
    if {"routing", "killed", "update"} & {*given.parts}:
        with running(*command, "prefix") as server:
            if "routing" in given.parts:
                rate = asyncio.run(routing(server, given.conversations, "by prefix"))
                print(f"hit rate by prefix over round robin: {rate / plain:.2f}", flush=True)
            if "killed" in given.parts:
                asyncio.run(killed(server, given.conversations))
            if "update" in given.parts:
                asyncio.run(update(server, given.requests))
    if "overhead" in given.parts:
        asyncio.run(overhead(given.rounds))


if __name__ == "__main__":
    main()
