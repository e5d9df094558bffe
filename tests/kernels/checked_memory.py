"""An address sanitizer for interpreted kernels: what lies outside of all arguments is not theirs.

The interpreter reads and writes any address of the process, and what it finds there is mostly
harmless on the CPU; on a GPU the same kernel computes with the numbers of others, or dies.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor


class Extents:
    """The memory of the tensors of one launch.

    A view counts from its first number to its last, not the storage that it is cut from: what is
    beside it belongs to others.
    """

    def __init__(self, kernel: str, arguments: Mapping[str, Any]) -> None:
        self._kernel = kernel
        found = [
            (start, start + size, name)
            for name, argument in arguments.items()
            for start, size in map(_extent, _tensors(kernel, name, argument))
            if size
        ]
        self._named = sorted(found)
        # Merged, so that the last one that starts at or before an address decides.
        merged: list[tuple[int, int]] = []
        for start, end, _ in self._named:
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((start, end))
        self._starts = np.array([0, *(start for start, _ in merged)], dtype=np.uint64)
        self._ends = np.array([0, *(end for _, end in merged)], dtype=np.uint64)

    def check(self, what: str, pointers: Any, mask: Any) -> None:
        """Raise IndexError where a pointer that is not masked off leads outside."""
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses = np.asarray(pointers.data)
        if mask is not None:
            addresses = addresses[np.broadcast_to(np.asarray(mask.data, bool), addresses.shape)]
        own = np.searchsorted(self._starts, addresses, side="right") - 1
        outside = addresses + np.uint64(size) > self._ends[own]
        if outside.any():
            first = int(addresses[outside].flat[0])
            raise IndexError(
                f"{self._kernel} {what} {int(outside.sum())} numbers outside of its arguments,"
                f" the first {self._place(first)}"
            )

    def _place(self, address: int) -> str:
        before = [(end, name) for start, end, name in self._named if start <= address]
        if not before:
            return f"at {address:#x}, before all of them"
        end, name = max(before)
        return f"{address - end} bytes after the end of {name}"


def _tensors(kernel: str, name: str, argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, tuple):
        for part in argument:
            yield from _tensors(kernel, name, part)
    elif isinstance(argument, TensorDescriptor):
        yield argument.base
    elif isinstance(argument, Tensor):
        # Kernels are told strides of matrices only.
        if argument.dim() == 1 and not argument.is_contiguous():
            raise IndexError(f"{kernel} takes {name} for dense; its stride is {argument.stride(0)}")
        yield argument


def _extent(tensor: Tensor) -> tuple[int, int]:
    """(first address, bytes from there to after the last number)."""
    if not tensor.numel():
        return tensor.data_ptr(), 0
    numbers = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), numbers * tensor.element_size()


@contextmanager
def memory_is_checked() -> Iterator[None]:
    """Interpreted kernels raise an error, naming IndexError, where they leave their arguments."""
    launched: list[Extents] = []
    take = interpreter.GridExecutor._init_args_hst

    def taking(self: Any, args_dev: Any, kwargs: Any) -> Any:
        args, named = take(self, args_dev, kwargs)
        arguments = inspect.getcallargs(self.fn, *args, **named)
        launched[:] = [Extents(self.fn.__name__, arguments)]
        return args, named

    def checking(name: str, what: str, mask_at: int | None) -> Callable[..., Any]:
        original = getattr(interpreter.InterpreterBuilder, name)
        pointers_at = 1 if name == "create_atomic_rmw" else 0

        @functools.wraps(original)
        def checked(self: Any, *args: Any) -> Any:
            mask = None if mask_at is None else args[mask_at]
            launched[0].check(what, args[pointers_at], mask)
            return original(self, *args)

        return checked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "_init_args_hst", taking)
        for name, what, mask_at in (
            ("create_masked_load", "loads", 1),
            ("create_masked_store", "stores", 2),
            ("create_atomic_rmw", "updates", 3),
            ("create_atomic_cas", "updates", None),
        ):
            checked = checking(name, what, mask_at)
            patch.setattr(interpreter.InterpreterBuilder, name, checked)
        yield
