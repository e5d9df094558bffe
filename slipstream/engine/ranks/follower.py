"""The process of a rank other than 0, which holds a share of the model and follows the leader.

`processes.py` starts it with its rank, the number of ranks, the port of the store, two file
descriptors and the type of the device. It exits as soon as the leader does, and with exit code 1 if
it fails.
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

from slipstream.core.errors import RanksLostError, SlipstreamError
from slipstream.engine.ranks.leader import LEAVE
from slipstream.engine.ranks.messages import Call, Reader
from slipstream.engine.ranks.processes import READY, SETTLED
from slipstream.engine.ranks.ranks import MakeGuide, Ranks
from slipstream.runner.collectives import CollectiveError, Collectives, open_store
from slipstream.runner.memory import uses_gpu_memory

T = TypeVar("T")
_SETTLE_SECONDS = 5.0  # for a leader that failed at the same call to report it


class _AbandonedError(Exception):
    """The leader has aborted a call that it had sent to the followers."""


class Follower(Ranks):
    """The `Ranks` of a rank other than 0."""

    leads = False

    def __init__(self, connection: Connection, collectives: Collectives) -> None:
        super().__init__(collectives)
        self._connection, self._reader = connection, Reader(collectives.rank)
        self._connected = collectives

    def agree(self, make: Callable[[], T]) -> T:
        agreed: Any = self._hear()
        if isinstance(agreed, Call):
            raise _AbandonedError
        found: T = agreed
        return found

    def walk(self, make: MakeGuide) -> None:
        self._reader.make_guide = make

    def follow(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        """Run the functions that the leader calls, until it closes this engine.

        If a function fails here, it is expected to fail on the leader as well, which then sends
        `SETTLED`. Otherwise this rank's state has diverged, and RuntimeError ends the process.
        """
        while (call := self._hear()).name != LEAVE:
            try:
                if call.name == SETTLED:
                    self._settled()
                else:
                    functions[call.name](*call.arguments)
            except _AbandonedError:
                self._settled()
            except (CollectiveError, RanksLostError):
                raise
            except Exception as error:
                self._wait_until_settled(error)

    def _wait_until_settled(self, error: Exception) -> None:
        while self._connection.poll(_SETTLE_SECONDS):
            heard = self._hear()
            if isinstance(heard, Call) and heard.name == SETTLED:
                self._settled()
                return
        raise RuntimeError(f"a step failed on this rank alone: {error!r}") from error

    def _settled(self) -> None:
        # If a GPU waits for a leader that failed alone, this never returns, but the engine ends.
        self._connected.finish()
        self._connection.send(SETTLED)

    def _hear(self) -> Any:
        return self._reader.read(self._connection.recv_bytes())


def _end_with(life: int) -> None:
    """Exit when the leader's end of a pipe is closed, by the leader or because it has died."""
    with suppress(OSError):
        os.read(life, 1)
    os._exit(0)


def main(arguments: list[str]) -> None:
    """Load this rank's share of the model and follow the leader."""
    rank, size, port, channel, life = map(int, arguments[:-1])
    Thread(target=_end_with, args=(life,), daemon=True).start()
    connection = Connection(channel)
    try:
        _run(rank, size, port, arguments[-1], connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the leader has ended
        os._exit(0)
    except BaseException as error:
        with suppress(OSError):  # a stderr on a full disk must not keep the leader from knowing
            if not isinstance(error, SlipstreamError | CollectiveError):
                traceback.print_exc()
        with suppress(OSError):
            whose = "" if isinstance(error, CollectiveError) else f"rank {rank}: "
            connection.send(f"{whose}{error}")
        os._exit(1)


def _run(rank: int, size: int, port: int, kind: str, connection: Connection) -> NoReturn:
    from slipstream.engine.build import build_engine

    logging.getLogger("slipstream").setLevel(logging.ERROR)  # the leader logs the same messages
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
