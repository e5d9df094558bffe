"""A server on loopback, in a thread of this process."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import uvicorn

from slipstream.core.config import EngineConfig
from slipstream.engine.build import build_engine
from slipstream.engine.engine import Engine
from slipstream.serve.app import create_app
from slipstream.serve.engine_thread import EngineThread
from slipstream.serve.limits import ServeLimits
from slipstream.serve.listening import connection_class
from slipstream.serve.model_service import ModelService
from slipstream.serve.options import AnswerOptions
from slipstream.serve.run import Access, guarded

DEMO = EngineConfig(
    model="demo",
    speculative_config={"model": "demo/draft", "num_speculative_tokens": 4},
    max_num_seqs=16,
    num_kv_blocks=1024,
    threads=1,
)


@dataclass(frozen=True)
class Live:
    """A server that listens."""

    url: str
    model: ModelService

    @property
    def engine(self) -> Engine:
        return self.model.engine


def call_api(create: Callable[..., Any], **fields: Any) -> Any:
    """Call a method of the openai client; fields that it does not have go into the body."""
    known = signature(create).parameters
    extra = {name: fields.pop(name) for name in [*fields] if name not in known}
    return create(**fields, extra_body=extra)


class _Server(uvicorn.Server):
    """Starts the engine's thread on its own loop."""

    def __init__(self, config: uvicorn.Config, thread: EngineThread) -> None:
        super().__init__(config)
        self._thread = thread

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._thread.start()
        try:
            await super().serve(sockets)
        finally:
            await self._thread.stop()


@contextmanager
def serving(
    config: EngineConfig = DEMO,
    names: tuple[str, ...] = ("demo",),
    limits: ServeLimits | None = None,
    access: Access | None = None,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
    answers: AnswerOptions | None = None,
) -> Iterator[Live]:
    """A server until the end of the block."""
    limits, engine = limits or ServeLimits(), build_engine(config)
    thread = EngineThread(engine, limits)
    model = ModelService(
        names=names,
        config=config,
        engine=engine,
        thread=thread,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        answers=answers or AnswerOptions(),
    )
    app, _ = guarded(create_app(model), limits, access or Access())
    sock = socket.create_server(("127.0.0.1", 0))
    server = _Server(
        uvicorn.Config(app, log_config=None, ws="none", http=connection_class(limits)), thread
    )
    runner = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    runner.start()
    try:
        yield Live(f"http://127.0.0.1:{sock.getsockname()[1]}", model)
    finally:
        server.should_exit = True
        runner.join()
        sock.close()
