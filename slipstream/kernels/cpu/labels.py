"""Names of kernels for torch's profiler, which sees nothing of what happens in C++."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from slipstream.kernels.devices import profiling

P = ParamSpec("P")
R = TypeVar("R")


def labelled(name: str, op: Callable[P, R]) -> Callable[P, R]:
    """`op`, under a name where somebody profiles; the label costs more than a small op."""

    @functools.wraps(op)
    def named(*args: P.args, **kwargs: P.kwargs) -> R:
        if not profiling():
            return op(*args, **kwargs)
        with torch.profiler.record_function(f"slipstream::{name}"):
            return op(*args, **kwargs)

    return named
