"""Rank 0, which plans the steps and sends its calls to the other ranks."""

import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any, TypeVar

import torch

from slipstream.core.config import EngineConfig
from slipstream.core.errors import RanksLostError, UsageError
from slipstream.engine.ranks.messages import Call, Writer
from slipstream.engine.ranks.processes import SETTLED, Followers
from slipstream.engine.ranks.ranks import ALONE, Ranks
from slipstream.runner.collectives import CollectiveError
from slipstream.runner.memory import uses_gpu_memory

T = TypeVar("T")
LEAVE = "leave"  # the call that ends `Follower.follow`
_SETTLE_SECONDS = 8.0


def start_ranks(config: EngineConfig, device: torch.device) -> Ranks:
    """Start the other ranks, which begin to load their shares of the model immediately.

    Raises:
        UsageError: there are fewer GPUs than ranks.
        RanksLostError: a rank failed to start.
    """
    size = config.num_ranks
    if size == 1:
        return ALONE
    if uses_gpu_memory(device) and torch.cuda.device_count() < size:
        raise UsageError(
            f"{size} processes (tensor_parallel_size or data_parallel_size) need as many GPUs, "
            f"and torch sees {torch.cuda.device_count()}; use at most as many"
        )
    followers = Followers(size, device)
    return Leader(config, followers, followers.close)


class Leader(Ranks):
    """Rank 0; see `Ranks`.

    Args:
        close: called by `close` to end the followers.
    """

    def __init__(
        self, config: EngineConfig, followers: Followers, close: Callable[[], None]
    ) -> None:
        assert followers.collectives is not None, "they are connected"
        super().__init__(followers.collectives)
        self._followers, self._close, self._writer = followers, close, Writer()
        self._connected = followers.collectives
        followers.send(pickle.dumps(config))

    def check(self) -> None:
        self._followers.check()
        try:
            self._connected.check()
        except CollectiveError as error:
            self._followers.lose(str(error))
            self._followers.check()

    def tell(self, name: str, *arguments: Any) -> None:
        with _late_interrupts():  # an interrupt would cut off the message
            self._followers.send(self._writer.write(Call(name, arguments)))

    def call(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        self.check()
        with _late_interrupts():
            self.tell(name, *arguments)
            try:
                return function(*arguments)
            except CollectiveError as error:
                raise self.lost(error) from error

    def agree(self, make: Callable[[], T]) -> T:
        made = make()
        self._followers.send(self._writer.write(made))
        return made

    def lost(self, error: Exception) -> RanksLostError:
        self._followers.wait_for_loss(str(error))
        try:
            self.check()
        except RanksLostError as found:
            return found
        return RanksLostError(str(error))  # the engine is being closed

    def settle(self) -> None:
        self._writer.begin_anew()
        self.tell(SETTLED)
        self._followers.hear(SETTLED, _SETTLE_SECONDS)

    def watch(self, call: Callable[[str], None]) -> None:
        self._followers.watch(call)

    def close(self) -> None:
        self.tell(LEAVE)
        self._close()


@contextmanager
def _late_interrupts() -> Iterator[None]:
    """Delay Ctrl-C: if a rank left between two exchanges, the others would wait for it."""
    if current_thread() is not main_thread():
        yield
        return
    came: list[tuple[Any, ...]] = []
    usual = signal.signal(signal.SIGINT, lambda *signalled: came.append(signalled))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if came and callable(usual):
            usual(*came[0])
