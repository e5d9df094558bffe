"""Programmatic dependent launch: a kernel starts while the previous one in the stream still runs.

Such a kernel may read constants (weights) at once, but must call `wait_for_inputs` before it reads
or writes anything else. The wait ends when the previous kernel has ended; as that one waited too,
all older kernels have ended by then. So a kernel may call `launch_dependents` before its wait. If
it calls it after its wait, the next kernel starts when all kernels before this one have ended, and
may read their results before its own wait, but not the results of this kernel.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


# Triton's own functions of these names unwrap what a kernel being compiled gives them, which takes
# several microseconds on the host, for each of hundreds of launches of a prompt.
def cdiv(dividend: int, divisor: int) -> int:
    """The quotient of positive integers, rounded up."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive integer."""
    return 1 << max(0, number - 1).bit_length()


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels on this device can start early: from compute capability 9.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


MOST_SHARED_MEMORY = 227 * 1024


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can have: 227 KiB from Hopper on, 163 on an A100, but
    99 on workstations' and consumers' cards (compute capabilities 8.6, 8.9 and 12)."""
    if device.type != "cuda":
        return MOST_SHARED_MEMORY
    # The driver keeps 1 KiB of each program's.
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - 1024


def fitting_stages(device: torch.device, stages: int, tile: int, others: int = 0) -> int:
    """The largest number of a loop's stages, up to `stages`, for which there is shared memory.

    Args:
        tile: bytes that one step of the loop loads. With n stages, n - 1 of these are in shared
            memory where products are `mma.sync`.
        others: bytes of shared memory for everything else.
    """
    return max(1, min(stages, (shared_memory(device) - others) // tile + 1))


@triton.jit
def launch_dependents(pdl: tl.constexpr):
    """Let the next kernel start as soon as all programs of this one have called this."""
    if pdl:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(pdl: tl.constexpr):
    """Wait until the results of all earlier kernels can be read."""
    if pdl:
        tl.extra.cuda.gdc_wait()


def dense(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Contiguous copies where needed, for kernels that do not take strides.

    Even a tensor [n] may need one: `expand` repeats a number with stride 0.
    """
    return tuple(tensor.contiguous() for tensor in tensors)


def options(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel with a `pdl` flag.

    Products and sums are not fused to fma: whether the compiler does so depends on a tile's layout,
    and so a row's bits would depend on the number of rows.
    """
    pdl = overlaps(device)
    chosen: dict[str, Any] = {"pdl": pdl, "enable_fp_fusion": False}
    if pdl:
        chosen["launch_pdl"] = True
    return chosen


# Tensors that a matmul reads are allocated with spare rows. TMA is slow for tiles that reach past
# the end of a matrix: 40 rows in tiles of 64 took longer than 64 rows (8B on an H200: 118 us per
# layer instead of 109). With spare rows no tile does; the results of these rows are discarded.
def empty_rows(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, width], uninitialized, with memory after it for the rest of the last tile."""
    room = max(8, next_power_of_2(rows)) if rows <= 64 else cdiv(rows, 64) * 64
    return torch.empty(room, width, dtype=dtype, device=device)[:rows]


def with_spare(x: Tensor, rows: int) -> Tensor:
    """x [T, K] extended to `rows` rows, as far as its memory has room after it."""
    memory = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    if len(x) >= rows or x.stride(0) < x.shape[1]:
        return x
    there = (memory - x.shape[1]) // x.stride(0) + 1
    return x.as_strided((max(len(x), min(rows, there)), x.shape[1]), x.stride())
