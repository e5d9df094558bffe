"""Runs a server: start, draining and shutdown."""

import asyncio
import logging
import resource
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from slipstream.core.config import EngineConfig
from slipstream.core.errors import counted
from slipstream.engine.engine import Engine
from slipstream.serve.adapters import load_modules, parse_modules
from slipstream.serve.app import create_app
from slipstream.serve.conversation import require_defaults
from slipstream.serve.engine_thread import EngineThread
from slipstream.serve.listening import connection_class, tls_options
from slipstream.serve.logs import RequestIds, set_up_logs
from slipstream.serve.memory import freeze_garbage_collection, return_memory, share_arenas
from slipstream.serve.metrics import ServerMetrics
from slipstream.serve.middleware import ApiKeyCheck, BodyLimits, DrainGate, RootPath
from slipstream.serve.model_service import ModelService
from slipstream.serve.observers import ActivityLog, Observer
from slipstream.serve.options import ServerOptions

logger = logging.getLogger("slipstream.serve")

_BACKLOG = 4096
_SPARE_FILES = 256  # open files besides connections
_FLUSH_SECONDS = 10  # time to send answers that are complete
_LAST_FLUSH_SECONDS = 1  # as above, when requests were aborted


class Work(Protocol):
    """Work that a server starts, drains and stops together with its connections."""

    @property
    def num_open(self) -> int:
        """Number of answers that are not complete."""

    def start(self) -> None:
        """Start the work; called on the event loop."""

    async def drain(self) -> None:
        """Refuse new work, and wait until all open work is done."""

    async def stop(self) -> None:
        """Abort all open work."""


def start_server(
    engine: Engine,
    config: EngineConfig,
    options: ServerOptions,
    sock: socket.socket,
    pages: Sequence[Route] = (),
    ready: Callable[[], None] = lambda: None,
) -> int:
    """Serve until a signal stops the server; returns the exit code, 1 if requests were aborted.

    After the first SIGTERM or SIGINT, running requests may finish and new ones are refused with
    503. The second signal aborts running requests.

    Args:
        pages: routes besides those of the protocol, such as the playground's.
        ready: called when adapters are loaded and options have been checked against the model.
    """
    server, _ = engine_server(engine, config, options, pages)
    ready()
    server.run(sockets=[sock])
    return server.exit_code


def engine_server(
    engine: Engine,
    config: EngineConfig,
    options: ServerOptions,
    pages: Sequence[Route] = (),
    more_observers: Sequence[Observer] = (),
) -> tuple["DrainingServer", EngineThread]:
    """Create a server and its engine thread, without starting them."""
    set_up_logs(options.log)
    names = options.served_model_name
    load_modules(engine, names, parse_modules(options.lora_modules))
    metrics = ServerMetrics(engine, names[0], options.log.metrics_prefix == "vllm")
    observers: list[Observer] = [metrics, ActivityLog(options.log), *more_observers]
    thread = EngineThread(engine, options.limits, observers)
    service = ModelService(options=options, config=config, engine=engine, thread=thread)
    if engine.tokenizer is not None:
        _ = service.output_format  # raises for flags that do not fit the model
        require_defaults(service)
    if logger.isEnabledFor(logging.DEBUG):
        _log_tools(service)
    made = create_app(service, metrics, pages)
    # Pages need no key: the playground asks its user for one.
    app, gate = guarded(made, options, metrics.count_answer, [page.path for page in pages])
    if options.root_path:
        app = RootPath(app, options.root_path)
    share_arenas()
    freeze_garbage_collection()
    server = DrainingServer(app, options, thread, gate)
    engine.ranks.watch(server.end_at_once)
    return server, thread


