"""Names of kernels for torch's profiler, which sees nothing of what happens in C++."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from slipstream.kernels.devices import label, profiling

P = ParamSpec("P")
R = TypeVar("R")


def labelled(name: str, op: Callable[P, R]) -> Callable[P, R]:
    """`op`, under a name where somebody profiles; see `label`."""

    @functools.wraps(op)
    def named(*args: P.args, **kwargs: P.kwargs) -> R:
        if not profiling():
            return op(*args, **kwargs)
        with label(f"slipstream::{name}"):
            return op(*args, **kwargs)

    return named
