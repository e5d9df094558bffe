"""Names of kernels for torch's profiler, which sees nothing of what happens in C++."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from slipstream.kernels.devices import label, profiling

P = ParamSpec("P")
R = TypeVar("R")


def open_range(name: str) -> Callable[[], object]:
    """Opens a range of torch's profiler; what it gives ends the range."""
    opened = torch.profiler.record_function(name)
    opened.__enter__()  # type: ignore[no-untyped-call]
    return lambda: opened.__exit__(None, None, None)


def part_labels() -> Callable[[str], Callable[[], object]] | None:
    """How C++ names the parts of a long call where somebody profiles; None where nobody does."""
    return open_range if profiling() else None


def labelled(name: str, op: Callable[P, R]) -> Callable[P, R]:
    """`op`, under a name where somebody profiles; see `label`."""

    @functools.wraps(op)
    def named(*args: P.args, **kwargs: P.kwargs) -> R:
        if not profiling():
            return op(*args, **kwargs)
        with label(f"slipstream::{name}"):
            return op(*args, **kwargs)

    return named
