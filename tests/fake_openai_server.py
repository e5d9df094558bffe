"""A server of the OpenAI protocol that answers from a script, for tests of its clients."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Body = Mapping[str, Any]


@dataclass
class Script:
    """The behaviour of the server.

    Attributes:
        events: what an answer's stream consists of: objects become `data:` lines, bytes are sent
            as they are; an int is a status to answer with instead.
        model: the entry of /v1/models.
        pages: bodies of /metrics, one after another, the last again and again; none is a 404.
        asked: bodies of the requests so far, with their path.
    """

    events: Callable[[Body], Sequence[Any] | int] = lambda body: answer("Hello")
    model: dict[str, Any] = field(default_factory=lambda: {"id": "fake"})
    pages: list[str] = field(default_factory=list)
    asked: list[tuple[str, Body]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    profiler: list[str] = field(default_factory=list)
    has_profiler: bool = False


def completion(text: str, **more: Any) -> dict[str, Any]:
    """An event of /v1/completions."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": None, **more}]}


def delta(text: str, **more: Any) -> dict[str, Any]:
    """An event of /v1/chat/completions."""
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None, **more}]}


def usage(prompt: int, output: int, **more: Any) -> dict[str, Any]:
    """The last event, with counts."""
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output, **more}}


def answer(text: str, tokens_each: int = 2) -> list[Any]:
    """A text in pieces of so many letters, a letter a token, with usage and end."""
    pieces = [text[start : start + tokens_each] for start in range(0, len(text), tokens_each)]
    events: list[Any] = [completion(piece) for piece in pieces]
    events[-1]["choices"][0]["finish_reason"] = "length"
    return [*events, usage(3, len(text)), b"data: [DONE]\n\n"]


@contextmanager
def serving(script: Script) -> Iterator[str]:
    """The address of a server that follows the script."""
    loop = asyncio.new_event_loop()
    started: list[tuple[web.AppRunner, int]] = []

    async def start() -> None:
        runner = web.AppRunner(_app(script), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        started.append((runner, runner.addresses[0][1]))

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runner, port = started[0]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _app(script: Script) -> web.Application:
    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [script.model]})

    async def metrics(request: web.Request) -> web.Response:
        if not script.pages:
            return web.Response(status=404)
        page = script.pages.pop(0) if len(script.pages) > 1 else script.pages[0]
        return web.Response(text=page)

    async def profiler(request: web.Request) -> web.Response:
        script.profiler.append(request.path)
        return web.Response(status=200 if script.has_profiler else 404)

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        script.asked.append((request.path, body))
        script.headers.append(dict(request.headers))
        events = script.events(body)
        if isinstance(events, int):
            error = {"message": "the queue is full", "type": "rate_limit_error", "code": events}
            return web.json_response({"error": error}, status=events)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for data in _sent(events):
            await response.write(data)
        return response

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_get("/metrics", metrics)
    app.router.add_post("/start_profile", profiler)
    app.router.add_post("/stop_profile", profiler)
    app.router.add_post("/v1/completions", complete)
    app.router.add_post("/v1/chat/completions", complete)
    return app


async def _sent(events: Sequence[Any]) -> AsyncIterator[bytes]:
    for event in events:
        if event is None:  # never ends
            await asyncio.sleep(3600)
        elif isinstance(event, bytes):
            yield event
        else:
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