def guarded(
    app: ASGIApp,
    options: ServerOptions,
    answered: Callable[[str, int], None] | None = None,
    open_paths: Sequence[str] = (),
) -> tuple[ASGIApp, DrainGate]:
    """Wrap the application in its middleware; returns it with the gate that drains it.

    Args:
        answered: see `RequestIds`.
        open_paths: paths that need no key, besides those that tell whether the server runs.
    """
    gate = DrainGate(app)
    whole: ASGIApp = BodyLimits(gate, options.limits)
    if options.api_key:
        whole = ApiKeyCheck(whole, options.api_key, ("/health", "/ping", *open_paths))
    if options.allowed_origins:
        whole = CORSMiddleware(
            whole,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods or ("GET", "POST"),
            allow_headers=options.allowed_headers or ("*",),
            allow_credentials=options.allow_credentials,
            expose_headers=["x-request-id", "retry-after"],
        )
    return RequestIds(whole, answered), gate


class DrainingServer(uvicorn.Server):
    """A uvicorn server that finishes running requests before it stops.

    Args:
        work: started and stopped with the server.
        gate: the gate of `app`, see `guarded`.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions, work: Work, gate: DrainGate) -> None:
        _allow_open_files(options.limits.max_connections + _SPARE_FILES)
        config = uvicorn.Config(
            app,
            http=connection_class(options.limits),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=round(options.limits.keep_alive_timeout),
            timeout_graceful_shutdown=_FLUSH_SECONDS,
            backlog=_BACKLOG,
            **tls_options(options),
        )
        super().__init__(config)
        self._work, self._gate, self._drain_timeout = work, gate, options.limits.drain_timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []  # draining, then stopping
        self._num_signals = 0
        self.exit_code = 0

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the work, serve until the server stops, and stop the work."""
        self._loop = asyncio.get_running_loop()
        self._work.start()
        memory = asyncio.create_task(return_memory(lambda: self._gate.empty, self._work_done))
        try:
            await super().serve(sockets)
        finally:
            memory.cancel()
            await self._work.stop()

    def _work_done(self) -> tuple[int, int]:
        return self.server_state.total_requests, len(self.server_state.connections)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, abort requests at the second, exit at the third."""
        self._num_signals += 1
        if self._loop is None or not self.started or self._num_signals > 2:
            self.exit_code = 1
            self.should_exit = self.force_exit = True
            return
        self._loop.call_soon_threadsafe(
            lambda: self._begin(self._stop() if self._tasks else self.drain())
        )

    def _begin(self, ending: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(ending))

    def end_at_once(self, why: str) -> None:
        """Abort all requests and stop the server with exit code 1, because the engine cannot
        recover. Thread-safe."""
        logger.critical("%s; the server ends", why)
        self.exit_code, self.config.timeout_graceful_shutdown = 1, _LAST_FLUSH_SECONDS
        if self._loop is None or not self.started:
            self.should_exit = True
            return
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(lambda: self._begin(self._stop()))

    async def drain(self) -> None:
        """Refuse new requests, let running ones finish, then stop the server."""
        logger.info(
            "stopping: %s may finish (a second signal stops at once)",
            counted(self._work.num_open, "running request"),
        )
        try:
            async with asyncio.timeout(self._drain_timeout):
                await self._gate.close()
                await self._work.drain()
        except TimeoutError:
            await self._stop()
        self.should_exit = True

    async def _stop(self) -> None:
        """Abort all requests, whose clients get an error, and stop the server."""
        logger.warning("cut off: %s", counted(self._work.num_open, "request"))
        self.exit_code, self.config.timeout_graceful_shutdown = 1, _LAST_FLUSH_SECONDS
        await self._work.stop()
        self.should_exit = True


def _log_tools(service: ModelService) -> None:
    if service.engine.tokenizer is None or not service.template.exists:
        return
    format = service.tool_format
    logger.debug(
        "tool calls are read in the format %s; %s",
        "none, as it is not known" if format is None else format.name,
        "the chat template tells the model of tools"
        if service.template_knows_tools
        else "the chat template does not support tools, so they are described in messages",
    )


def _allow_open_files(number: int) -> None:
    """Raise the limit of open files, because every connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        number = min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
