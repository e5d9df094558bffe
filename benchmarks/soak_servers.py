"""The servers of the soak, as processes: one alone, and replicas behind their front."""

import asyncio
import os
import resource
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic

import aiohttp

from benchmarks.replicas import MARK, replicas
from benchmarks.soak_clients import HOST

LOG_BYTES = 64 << 10  # a server's files may grow to; the demo's log is longer in a minute


class Server:
    """A served demo on a port that stays when it is started again."""

    command: tuple[str, ...]

    def __init__(self, options: list[str], environment: dict[str, str] | None = None) -> None:
        # Python takes a file of bytecode that a full disk has cut for a whole one.
        fixed = {"PYTHONDONTWRITEBYTECODE": "1"}
        self._options = options
        self._environment = {**os.environ, **(environment or {}), **fixed}
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.port = int(free.getsockname()[1])
        self.generation = 0
        self.start()

    @property
    def base(self) -> str:
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        """Start it; `ready` tells when it answers."""
        self.generation += 1
        command = [sys.executable, "-m", "slipstream", *self.command, "--threads", "1"]
        with tempfile.TemporaryFile() as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port), *self._options],
                stdout=log, stderr=log, env=self._environment, preexec_fn=self._prepare,
            )  # fmt: skip

    async def ready(self) -> None:
        """Wait for /health.

        Raises:
            RuntimeError: it ended, or did not answer within two minutes.
        """
        began = monotonic()
        async with aiohttp.ClientSession() as session:
            while self._process.poll() is None and monotonic() < began + 120:
                try:
                    async with session.get(f"{self.base}/health") as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientError:
                    await asyncio.sleep(0.2)
        raise RuntimeError(f"the server is not there (exit code {self._process.poll()})")

    @property
    def ended(self) -> bool:
        """Whether it is gone without having been asked to go."""
        return self._process.poll() is not None

    @property
    def resident(self) -> int:
        """Bytes of memory."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def send(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    async def wait(self) -> int:
        """Wait for the server to end; returns its exit code."""
        return await asyncio.to_thread(self._process.wait, 60)

    def workers(self) -> list[int]:
        """Processes that are stopped and killed."""
        return [self._process.pid]

    def _prepare(self) -> None:
        """Called in the server's process before it is one."""


class Single(Server):
    """`slipstream serve`, whose files cannot grow beyond a few lines, as if the disk were full."""

    command = ("serve", "demo")

    def _prepare(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LOG_BYTES, LOG_BYTES))


class Deployment(Server):
    """`slipstream deploy`, whose replicas are stopped and killed in place of itself.

    Its disk is not full: Ray has files of its own.
    """

    command = ("deploy", "demo", "--replica-cpus", "0.3")

    def __init__(self, options: list[str]) -> None:
        super().__init__(options, dict([MARK.split("=")]))

    def workers(self) -> list[int]:
        """The replicas that run."""
        return replicas()
