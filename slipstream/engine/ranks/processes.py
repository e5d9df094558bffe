"""Starts, watches and ends the processes of the ranks other than 0."""

import fcntl
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from socket import socketpair
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

import torch

from slipstream.core.errors import RanksLostError
from slipstream.runner.collectives import Collectives, open_store

FOLLOWER = "slipstream.engine.ranks.follower"
READY, SETTLED = "ready", "settled"  # messages of followers
_START_SECONDS = 120.0
_LOSS_SECONDS = 2.0  # to find out which rank has ended
_END_SECONDS = 3.0  # for followers to exit by themselves
_STOPPED_SECONDS = 2.0  # a rank that a signal has stopped for longer is lost


_GONE_ON = os.WEXITED | os.WCONTINUED | os.WNOHANG


class Process:
    """A follower in a fresh interpreter: it inherits no state and does not run the main module.

    The follower exits when this process closes its end of either pipe; the system closes both when
    this process dies.
    """

    def __init__(self, rank: int, size: int, port: int, device: torch.device) -> None:
        own, theirs = socketpair()
        ends, self._life = os.pipe()
        given = rank, size, port, theirs.fileno(), ends, device.type
        arguments = [str(it) for it in given]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", FOLLOWER, *arguments],
                pass_fds=(theirs.fileno(), ends),
                stdin=subprocess.DEVNULL,
                stdout=2,  # libraries' prints are no output of this program
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # only the leader gets Ctrl-C, and ends the others
            )
        # SIGIO kills the follower once the pipe's other end is closed, even during its imports.
        fcntl.fcntl(ends, fcntl.F_SETOWN, self.pid)
        fcntl.fcntl(ends, fcntl.F_SETFL, fcntl.fcntl(ends, fcntl.F_GETFL) | os.O_ASYNC)
        os.close(ends)
        self.rank, self.connection = rank, Connection(own.detach())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> str:
        """Wait until the process has ended or a signal has stopped it; tell which, in words."""
        while self._is_stopped():
            sleep(_STOPPED_SECONDS)
            with suppress(ChildProcessError):
                if not os.waitid(os.P_PID, self.pid, _GONE_ON | os.WNOWAIT):
                    return f"was stopped by a signal for {_STOPPED_SECONDS:g} s"
                os.waitid(os.P_PID, self.pid, os.WCONTINUED | os.WNOHANG)
        return f"ended with exit code {self._process.wait()}"

    def _is_stopped(self) -> bool:
        """Wait until the process stops or ends; True if a signal has stopped it."""
        with suppress(ChildProcessError):  # its exit code was read already
            seen = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
            if seen is not None and seen.si_code == os.CLD_STOPPED:
                os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG)
                return True
        return False

    def let_go(self) -> None:
        """Close both pipes, on which the process exits."""
        self.connection.close()
        os.close(self._life)

    def end(self, seconds: float) -> None:
        """Wait for the process to exit; kill it after `seconds`, or on Ctrl-C."""
        try:
            self._process.wait(max(0.1, seconds))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.kill()
            self._process.wait()

    def last_words(self) -> str:
        """The error message that the process sent before it exited, or an empty string."""
        said: list[str] = []
        with suppress(OSError, EOFError):
            while self.connection.poll(0):
                said.append(self.connection.recv())
        return next((it for it in said if it not in (READY, SETTLED)), "")


class Followers:
    """The processes of all ranks other than 0, connected with this process.

    Attributes:
        loss: why a rank was lost, in words; empty while all ranks are there.

    Raises:
        RanksLostError: a rank failed to start.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.loss, self._closing = size, "", Event()
        self._watchers: list[Callable[[str], None]] = []
        self.processes: list[Process] = []
        # Also called when this process exits, before its threads are stopped.
        self._end = weakref.finalize(self, _end_all, self.processes, self._closing)
        self.collectives: Collectives | None = None
        try:
            store = open_store(0, size, leads=True)
            for rank in range(1, size):
                self.processes.append(Process(rank, size, store.port, device))
            for process in self.processes:
                given = weakref.ref(self), process, self._closing
                Thread(target=_wait_for, args=given, daemon=True).start()
            self.hear(READY, _START_SECONDS)
            self.collectives = Collectives(store, 0, size, device)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raise RanksLostError if a rank was lost."""
        if self.loss:
            reasons = (process.last_words() for process in self.processes)
            reason = "; ".join(dict.fromkeys(it for it in (self.loss, *reasons) if it))
            raise RanksLostError(f"{reason}; the engine has ended: start it again")

    def send(self, written: bytes) -> None:
        """Send a message to all followers; does nothing once a rank was lost."""
        for process in self.processes:
            if self.loss:
                return
            try:
                process.connection.send_bytes(written)
            except OSError as error:
                # If the process has ended, its exit code tells more.
                self.wait_for_loss(f"rank {process.rank} of {self.size} does not listen ({error})")

    def hear(self, expected: str, seconds: float) -> None:
        """Wait until all followers have sent `expected`; RanksLostError if one does not in time."""
        deadline = monotonic() + seconds
        for process in self.processes:
            with suppress(OSError, EOFError):
                while not self.loss and monotonic() < deadline:
                    if process.connection.poll(0.05):
                        said: Any = process.connection.recv()
                        if said != expected:
                            self.lose(str(said))
                        break
                else:
                    self.lose(f"rank {process.rank} of {self.size} does not answer")
                continue
            self.wait_for_loss(f"rank {process.rank} of {self.size} has closed its pipe")
        self.check()

    def watch(self, call: Callable[[str], None]) -> None:
        """Call `call` with `loss`, from any thread, when a rank is lost, or now if one was."""
        self._watchers.append(call)
        if self.loss:
            call(self.loss)

    def wait_for_loss(self, what: str) -> None:
        """Wait briefly for `_wait_for` to report the lost rank; else `what` is the reason."""
        deadline = monotonic() + _LOSS_SECONDS
        while not self.loss and monotonic() < deadline:
            sleep(0.01)
        self.lose(what)

    def lose(self, what: str) -> None:
        """Record that a rank was lost, abort exchanges and notify watchers; only once."""
        if self.loss or self._closing.is_set():
            return
        self.loss = what
        if self.collectives is not None:  # in a thread, since it may have to wait for graphs
            Thread(target=self.collectives.abort, daemon=True).start()
        for call in self._watchers:
            call(what)

    def close(self) -> None:
        """End all followers."""
        self._end()


def _wait_for(followers: "weakref.ref[Followers]", process: Process, closing: Event) -> None:
    """Report the end of a process that was not told to end.

    Runs in a thread, which keeps no reference to `followers`: with the last one it would end the
    connections, in C++ that aborts this process if it exits meanwhile.
    """
    how = process.wait()
    if not closing.is_set():
        alive = followers()
        if alive is not None:
            alive.lose(f"rank {process.rank} of {alive.size} {how}")
        del alive
    # A stopped process would keep the others waiting in an exchange.
    process.end(0)


def _end_all(processes: list[Process], closing: Event) -> None:
    closing.set()
    for process in processes:
        process.let_go()
    deadline = monotonic() + _END_SECONDS
    for process in processes:
        process.end(deadline - monotonic())
