"""The interface through which a step communicates with the other ranks.

Every rank runs the same code on the same inputs. What must be decided in one place (the schedule,
the drafts of host drafters, the masks of grammars) is decided by the leader and sent to all ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from slipstream.core.errors import RanksLostError
from slipstream.core.structured import Guide, StructuredOutput
from slipstream.kernels.devices import upload
from slipstream.layers.parameters import WHOLE, Share
from slipstream.models.loading import ProgressBar
from slipstream.models.parameter_sources import Progress
from slipstream.runner.collectives import Collectives
from slipstream.runner.device_state import DeviceState
from slipstream.sampling.state import SamplingState

T = TypeVar("T")
# (grammar, tokens that end the output) -> the guide of a new request
MakeGuide = Callable[[StructuredOutput, frozenset[int]], Guide]


class Ranks:
    """The ranks of one engine; this base class is that of an engine of one process.

    Args:
        collectives: connect this process with the other ranks.

    Attributes:
        share: this process's share of the network.
        leads: whether this is rank 0, which receives requests and directs the other ranks.
    """

    leads = True

    def __init__(self, collectives: Collectives | None = None) -> None:
        self._collectives = collectives
        self.share: Share = WHOLE if collectives is None else collectives.share()

    def check(self) -> None:
        """Raise RanksLostError if a rank has ended. Followers exit when the leader does."""

    def tell(self, name: str, *arguments: Any) -> None:
        """Have the followers call their function `name`, in the order of these calls. Does nothing
        on followers, and once a rank was lost."""

    def call(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        """Call on all ranks a function that exchanges tensors; returns this rank's result.

        Raises:
            RanksLostError: a rank has ended.
        """
        return function(*arguments)

    def agree(self, make: Callable[[], T]) -> T:
        """Return on every rank what `make` returns on the leader; used only within functions that
        all ranks run."""
        return make()

    def walk(self, make: MakeGuide) -> None:
        """On a follower, make a guide for each request that the leader sends, and advance it; does
        nothing on the leader."""

    def lost(self, error: Exception) -> RanksLostError:
        """The error to raise after an exchange failed with `error`, since a rank was lost."""
        return RanksLostError(str(error))

    def require_equal(self, *tensors: Tensor) -> None:
        """Raise RanksLostError if these tensors are not equal on all ranks."""
        if self._collectives is not None:
            self._collectives.require_equal(tensors)

    def settle(self) -> None:
        """Wait until the followers have finished all calls; RanksLostError if they do not in
        time."""

    def reset_before_end(self, graphs: Iterable[Any]) -> None:
        """Reset these CUDA graphs before the connections to other ranks end; see `Collectives`."""
        if self._collectives is not None:
            self._collectives.reset_before_end(graphs)

    def watch(self, call: Callable[[str], None]) -> None:
        """Register `call`: another thread calls it with the reason when a rank is lost."""

    def close(self) -> None:
        """End the followers."""


ALONE = Ranks()


def breaking_off(progress_bar: ProgressBar, ranks: Ranks) -> ProgressBar:
    """Wrap the progress bar of a load so that it raises RanksLostError when a rank is lost, since
    the next exchange may be minutes away."""

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
    """Raise RanksLostError if the ranks' committed tokens of the requests in these slots differ.
    The host waits for the device."""
    rows = upload(slots, state.device)
    counts = state.num_tokens[rows], state.num_computed[rows], sampling.ints[rows]
    known = torch.arange(state.token_ids.shape[1], device=state.device) < counts[0].unsqueeze(1)
    ranks.require_equal(*counts, state.token_ids[rows].masked_fill(~known, 0))
