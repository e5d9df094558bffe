"""The other ranks, as a step sees them.

Every rank runs the same code over the same numbers. What only one of them can know (the schedule,
what a drafter on the host guesses, what a grammar allows) the leader makes, and all agree on it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from slipstream.core.errors import RanksLostError
from slipstream.kernels.devices import upload
from slipstream.layers.parameters import WHOLE, Share
from slipstream.models.loading import ProgressBar
from slipstream.models.parameter_sources import Progress
from slipstream.runner.device_state import DeviceState
from slipstream.sampling.state import SamplingState

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks of one engine.

    Attributes:
        share: of the network, of this process.
        leads: whether requests come here; the others do what they are told.
    """

    share: Share
    leads: bool

    def check(self) -> None:
        """Raise RanksLostError if a rank has ended."""

    def tell(self, name: str, *arguments: Any) -> None:
        """Have the followers call their function of this name, in the order of all that they are
        told; whoever is no leader tells nobody. Nothing happens where a rank was lost."""

    def call(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on all ranks, in which they exchange tensors; what it gives here.

        Raises:
            RanksLostError: a rank has ended.
        """

    def agree(self, make: Callable[[], T]) -> T:
        """What the leader makes, on every rank; within a function that followers were told to
        call."""

    def lost(self, error: Exception) -> RanksLostError:
        """The error of a rank that was lost in an exchange that failed like this."""

    def require_equal(self, *tensors: Tensor) -> None:
        """Raise RanksLostError where these differ from rank to rank."""

    def settle(self) -> None:
        """Wait until the followers have done all that they were told; RanksLostError if they do
        not."""

    def watch(self, call: Callable[[str], None]) -> None:
        """Call this from another thread when a rank ends, with what is known of it."""

    def close(self) -> None:
        """End the followers."""


class Alone:
    """One process has the whole network."""

    share, leads = WHOLE, True

    def check(self) -> None:
        """Nobody can be lost."""

    def tell(self, name: str, *arguments: Any) -> None:
        """Nobody listens."""

    def call(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        return function(*arguments)

    def agree(self, make: Callable[[], T]) -> T:
        return make()

    def lost(self, error: Exception) -> RanksLostError:
        return RanksLostError(str(error))

    def require_equal(self, *tensors: Tensor) -> None:
        """Nobody differs."""

    def settle(self) -> None:
        """Nobody is waited for."""

    def watch(self, call: Callable[[str], None]) -> None:
        """Nobody can end."""

    def close(self) -> None:
        """Nobody is there."""


ALONE = Alone()


def breaking_off(progress_bar: ProgressBar, ranks: Ranks) -> ProgressBar:
    """A progress bar of a load that breaks off, with RanksLostError, when a rank ends: the next
    exchange may be minutes away."""

    @contextmanager
    def opened(name: str, size: int, unit: str) -> Iterator[Progress]:
        with progress_bar(name, size, unit) as progress:

            def advance(amount: int) -> None:
                ranks.check()
                progress(amount)

            yield advance

    return opened


def require_agreement(
    ranks: Ranks, state: DeviceState, sampling: SamplingState, slots: Sequence[int]
) -> None:
    """Raise RanksLostError where ranks differ in what is committed of the requests in these
    slots. The host waits for the device."""
    rows = upload(slots, state.device)
    counts = state.num_tokens[rows], state.num_computed[rows], sampling.ints[rows]
    known = torch.arange(state.token_ids.shape[1], device=state.device) < counts[0].unsqueeze(1)
    ranks.require_equal(*counts, state.token_ids[rows].masked_fill(~known, 0))
