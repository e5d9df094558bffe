"""What kernels and their callers ask of devices: labels for profiles, and how tensors get there."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_NO_LABEL = nullcontext()

# Of activations that the C++ kernels take.
CPP_DTYPES = (torch.float32, torch.bfloat16)


def profiling() -> bool:
    """Whether torch's profiler is on, which sees nothing of what kernels of our own do."""
    return bool(torch._C._autograd._profiler_enabled())


def is_host_memory(tensor: Tensor) -> bool:
    """Whether bytes can be read straight into it."""
    return tensor.device.type == "cpu"


def label(name: str) -> AbstractContextManager[object]:
    """Names what happens in it where somebody profiles; a label costs more than a small op."""
    return torch.profiler.record_function(name) if profiling() else _NO_LABEL


def send(values: Tensor, device: torch.device) -> Tensor:
    """`values`, made on the host, on `device`, without waiting for the device.

    A copy to a GPU leaves from pinned memory, which torch keeps until the copy is done.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
