"""A process that holds a share of a model and follows the leader's steps.

Started by `processes.py` with its rank, their number, the port of the store, two descriptors and
the kind of device. It ends when the leader does, whatever it is doing then, and with exit code 1
when it cannot follow.
"""

import logging
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from slipstream.core.errors import RanksLostError, SlipstreamError
from slipstream.engine.ranks.leader import LEAVE
from slipstream.engine.ranks.messages import Call, Reader
from slipstream.engine.ranks.processes import READY, SETTLED
from slipstream.runner.collectives import CollectiveError, Collectives, open_store
from slipstream.runner.memory import uses_gpu_memory

T = TypeVar("T")
_SETTLE_SECONDS = 5.0  # within which a leader that failed in the same place says so


class _AbandonedError(Exception):
    """The leader has broken off what it had told the followers to do."""


class Follower:
    """One of the ranks behind the first; see `Ranks`."""

    leads = False

    def __init__(self, connection: Connection, collectives: Collectives) -> None:
        self._connection, self._reader = connection, Reader()
        self._collectives = collectives
        self.share = collectives.share()

    def check(self) -> None:
        """It ends with the leader, who looks after the others."""

    def tell(self, name: str, *arguments: Any) -> None:
        """It is told the same."""

    def agree(self, make: Callable[[], T]) -> T:
        agreed: Any = self._hear()
        if isinstance(agreed, Call):
            raise _AbandonedError
        found: T = agreed
        return found

    def call(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        return function(*arguments)

    def lost(self, error: Exception) -> RanksLostError:
        return RanksLostError(str(error))

    def require_equal(self, *tensors: Tensor) -> None:
        self._collectives.require_equal(tensors)

    def settle(self) -> None:
        """The leader waits for it."""

    def watch(self, call: Callable[[str], None]) -> None:
        """The leader does."""

    def close(self) -> None:
        """The leader does."""

    def follow(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        """Call what the leader says, until it has no use for this engine any more.

        A function may fail here as it does there: then the leader breaks off as well and says so.
        If it does not, this rank has come to differ, and ends.
        """
        while (call := self._hear()).name != LEAVE:
            try:
                if call.name == SETTLED:
                    self._connection.send(SETTLED)
                else:
                    functions[call.name](*call.arguments)
            except _AbandonedError:
                self._connection.send(SETTLED)
            except (CollectiveError, RanksLostError):
                raise
            except Exception:
                self._wait_until_settled()

    def _wait_until_settled(self) -> None:
        cause = traceback.format_exc()
        while self._connection.poll(_SETTLE_SECONDS):
            heard = self._hear()
            if isinstance(heard, Call) and heard.name == SETTLED:
                self._connection.send(SETTLED)
                return
        raise RuntimeError(f"a step failed on this rank alone: {cause}")

    def _hear(self) -> Any:
        return self._reader.read(self._connection.recv_bytes())


def _end_with(life: int) -> None:
    """End this process when the leader's end of a pipe is closed, by itself or by its death."""
    with suppress(OSError):
        os.read(life, 1)
    os._exit(0)


def main(arguments: list[str]) -> None:
    """Load this rank's share and follow."""
    rank, size, port, channel, life = map(int, arguments[:-1])
    Thread(target=_end_with, args=(life,), daemon=True).start()
    connection = Connection(channel)
    try:
        _run(rank, size, port, arguments[-1], connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the leader has ended
        os._exit(0)
    except BaseException as error:
        if not isinstance(error, SlipstreamError | CollectiveError):
            traceback.print_exc()
        with suppress(OSError):
            connection.send(f"rank {rank}: {error}")
        sys.stderr.flush()
        os._exit(1)


def _run(rank: int, size: int, port: int, kind: str, connection: Connection) -> NoReturn:
    from slipstream.engine.build import build_engine

    logging.getLogger("slipstream").setLevel(logging.ERROR)  # the leader says the same
    device = torch.device(kind)
    if uses_gpu_memory(device):
        torch.cuda.set_device(rank)
    connection.send(READY)
    collectives = Collectives(open_store(port, size, leads=False), rank, size, device)
    while True:
        config = pickle.loads(connection.recv_bytes())
        follower = Follower(connection, collectives)
        follower.follow(build_engine(config, ranks=follower).followed)


if __name__ == "__main__":
    main(sys.argv[1:])
