"""What time it is where the work is done."""

from collections.abc import Callable
from time import perf_counter_ns

import torch
from torch import Tensor

from slipstream.kernels.devices import runs_triton


def _of_host(device: torch.device) -> Tensor:
    # A third of the time that `torch.tensor` takes.
    return torch.scalar_tensor(perf_counter_ns(), dtype=torch.int64, device=device)


def _unknown(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


def timestamp_for(device: torch.device) -> Callable[[torch.device], Tensor]:
    """A function that gives a scalar int64 tensor on `device`: nanoseconds when that work was
    reached, of some clock of the device. Where there is none it is always 0."""
    if device.type != "cuda":
        return _of_host
    if not runs_triton(device):
        return _unknown
    from slipstream.kernels.triton.timestamp import timestamp

    return timestamp
