"""Clients of the soak: honest ones, whose answers are compared, and others that do not behave."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import monotonic
from typing import Any

import aiohttp

from benchmarks.hostile_bodies import HostileBody
from benchmarks.lean_client import HEAD

HOST = "127.0.0.1"
_PROMPTS = tuple(
    f"{start} {number}{end}"
    for number in range(8)
    for start, end in (("def function_", "("), ("class Name", ":\n"), ("# Part", "\nimport"))
)

_ENDS = {"message_stop", "response.completed", "response.incomplete"}


def honest_bodies() -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies, all greedy, so that one server's answers are another's."""
    bodies: list[tuple[str, dict[str, Any]]] = []
    for number, prompt in enumerate(_PROMPTS):
        most, turn = 8 + 8 * (number % 6), [{"role": "user", "content": prompt}]
        rest = {"temperature": 0, "stream": number % 2 == 0}
        bodies += [
            ("/v1/completions", {"prompt": prompt, "max_tokens": most, **rest}),
            ("/v1/chat/completions", {"messages": turn, "max_tokens": most, **rest}),
            ("/v1/messages", {"messages": turn, "max_tokens": most, **rest}),
            ("/v1/responses", {"input": prompt, "max_output_tokens": most, **rest}),
        ]
        pattern = {"guided_regex": "[a-z]{3,9} [0-9]{2}"}
        bodies.append(("/v1/completions", {"prompt": prompt, "max_tokens": 16, **rest, **pattern}))
    return bodies


class RefusalError(Exception):
    """The server said that it cannot serve now: 429 or 503 with an error document."""


class BrokenError(Exception):
    """The answer did not come whole: the connection ended, or an event reported an error."""


async def ask(session: aiohttp.ClientSession, base: str, path: str, body: Mapping[str, Any]) -> str:
    """The text of the answer, streamed or not.

    Raises:
        RefusalError: a stated one.
        BrokenError: the connection or the answer was cut off.
        ValueError: anything else that is no answer.
    """
    try:
        async with session.post(base + path, json=body) as answer:
            content = (await answer.read()).decode()
            status = answer.status
    except (aiohttp.ClientError, OSError) as error:
        raise BrokenError(type(error).__name__) from error
    if status in (429, 503):
        if "error" not in json.loads(content):
            raise ValueError(f"{status} without an error: {content[:200]}")
        raise RefusalError(str(status))
    if status != 200:
        raise ValueError(f"{status} of {path}: {content[:300]}")
    if not body["stream"]:
        return text_of(json.loads(content))
    return read_stream(content)


def read_stream(content: str) -> str:
    """The text of a streamed answer.

    Raises:
        BrokenError: it reports an error, or lacks its end.
    """
    lines = [line for line in content.splitlines() if line.startswith("data: ")]
    events = [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
    if any(event.get("error") or event.get("type") == "error" for event in events):
        raise BrokenError("error event")
    if lines[-1:] != ["data: [DONE]"] and not {event.get("type") for event in events} & _ENDS:
        raise BrokenError("the stream has no end")
    return "".join(map(_delta, events))


def _delta(event: dict[str, Any]) -> str:
    kind = event.get("type")
    if kind == "response.output_text.delta":
        return str(event["delta"])
    if kind == "content_block_delta":
        return str(event["delta"].get("text", ""))
    choices = event.get("choices") or []
    return "".join(_of_choice(choice) for choice in choices)


def _of_choice(choice: dict[str, Any]) -> str:
    inner = choice.get("delta") or choice.get("message") or {}
    return str(choice.get("text") or inner.get("content") or "")


def text_of(answer: dict[str, Any]) -> str:
    """The text of an answer that came at once."""
    if "choices" in answer:
        return "".join(map(_of_choice, answer["choices"]))
    parts = answer.get("content") or [
        part for item in answer["output"] for part in item.get("content", ())
    ]
    return "".join(str(part.get("text", "")) for part in parts)


class Mischief:
    """Clients that do not behave; what they did is counted by name."""

    def __init__(self, port: int, chance: random.Random) -> None:
        self.port, self.counts, self.faults = port, Counter[str](), list[str]()
        self._chance = chance

    async def leave(self) -> None:
        """Go away anywhere: while the request is sent, before the answer, within it."""
        self.counts["disconnects"] += 1
        body = {"prompt": f"class Name{self._chance.random()}:\n", "max_tokens": 400}
        content = json.dumps({**body, "stream": True, "n": self._chance.choice([1, 1, 2])}).encode()
        whole = HEAD % len(content) + content
        sent = self._chance.choice([len(whole), len(whole), self._chance.randrange(len(whole))])
        reader, writer = await asyncio.open_connection(HOST, self.port)
        writer.write(whole[:sent])
        with suppress(TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            async with asyncio.timeout(self._chance.choice([0, 0.1, 0.5])):
                await reader.readexactly(self._chance.randrange(1, 9000))
        if self._chance.random() < 0.5:
            writer.transport.abort()  # a reset, instead of an orderly end
        writer.close()

    async def read_slowly(self) -> None:
        """Read a long stream in sips, and leave some seconds later."""
        self.counts["slow readers"] += 1
        content = json.dumps({"prompt": "import", "max_tokens": 900, "stream": True}).encode()
        reader, writer = await asyncio.open_connection(HOST, self.port, limit=256)
        writer.write(HEAD % len(content) + content)
        with suppress(ConnectionError):
            for _ in range(20):
                await reader.read(64)
                await asyncio.sleep(0.25)
        writer.transport.abort()

    async def half_open(self) -> None:
        """Begin requests and say nothing more."""
        self.counts["half-open connections"] += 20
        writers = []
        for _ in range(20):
            _, writer = await asyncio.open_connection(HOST, self.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
            writers.append(writer)
        await asyncio.sleep(2)
        for writer in writers:
            writer.transport.abort()

    async def send(self, body: HostileBody, is_away: Callable[[float], bool]) -> None:
        """A body that is to be answered with 2xx, 4xx, or a stated 503.

        Args:
            is_away: whether the server may have been killed since a time, so that none has to come.
        """
        self.counts["hostile bodies"] += 1
        began = monotonic()
        head = (HEAD % len(body.content)).replace(b"/v1/completions", body.path.encode())
        reader, writer = await asyncio.open_connection(HOST, self.port)
        writer.write(head.replace(b"Host", b"Connection: close\r\nHost") + body.content)
        answer = b""
        with suppress(ConnectionError):
            answer = await reader.read()
        writer.close()
        status = answer.split(b" ", 2)[1].decode() if answer else "closed"
        self.counts[f"hostile bodies answered with {status}"] += 1
        excused = status == "503" or (status == "closed" and is_away(began))
        if status[0] not in "24" and not excused:
            self.faults.append(f"{status} for {body.name}")
