"""What a device can do, and how tensors get there."""

import functools
import importlib
import logging
import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from slipstream.core.errors import UsageError

logger = logging.getLogger("slipstream")

_NO_LABEL = nullcontext()

# Names a level of instructions of the C++ kernels, or plain torch in their place.
CPU_KERNELS = "SLIPSTREAM_CPU_KERNELS"
PLAIN_TORCH = "reference"


@functools.cache
def runs_triton(device: torch.device) -> bool:
    """Whether the Triton kernels serve `device`; says so when a GPU has to do without."""
    if device.type != "cuda":
        return False
    try:
        importlib.import_module("slipstream.kernels.triton")
    except ImportError as error:
        logger.warning("Triton cannot be imported (%s): plain torch kernels serve the GPU.", error)
        return False
    return True


@functools.cache
def runs_cpp(device: torch.device) -> bool:
    """Whether the C++ kernels serve `device`; says so when a CPU has to do without.

    Raises:
        UsageError: the environment asks for a level that is unknown, or not there.
    """
    if device.type != "cpu":
        return False
    level = os.environ.get(CPU_KERNELS, "")
    if level == PLAIN_TORCH:
        return False
    try:
        cpp = importlib.import_module("_slipstream_cpu")
    except ImportError as error:
        if level:
            raise UsageError(
                f"{CPU_KERNELS}={level} needs the C++ kernels, which cannot be imported ({error}); "
                f"install Slipstream where there is a C++ compiler, or set it to {PLAIN_TORCH!r}"
            ) from error
        logger.warning(
            "The C++ kernels cannot be imported (%s): plain torch serves the CPU, several times "
            "slower. Install Slipstream where there is a C++ compiler, or set %s=%s.",
            error, CPU_KERNELS, PLAIN_TORCH,
        )  # fmt: skip
        return False
    if level:
        known = cpp.levels()
        if level not in known:
            raise UsageError(
                f"{CPU_KERNELS}={level}: this machine has {', '.join(known)} (and {PLAIN_TORCH})"
            )
        cpp.set_level(level)
    return True


# Of activations that the C++ kernels take.
CPP_DTYPES = (torch.float32, torch.bfloat16)


def use_threads(device: torch.device, dtype: torch.dtype, count: int) -> None:
    """Let ops work on `count` threads: the C++ kernels' own, which torch's would only be in the way
    of, or torch's where those do not serve."""
    if runs_cpp(device) and dtype in CPP_DTYPES:
        importlib.import_module("_slipstream_cpu").set_num_threads(count)
        count = 1
    torch.set_num_threads(count)


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
