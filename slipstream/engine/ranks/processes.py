"""The processes of the ranks behind the first: their start, their end, and word of either."""

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
READY, SETTLED = "ready", "settled"  # what followers say
_START_SECONDS = 120.0
_LOSS_SECONDS = 2.0  # until it is known which rank has ended
_END_SECONDS = 3.0  # for a follower to end by itself
_STOPPED_SECONDS = 2.0  # after which one that a signal has stopped is taken for lost


_GONE_ON = os.WEXITED | os.WCONTINUED | os.WNOHANG


class Process:
    """A follower in a fresh interpreter: nothing is inherited, and no main module is run again.

    It ends when its end of either pipe finds the other one closed, which this process's death
    closes as well.
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
                stdout=2,  # what a library prints is no output of this program
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is for the leader, which ends the others
            )
        # As soon as nobody holds the other end the system ends it, even while it imports.
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
        """Wait until it is lost, by its end or because a signal has stopped it; how, in words."""
        while self._is_stopped():
            sleep(_STOPPED_SECONDS)
            with suppress(ChildProcessError):
                if not os.waitid(os.P_PID, self.pid, _GONE_ON | os.WNOWAIT):
                    return f"was stopped by a signal for {_STOPPED_SECONDS:g} s"
                os.waitid(os.P_PID, self.pid, os.WCONTINUED | os.WNOHANG)
        return f"ended with exit code {self._process.wait()}"

    def _is_stopped(self) -> bool:
        """Wait until a signal stops it, or until it ends."""
        with suppress(ChildProcessError):  # its exit code was taken already
            seen = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
            if seen is not None and seen.si_code == os.CLD_STOPPED:
                os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG)
                return True
        return False

    def let_go(self) -> None:
        """Tell it to end."""
        self.connection.close()
        os.close(self._life)

    def end(self, seconds: float) -> None:
        """Kill it if it has not ended in time, or where Ctrl-C says that this takes too long."""
        try:
            self._process.wait(max(0.1, seconds))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.kill()
            self._process.wait()

    def last_words(self) -> str:
        """The reason that it gave for its end."""
        said: list[str] = []
        with suppress(OSError, EOFError):
            while self.connection.poll(0):
                said.append(self.connection.recv())
        return next((it for it in said if it not in (READY, SETTLED)), "")


class Followers:
    """All of them, connected with this process.

    Attributes:
        loss: what is known of one that was lost; empty as long as none was.

    Raises:
        RanksLostError: one of them did not come up.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.loss, self._closing = size, "", Event()
        self._watchers: list[Callable[[str], None]] = []
        self.processes: list[Process] = []
        # At the end of this process as well, before its threads are taken down.
        self._end = weakref.finalize(self, _end_all, self.processes, self._closing)
        self.collectives: Collectives | None = None
        try:
            store = open_store(0, size, leads=True)
            for rank in range(1, size):
                self.processes.append(Process(rank, size, store.port, device))
            for process in self.processes:
                given = weakref.ref(self), process
                Thread(target=_wait_for, args=given, daemon=True).start()
            self.hear(READY, _START_SECONDS)
            self.collectives = Collectives(store, 0, size, device)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raise RanksLostError if one was lost."""
        if self.loss:
            reasons = [it for it in (process.last_words() for process in self.processes) if it]
            told = "; ".join([self.loss, *reasons])
            raise RanksLostError(f"{told}; the engine has ended: start it again")

    def send(self, written: bytes) -> None:
        """To all of them; nothing where one was lost."""
        for process in self.processes:
            if self.loss:
                return
            try:
                process.connection.send_bytes(written)
            except OSError as error:
                # Its exit code says more, where it has ended.
                self.wait_for_loss(f"rank {process.rank} of {self.size} does not listen ({error})")

    def hear(self, expected: str, seconds: float) -> None:
        """Wait until all have said this; RanksLostError where one does not."""
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
        """Call this with the loss, from any thread, when one is lost; at once if one was."""
        self._watchers.append(call)
        if self.loss:
            call(self.loss)

    def wait_for_loss(self, what: str) -> None:
        """One must have been lost, as `what` shows: wait a little until it is known which."""
        deadline = monotonic() + _LOSS_SECONDS
        while not self.loss and monotonic() < deadline:
            sleep(0.01)
        self.lose(what)

    def lose(self, what: str) -> None:
        """One has ended, or does not answer: the first reason counts."""
        if self.loss or self._closing.is_set():
            return
        self.loss = what
        if self.collectives is not None:
            self.collectives.abort()
        for call in self._watchers:
            call(what)

    def close(self) -> None:
        """End all of them."""
        self._end()


def _wait_for(followers: "weakref.ref[Followers]", process: Process) -> None:
    how = process.wait()
    alive = followers()
    if alive is not None:
        alive.lose(f"rank {process.rank} of {alive.size} {how}")
    # One that is stopped would keep the others waiting in an exchange.
    process.end(0)


def _end_all(processes: list[Process], closing: Event) -> None:
    closing.set()
    for process in processes:
        process.let_go()
    deadline = monotonic() + _END_SECONDS
    for process in processes:
        process.end(deadline - monotonic())
