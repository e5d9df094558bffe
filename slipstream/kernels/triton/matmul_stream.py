"""Launches the matmul by tiles that the copy engine brings (`matmul_stream_kernels.py`)."""

import functools

import torch
import triton
from torch import Tensor

from slipstream.kernels.activation import Activation
from slipstream.kernels.triton import launch
from slipstream.kernels.triton.activation import GATES
from slipstream.kernels.triton.launch import with_spare
from slipstream.kernels.triton.matmul_stream_tiles import STEP
from slipstream.kernels.triton.matmul_tiles import Stream

try:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from slipstream.kernels.triton.matmul_stream_kernels import SWIZZLED, stream_kernel
except ImportError:  # Gluon is still an experiment of Triton's
    stream_kernel = None

ALIGNMENT = 16  # bytes: of what the copy engine reads, and of its rows


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """No chip before or after has its matrix instructions."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def serves(x: Tensor, weight: Tensor) -> bool:
    """Numbers of 16 bits whose rows the copy engine can read."""
    return (
        stream_kernel is not None
        and is_hopper(x.device)
        and x.dtype == weight.dtype
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[1] % STEP == 0
        and weight.data_ptr() % ALIGNMENT == 0
    )


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tiles: Stream,
    part: int,
    gated: Activation | None,
) -> None:
    """out [splits, T, N] = parts of x [T, K] times weight [N, K], or [2N, K] where `gated`."""
    splits, rows, width = out.shape
    own = tiles.blocks * tiles.high // (1 if gated is None else 2)
    grid = (
        max(1, triton.cdiv(rows - tiles.more, tiles.rows)),
        triton.cdiv(width, own),
        splits,
    )
    x = with_spare(_aligned(x), grid[0] * tiles.rows + tiles.more)
    stream_kernel[grid](
        _described(x, tiles.rows, tiles.depth),
        _described(x, tiles.more, tiles.depth) if tiles.more else None,
        _described(weight, tiles.high if gated is None else tiles.high // 2, tiles.depth),
        bias, out, rows, width, weight.shape[1], part, gated=GATES[gated], blocks=tiles.blocks,
        high=tiles.high, stages=tiles.stages, warps=tiles.warps, num_warps=tiles.warps,
        **launch.options(out.device),
    )  # fmt: skip


def _aligned(x: Tensor) -> Tensor:
    pitch = x.stride(0) * x.element_size()
    if x.stride(0) and pitch % ALIGNMENT == 0 and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _described(matrix: Tensor, rows: int, columns: int) -> "TensorDescriptor":
    return TensorDescriptor(
        matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], SWIZZLED.value
    )
