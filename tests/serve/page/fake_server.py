"""A server of recorded chunks: the page's routes, and as much of the protocol as the page speaks.

Words in a prompt make it misbehave: `#busy`, `#wrong`, `#broken`, `#endless`, `#failed`, `#other`.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from slipstream.serve.page import page_routes

RECORDINGS = json.loads((Path(__file__).parent / "recordings.json").read_text())
K = 4
# Long enough to see a text grow, short enough for a test.
PASS_SECONDS = 0.002


@dataclass
class FakeServer:
    """A server with scripted answers, which records requests."""

    url: str = ""
    key: str | None = None
    has_drafter: bool = True
    adaptive: bool = False
    has_template: bool = False
    max_images: int = 0
    speedup: float | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_gone: int = 0  # clients that left in the middle of a stream

    def reset(self) -> None:
        self.key, self.has_drafter, self.num_gone, self.speedup = None, True, 0, None
        self.has_template, self.max_images, self.adaptive = False, 0, False
        self.bodies.clear()

    async def models(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        drafter = {"method": "draft_model", "model": "demo/draft", "num_speculative_tokens": K}
        drafter["adaptive"] = self.adaptive
        entry = {
            "id": "demo",
            "object": "model",
            "max_model_len": 2048,
            "has_chat_template": self.has_template,
            "max_images": self.max_images,
            "speculative": drafter if self.has_drafter else None,
        }
        return JSONResponse({"object": "list", "data": [entry]})

    async def generate(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        body = await request.json()
        self.bodies.append(body)
        chat = "messages" in body
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        if "#busy" in prompt:
            return _error(429, "64 requests are waiting already", headers={"Retry-After": "3"})
        if "#wrong" in prompt:
            return _error(400, "max_tokens must be at most 2048", param="max_tokens")
        chunks = self._chunks(body, prompt, chat)
        return StreamingResponse(chunks, media_type="text/event-stream")

    def _refusal(self, request: Request) -> Response | None:
        if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return _error(401, "give an API key as a bearer token")

    async def _chunks(self, body: dict[str, Any], prompt: str, chat: bool) -> AsyncIterator[bytes]:
        most = body["speculative"]["num_speculative_tokens"]
        limit = body.get("max_completion_tokens") or body["max_tokens"]
        tokens = RECORDINGS["chat" if chat else "completion"]["tokens"]
        if "#endless" in prompt:
            tokens, limit = tokens * 1000, 10**9
        steps = list(_steps(tokens[:limit], most, "#other" in prompt))
        try:
            for index, step in enumerate(steps):
                last = index == len(steps) - 1
                yield _event(_chunk(step, chat, "length" if last else None))
                await asyncio.sleep(PASS_SECONDS)
                if index == 5 and "#broken" in prompt:
                    return
                if index == 5 and "#failed" in prompt:
                    yield _event({"error": {"message": "this request failed", "code": 500}})
                    return
            yield _event({"choices": [], "usage": _usage(steps, most, self.speedup)})
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.num_gone += 1
            raise


@contextmanager
def serving() -> Iterator[FakeServer]:
    """A fake server on a free port of this machine, in another thread."""
    fake = FakeServer()
    app = Starlette(
        routes=[
            *page_routes(),
            Route("/v1/models", fake.models),
            Route("/v1/completions", fake.generate, methods=["POST"]),
            Route("/v1/chat/completions", fake.generate, methods=["POST"]),
        ]
    )
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_level="error", ws="none", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the fake server did not start"
        threading.Event().wait(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    fake.url = f"http://127.0.0.1:{port}/"
    try:
        yield fake
    finally:
        server.should_exit = True
        thread.join(10)


Step = list[dict[str, Any]]


def _steps(tokens: list[list[Any]], most: int, other: bool) -> Iterator[Step]:
    """Tokens by the step that gives them; one by one without drafts."""
    step: Step = []
    for text, kind, position, logprob in tokens:
        if most == 0:
            shown = text.upper() if other else text
            yield [{"text": shown, "kind": "plain", "position": None, "logprob": logprob}]
            continue
        step.append({"text": text, "kind": kind, "position": position, "logprob": logprob})
        if kind != "accepted":
            yield step
            step = []
    if step:
        yield step


def _chunk(step: Step, chat: bool, finish_reason: str | None) -> dict[str, Any]:
    text = "".join(token["text"] for token in step)
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": finish_reason,
        "speculation": {"tokens": step},
    }
    others = [{token["text"]: token["logprob"], "other": -3.0} for token in step]
    if chat:
        content = [
            {
                "token": token["text"],
                "logprob": token["logprob"],
                "top_logprobs": [{"token": key, "logprob": value} for key, value in other.items()],
            }
            for token, other in zip(step, others, strict=True)
        ]
        choice |= {"delta": {"content": text}, "logprobs": {"content": content}}
    else:
        choice |= {"text": text, "logprobs": {"top_logprobs": others}}
    return {"choices": [choice]}


def _usage(steps: list[Step], most: int, speedup: float | None) -> dict[str, Any]:
    drafts = [step for step in steps if most and step[-1]["kind"] != "plain"]
    accepted = [sum(token["kind"] == "accepted" for token in step) for step in drafts]
    return {
        "completion_tokens": sum(map(len, steps)),
        "speculation": {
            "drafts": len(drafts),
            "draft_tokens": len(drafts) * most,
            "accepted_tokens": sum(accepted),
            "accepted_per_position": [sum(n > p for n in accepted) for p in range(most)],
            "steps": len(steps),
            "acceptance_length": 1 + sum(accepted) / max(len(drafts), 1),
            "estimated_speedup": speedup,
            "refused_drafting_seconds": 0.0 if speedup is None else 0.25,
        },
    }


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def _error(
    status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    error = {"message": message, "type": "error", "param": param, "code": status}
    return JSONResponse({"error": error}, status, headers=headers)
