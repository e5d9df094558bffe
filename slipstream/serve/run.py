"""Run a server: its options, draining and stopping."""

import asyncio
import logging
import resource
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from slipstream.core.config import EngineConfig
from slipstream.core.errors import UsageError
from slipstream.engine.engine import Engine
from slipstream.serve.adapters import NamedPath, load_modules
from slipstream.serve.app import create_app
from slipstream.serve.conversation import require_defaults
from slipstream.serve.engine_thread import EngineThread
from slipstream.serve.limits import ServeLimits
from slipstream.serve.listening import Tls, connection_class
from slipstream.serve.logs import RequestIds, set_up_logs
from slipstream.serve.memory import freeze_garbage_collection, return_memory, share_arenas
from slipstream.serve.metrics import ServerMetrics
from slipstream.serve.middleware import ApiKeyCheck, BodyLimits, DrainGate, RootPath
from slipstream.serve.model_service import ModelService
from slipstream.serve.observers import ActivityLog, Observer
from slipstream.serve.options import AnswerOptions, LogOptions

logger = logging.getLogger("slipstream.serve")

_BACKLOG = 4096
_SPARE_FILES = 256  # besides connections
_FLUSH_SECONDS = 10  # for answers that are complete but not yet read
_LAST_FLUSH_SECONDS = 1  # the same after a second signal


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may use the server.

    Args:
        api_keys: requests must have one of them; without any, all requests are accepted.
        allowed_origins: origins whose web pages may use the server ("*": all); none by default.
        allowed_methods, allowed_headers: that these pages may use ("*": all).
        allow_credentials: these pages' requests may carry cookies and the like.
        open_paths: paths that need no key.
    """

    api_keys: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    allowed_methods: Sequence[str] = ("GET", "POST")
    allowed_headers: Sequence[str] = ("*",)
    allow_credentials: bool = False
    open_paths: Collection[str] = ("/health", "/ping")

    def __post_init__(self) -> None:
        if not all(key.strip() == key and key.isascii() and key for key in self.api_keys):
            raise UsageError("an API key must be non-empty ASCII text without spaces around it")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How to serve.

    Args:
        names: of the model in requests; at least one.
        tls: how connections are encrypted; None: they are not.
        root_path: path under which a proxy offers the server.
        tool_call_parser, reasoning_parser: as of `ModelService`.
        chat_template: replaces the checkpoint's.
        profiles: folder for traces; clients may profile the engine if there is one.
        adapters: those that are there from the start.
        answers, log: how answers are written, and what is logged.
        show_document: /openapi.json exists.
        replica: tells this server from others with the same model; ids of responses have it.

    Raises:
        UsageError: the root path is not a path.
    """

    names: Sequence[str]
    limits: ServeLimits
    access: Access
    tls: Tls | None = None
    root_path: str = ""
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    chat_template: str | None = None
    profiles: Path | None = None
    adapters: Sequence[NamedPath] = ()
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    log: LogOptions = field(default_factory=LogOptions)
    show_document: bool = True
    replica: str = ""

    def __post_init__(self) -> None:
        if self.root_path and (not self.root_path.startswith("/") or self.root_path[-1] == "/"):
            raise UsageError(
                f"--root-path must begin with a slash and not end with one, not {self.root_path!r}"
            )


class Work(Protocol):
    """What runs beside a server's connections."""

    @property
    def num_open(self) -> int:
        """Answers that are not complete."""

    def start(self) -> None:
        """Begin; called on the event loop."""

    async def drain(self) -> None:
        """Take on nothing new; returns when nothing is open."""

    async def stop(self) -> None:
        """End everything now."""


