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
from slipstream.serve.listening import connection_class
from slipstream.serve.metrics import ServerMetrics
from slipstream.serve.model_service import ModelService
from slipstream.serve.options import ServerOptions
from slipstream.serve.run import guarded

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


@contextmanager
def messages_of(live: Live) -> Iterator[Any]:
    """Messages of a client whose 3,000 modules are read only where tests of it run."""
    import anthropic

    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as client:
        yield client.messages


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
    **given: Any,
) -> Iterator[Live]:
    """A server until the end of the block; `given` are fields of its options."""
    options, engine = ServerOptions(served_model_name=names, **given), build_engine(config)
    thread = EngineThread(engine, options.limits)
    model = ModelService(
        options=options,
        config=config,
        engine=engine,
        thread=thread,
    )
    app, _ = guarded(create_app(model, ServerMetrics(engine, names[0])), options)
    sock = socket.create_server(("127.0.0.1", 0))
    server = _Server(
        uvicorn.Config(app, log_config=None, ws="none", http=connection_class(options.limits)),
        thread,
    )
    runner = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    runner.start()
    try:
        yield Live(f"http://127.0.0.1:{sock.getsockname()[1]}", model)
    finally:
        server.should_exit = True
        runner.join()
        sock.close()
