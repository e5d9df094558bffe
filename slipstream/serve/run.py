"""Listening, and stopping in good order."""

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from slipstream.core.errors import UsageError
from slipstream.serve.connections import connection_class
from slipstream.serve.engine_thread import EngineThread
from slipstream.serve.guards import ApiKeys, Bodies, Door
from slipstream.serve.limits import ServeLimits
from slipstream.serve.logs import RequestIds
from slipstream.serve.memory import give_back_memory, leave_out_of_collections, share_memory
from slipstream.serve.prefix import UnderPrefix

logger = logging.getLogger("slipstream.serve")

_BACKLOG = 4096
_SPARE_FILES = 256  # besides connections
_FLUSH_SECONDS = 10  # for answers that are complete but not read yet
_LAST_SECONDS = 1  # the same where the server is to stop at once


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may use the server.

    Args:
        api_keys: any of them lets in; without one everybody is let in.
        allowed_origins: web pages of these origins may use it ("*": of all); none by default.
        open_paths: what needs no key.
    """

    api_keys: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    open_paths: Collection[str] = ("/health",)

    def __post_init__(self) -> None:
        if not all(key.strip() == key and key.isascii() and key for key in self.api_keys):
            raise UsageError("an API key must not be empty, and be ASCII without spaces around it")


@dataclass(frozen=True, kw_only=True)
class Front:
    """How the server looks from outside.

    Args:
        certificate, key: files of PEM, for TLS; the key may stand in the file of the certificate.
        root_path: the path under which a proxy shows the server.

    Raises:
        UsageError: the files are no certificate with its key, or the path is none.
    """

    certificate: Path | None = None
    key: Path | None = None
    root_path: str = ""

    def __post_init__(self) -> None:
        if self.root_path and (not self.root_path.startswith("/") or self.root_path[-1] == "/"):
            raise UsageError(
                f"--root-path must begin with a slash and not end with one, not {self.root_path!r}"
            )
        if self.certificate is None:
            if self.key is not None:
                raise UsageError("--ssl-keyfile goes with --ssl-certfile; give both")
            return
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                self.certificate, self.key, password=_no_password
            )
        except (OSError, ValueError) as error:
            raise UsageError(
                f"--ssl-certfile {self.certificate} with --ssl-keyfile {self.key} cannot be used: "
                f"{error}"
            ) from None


def _no_password() -> str:
    """Instead of a question on the terminal, which a server must not ask."""
    raise ValueError("the key is encrypted; give one that is not")


def bind(host: str, port: int) -> socket.socket:
    """The socket to listen on; UsageError where that is not possible.

    Before a model is loaded, so that a port in use is known at once. Nobody can connect until the
    server listens on it.
    """
    try:
        return _bound(host, port)
    except (OSError, OverflowError) as error:
        raise _cannot_listen(host, port, error) from error


def listen(sock: socket.socket) -> None:
    """Let clients connect: who comes before the loop turns waits.

    Raises UsageError where another server, which was bound at the same time, listens already.
    """
    try:
        sock.listen()
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: Exception) -> UsageError:
    return UsageError(f"cannot listen on {host}:{port} ({error}); choose another --host or --port")


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


def guarded(app: ASGIApp, limits: ServeLimits, access: Access) -> tuple[ASGIApp, Door]:
    """The application behind everything that protects it, and its door."""
    door = Door(app)
    whole: ASGIApp = Bodies(door, limits)
    if access.api_keys:
        whole = ApiKeys(whole, access.api_keys, access.open_paths)
    if access.allowed_origins:
        whole = CORSMiddleware(
            whole,
            allow_origins=access.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return RequestIds(whole), door


def serve(
    app: ASGIApp,
    thread: EngineThread,
    sock: socket.socket,
    limits: ServeLimits,
    access: Access,
    front: Front,
) -> int:
    """Serve until a signal ends it; the exit code, which is 1 where requests were cut off.

    The first SIGTERM or SIGINT lets what runs finish, while new requests are answered with 503;
    the second stops at once.
    """
    share_memory()
    leave_out_of_collections()
    _allow_files(limits.max_connections + _SPARE_FILES)
    whole, door = guarded(app, limits, access)
    if front.root_path:
        whole = UnderPrefix(whole, front.root_path)
    config = uvicorn.Config(
        whole,
        http=connection_class(limits),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=round(limits.keep_alive_timeout),
        timeout_graceful_shutdown=_FLUSH_SECONDS,
        backlog=_BACKLOG,
        ssl_certfile=front.certificate,
        ssl_keyfile=front.key,
    )
    server = _Server(config, thread, door, limits.drain_timeout)
    server.run(sockets=[sock])
    return server.exit_code


class _Server(uvicorn.Server):
    """Drains before it stops."""

    def __init__(
        self, config: uvicorn.Config, thread: EngineThread, door: Door, patience: float | None
    ) -> None:
        super().__init__(config)
        self._engine_thread, self._door, self._patience = thread, door, patience
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._num_signals = 0
        self.exit_code = 0

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Run the engine's thread as long as the server."""
        self._loop = asyncio.get_running_loop()
        self._engine_thread.start()
        memory = asyncio.create_task(give_back_memory(lambda: self._door.empty, self._work_done))
        try:
            await super().serve(sockets)
        finally:
            memory.cancel()
            await self._engine_thread.stop()

    def _work_done(self) -> tuple[int, int]:
        return self.server_state.total_requests, len(self.server_state.connections)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of the first signal: begin to drain; of the second: stop; of the third: drop all."""
        self._num_signals += 1
        if self._loop is None or not self.started or self._num_signals > 2:
            self.exit_code = 1
            self.should_exit = self.force_exit = True
            return
        begin = self._start_draining if self._num_signals == 1 else self._start_stopping
        self._loop.call_soon_threadsafe(begin)

    def _start_draining(self) -> None:
        self._draining = asyncio.create_task(self._drain())

    def _start_stopping(self) -> None:
        self._stopping = asyncio.create_task(self._stop())

    async def _drain(self) -> None:
        logger.info(
            "stopping: %d requests run to their end (a second signal stops at once)",
            self._engine_thread.num_open,
        )
        try:
            async with asyncio.timeout(self._patience):
                await self._door.close()
                await self._engine_thread.drain()
        except TimeoutError:
            await self._stop()
        self.should_exit = True

    async def _stop(self) -> None:
        """End what runs; its clients are told so."""
        logger.warning("%d requests are cut off", self._engine_thread.num_open)
        self.exit_code, self.config.timeout_graceful_shutdown = 1, _LAST_SECONDS
        await self._engine_thread.stop()
        self.should_exit = True


def _allow_files(number: int) -> None:
    """Every connection is an open file, of which there are few by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        number = min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