def start_server(
    engine: Engine,
    config: EngineConfig,
    options: ServerOptions,
    sock: socket.socket,
    pages: Sequence[Route] = (),
    ready: Callable[[], None] = lambda: None,
) -> int:
    """Serve until a signal ends it; the exit code, which is 1 where requests were cut off.

    The first SIGTERM or SIGINT lets running requests finish, while new ones are refused with 503;
    the second stops at once.

    Args:
        config: that the engine was built from.
        sock: to listen on.
        pages: routes besides those of the protocol, such as the playground's.
        ready: called when adapters are loaded and all options are known to fit the model.
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
    """A server that is not started, and the thread that it runs the engine on."""
    set_up_logs(options.log)
    load_modules(engine, options.names, options.adapters)
    metrics = ServerMetrics(engine, options.names[0], options.log.metrics_prefix == "vllm")
    observers: list[Observer] = [metrics, ActivityLog(options.log), *more_observers]
    thread = EngineThread(engine, options.limits, observers)
    service = ModelService(
        names=options.names,
        config=config,
        engine=engine,
        thread=thread,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        chat_template=options.chat_template,
        answers=options.answers,
        replica=options.replica,
    )
    if engine.tokenizer is not None:
        _ = service.output_format  # flags that do not fit the model are told now
        require_defaults(service)
    if logger.isEnabledFor(logging.DEBUG):
        _log_tools(service)
    # The playground asks its user for the key.
    open_paths = (*options.access.open_paths, *(page.path for page in pages))
    access = replace(options.access, open_paths=open_paths)
    app, gate = guarded(
        create_app(service, metrics, pages, options.profiles, options.show_document),
        options.limits,
        access,
        metrics,
    )
    if options.root_path:
        app = RootPath(app, options.root_path)
    share_arenas()
    freeze_garbage_collection()
    server = DrainingServer(app, options, thread, gate)
    engine.ranks.watch(server.end_at_once)
    return server, thread


def guarded(
    app: ASGIApp, limits: ServeLimits, access: Access, metrics: ServerMetrics | None = None
) -> tuple[ASGIApp, DrainGate]:
    """The application behind its middleware, and the gate that drains it."""
    gate = DrainGate(app)
    whole: ASGIApp = BodyLimits(gate, limits)
    if access.api_keys:
        whole = ApiKeyCheck(whole, access.api_keys, access.open_paths)
    if access.allowed_origins:
        whole = CORSMiddleware(
            whole,
            allow_origins=access.allowed_origins,
            allow_methods=access.allowed_methods,
            allow_headers=access.allowed_headers,
            allow_credentials=access.allow_credentials,
            expose_headers=["x-request-id", "retry-after"],
        )
    if metrics is None:
        return RequestIds(whole), gate
    return RequestIds(whole, metrics.count_answer), gate


def _uvicorn_config(app: ASGIApp, options: ServerOptions) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=connection_class(options.limits),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=round(options.limits.keep_alive_timeout),
        timeout_graceful_shutdown=_FLUSH_SECONDS,
        backlog=_BACKLOG,
        **({} if options.tls is None else options.tls.options()),
    )


class DrainingServer(uvicorn.Server):
    """Drains before it stops.

    Args:
        work: runs as long as the server.
        gate: within the application.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions, work: Work, gate: DrainGate) -> None:
        _allow_open_files(options.limits.max_connections + _SPARE_FILES)
        super().__init__(_uvicorn_config(app, options))
        self._work, self._gate, self._drain_timeout = work, gate, options.limits.drain_timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []  # draining, then stopping
        self._num_signals = 0
        self.exit_code = 0

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Run the work as long as the server."""
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
        """Drain at the first signal, stop at the second, drop everything at the third."""
        self._num_signals += 1
        if self._loop is None or not self.started or self._num_signals > 2:
            self.exit_code = 1
            self.should_exit = self.force_exit = True
            return
        self._loop.call_soon_threadsafe(self._begin_ending)

    def end_at_once(self, why: str) -> None:
        """End all requests and then the server, with exit code 1; called from any thread: the
        engine is lost for good."""
        logger.critical("%s; the server ends", why)
        self.exit_code, self.config.timeout_graceful_shutdown = 1, _LAST_FLUSH_SECONDS
        if self._loop is None or not self.started:
            self.should_exit = True
            return
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(
                lambda: self._tasks.append(asyncio.create_task(self._stop()))
            )

    def _begin_ending(self) -> None:
        ending = self._stop() if self._tasks else self.drain()
        self._tasks.append(asyncio.create_task(ending))

    async def drain(self) -> None:
        """Let running requests finish and refuse new ones, then end the server."""
        logger.info(
            "stopping: %d running requests may finish (a second signal stops at once)",
            self._work.num_open,
        )
        try:
            async with asyncio.timeout(self._drain_timeout):
                await self._gate.close()
                await self._work.drain()
        except TimeoutError:
            await self._stop()
        self.should_exit = True

    async def _stop(self) -> None:
        """End all requests; their clients get an error."""
        logger.warning("%d requests are cut off", self._work.num_open)
        self.exit_code, self.config.timeout_graceful_shutdown = 1, _LAST_FLUSH_SECONDS
        await self._work.stop()
        self.should_exit = True


def _log_tools(service: ModelService) -> None:
    """Log how the model is told of tools, and in which format its calls are read."""
    if service.engine.tokenizer is None or not service.template.exists:
        return
    format = service.tool_format
    logger.debug(
        "tool calls are read in the format %s; %s",
        "none, as it is not known" if format is None else format.name,
        "the chat template tells the model of tools"
        if service.template_knows_tools
        else "the chat template knows no tools, so messages tell the model of them",
    )


def _allow_open_files(number: int) -> None:
    """Every connection is an open file, of which the default limit allows few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        number = min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
