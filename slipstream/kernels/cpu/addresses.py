"""Tensors as kernels in C++ take them: checked here, and handed over by address."""

import torch
from torch import Tensor


def address(tensor: Tensor | None) -> int:
    """Of its first number; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def dense(tensor: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """`tensor`, or a copy whose numbers lie one behind the other.

    Whoever takes an address keeps the tensor until the kernel is done.
    """
    assert tensor.dtype == dtype, f"{tensor.dtype} in place of {dtype}"
    assert tensor.shape == shape, f"{tuple(tensor.shape)} in place of {shape}"
    assert tensor.is_cpu
    return tensor.contiguous()


def lines(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix of which each row is dense; rows may have gaps between them."""
    assert tensor.dtype == dtype, f"{tensor.dtype} in place of {dtype}"
    assert tensor.dim() == 2, "a matrix is asked for"
    assert tensor.is_cpu
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()
