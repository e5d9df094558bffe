"""Programmatic dependent launch: a kernel starts while the one before it in the stream still runs.

Such a kernel may touch constants (weights) at once, and calls `wait_for_inputs` before it reads or
writes anything else. That returns when the kernel before it has ended, which waited likewise: so
everything older in the stream has ended too, and it is safe to call `launch_dependents` first.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels on this device can start early: from compute capability 9.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def launch_dependents(pdl: tl.constexpr):
    """Lets the next kernel start as soon as every program of this one has come here."""
    if pdl:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(pdl: tl.constexpr):
    """Returns when all that earlier kernels wrote can be read."""
    if pdl:
        tl.extra.cuda.gdc_wait()


def dense(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Contiguous tensors, for kernels that are told no strides.

    Even a tensor [n] need not be: `expand` repeats one number with stride 0.
    """
    return tuple(tensor.contiguous() for tensor in tensors)


def options(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel with a `pdl` flag.

    Products and sums are not contracted to one rounding: whether they were would follow from the
    layout of a tile, and with it the bits of a row from the number of rows.
    """
    pdl = overlaps(device)
    chosen: dict[str, Any] = {"pdl": pdl, "enable_fp_fusion": False}
    if pdl:
        chosen["launch_pdl"] = True
    return chosen
