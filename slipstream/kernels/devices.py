"""Profiler labels, and copies between host and device."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
K = TypeVar("K")
V = TypeVar("V")

_NO_LABEL = nullcontext()

# Dtypes of activations that the C++ kernels support.
CPP_DTYPES = (torch.float32, torch.bfloat16)
# Compute capability: the first that converts e4m3 in hardware.
LEAST_FLOAT8_CAPABILITY = (8, 9)


def profiling() -> bool:
    """Whether torch's profiler is on; it sees our own kernels only through labels."""
    return bool(torch._C._autograd._profiler_enabled())


def is_host_memory(tensor: Tensor) -> bool:
    """Whether a file can be read directly into the tensor."""
    return tensor.device.type == "cpu"


def label(name: str) -> AbstractContextManager[object]:
    """A named range if a profiler runs; otherwise none, as it costs more than a small op."""
    return torch.profiler.record_function(name) if profiling() else _NO_LABEL


def open_range(name: str) -> Callable[[], object]:
    """Open a range of torch's profiler; returns a function that closes it."""
    opened = torch.profiler.record_function(name)
    opened.__enter__()  # type: ignore[no-untyped-call]
    return lambda: opened.__exit__(None, None, None)


def part_labels() -> Callable[[str], Callable[[], object]] | None:
    """The function by which C++ labels parts of a long call; None if no profiler runs."""
    return open_range if profiling() else None


def labelled(name: str, op: Callable[P, R]) -> Callable[P, R]:
    """Wrap `op` in a `label`."""

    @functools.wraps(op)
    def named(*args: P.args, **kwargs: P.kwargs) -> R:
        if not profiling():
            return op(*args, **kwargs)
        with label(f"slipstream::{name}"):
            return op(*args, **kwargs)

    return named


def kept(make: Callable[[K], V]) -> Callable[[K], V]:
    """Cache the results of `make`, each as long as its argument lives."""
    found: WeakKeyDictionary[K, V] = WeakKeyDictionary()

    @functools.wraps(make)
    def look_up(source: K) -> V:
        result = found.get(source)
        if result is None:
            result = found[source] = make(source)
        return result

    return look_up


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy `values` from the host to `device` without waiting for the device.

    A copy to a GPU leaves from pinned memory, which torch keeps until the copy is done.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def upload(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Copy `values` to the device as int64; on a GPU the copy is queued in the stream."""
    return send(torch.tensor(values, dtype=torch.int64), device)


class Download:
    """A copy of a tensor [R, W] to the host that may still be under way.

    The tensor may be overwritten by later work of the same stream at once.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[list[int]]:
        """Wait for the copy; returns the numbers."""
        if self._event is not None:
            self._event.synchronize()
        rows: list[list[int]] = self._host.tolist()
        return rows
