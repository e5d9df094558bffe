"""Programmatic dependent launch: a kernel starts while the one before it in the stream still runs.

Such a kernel may touch constants (weights) at once, and calls `wait_for_inputs` before it reads or
writes anything else. That returns when the kernel before it has ended, which waited likewise: so
everything older in the stream has ended too, and it is safe to call `launch_dependents` first. A
kernel that calls it behind its wait starts the next one when everything older than itself has
ended: so the next may read what that wrote before it waits, though not what the kernel itself does.
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


# Memory behind the rows that a matmul reads. The copy engine is slow where a tile reaches past the
# end of what it reads: 40 rows in tiles of 64 took longer than 64 (8B on an H200: 118 us a layer,
# not 109). So whoever makes what a matmul reads leaves memory behind it, and the tiles read numbers
# there that nobody uses.
def empty_rows(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, width], unset, with room for whole tiles behind it."""
    room = max(8, triton.next_power_of_2(rows)) if rows <= 64 else triton.cdiv(rows, 64) * 64
    return torch.empty(room, width, dtype=dtype, device=device)[:rows]


def with_spare(x: Tensor, rows: int) -> Tensor:
    """x [T, K] with what lies behind it in its memory, `rows` rows at most."""
    memory = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    if len(x) >= rows or x.stride(0) < x.shape[1]:
        return x
    there = (memory - x.shape[1]) // x.stride(0) + 1
    return x.as_strided((max(len(x), min(rows, there)), x.shape[1]), x.stride())
