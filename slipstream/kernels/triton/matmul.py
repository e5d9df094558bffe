"""Launches the matmuls for few rows. There are two kernels:

- `matmul_stream_kernels.py`: 16-bit matrices and e4m3 on Hopper, loaded by its copy engine (TMA);
- `matmul_kernels.py`: everything else; it also serves many rows with batch-invariant results.
"""

import functools
from typing import cast

import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.float8 import Float8Matrix
from slipstream.kernels.formats.weight import RowScaled, Weight
from slipstream.kernels.norm import Activation
from slipstream.kernels.triton import launch
from slipstream.kernels.triton.activation import GATES
from slipstream.kernels.triton.adapters import NOT_SHRUNK, NOT_STREAMED, Gain
from slipstream.kernels.triton.launch import cdiv, empty_rows, with_spare
from slipstream.kernels.triton.matmul_kernels import matmul_kernel
from slipstream.kernels.triton.matmul_tiles import (
    NARROWEST,
    MatmulPlan,
    MatmulTiles,
    StreamTiles,
    few_rows,
    many_rows,
    plan,
)
from slipstream.kernels.triton.norm import MatmulRows

try:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from slipstream.kernels.triton.adapters_stream import GROUP
    from slipstream.kernels.triton.matmul_stream_kernels import (
        SWIZZLED,
        SWIZZLED_BYTES,
        stream_kernel,
    )
except ImportError:  # Gluon is still an experiment of Triton's
    stream_kernel = None

ALIGNMENT = 16  # bytes; the copy engine needs it of a matrix and of each of its rows


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device has compute capability 9.x; only these have the wgmma instructions."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def streams(x: Tensor, weight: Tensor) -> bool:
    """Whether `stream_kernel` can compute x times weight: both bfloat16, float16 or e4m3, on
    Hopper, with weights whose rows the copy engine can read."""
    return (
        stream_kernel is not None
        and is_hopper(x.device)
        and x.dtype == weight.dtype
        and weight.dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
        and weight.shape[1] * weight.itemsize % (2 * NARROWEST) == 0
        and weight.data_ptr() % ALIGNMENT == 0
    )


def stream_multiply(
    x: MatmulRows,
    weight: RowScaled,
    bias: Tensor | None,
    out: Tensor,
    tiles: StreamTiles,
    part: int,
    gated: Activation | None,
    low_rank: Gain | None = None,
) -> None:
    """Write the partial sums of x [T, K] times weight [N, K] ([2N, K] if `gated`) to
    out [splits, T, N]; each split adds up `part` columns, and the first has `low_rank`."""
    splits, rows, width = out.shape
    values = weight.values
    own = tiles.blocks * tiles.high // (1 if gated is None else 2)
    grid = (max(1, cdiv(rows - tiles.more, tiles.rows)), cdiv(width, own), splits)
    gain = NOT_STREAMED
    if low_rank is not None:
        gain = low_rank.streamed(grid[1] * splits)
        down = low_rank.adapted.factors.down.flatten(0, 1)
        gain["down"] = _described(down, GROUP.value, tiles.depth)
        grid = (1, cast(int, gain["makers"]) + grid[1] * splits, 1)
    lines = with_spare(_aligned(x.values), grid[0] * tiles.rows + tiles.more)
    stream_kernel[grid](
        _described(lines, tiles.rows, tiles.depth),
        _described(lines, tiles.more, tiles.depth) if tiles.more else None, x.scales,
        _described(values, tiles.high if gated is None else tiles.high // 2, tiles.depth),
        weight.scales, bias, out, rows, width, values.shape[1], part, gated=GATES[gated],
        blocks=tiles.blocks, high=tiles.high, stages=tiles.stages, warps=tiles.warps,
        num_warps=tiles.warps,
        **gain, **launch.options(out.device),
    )  # fmt: skip


def _aligned(x: Tensor) -> Tensor:
    pitch = x.stride(0) * x.element_size()
    if x.stride(0) and pitch % ALIGNMENT == 0 and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _described(matrix: Tensor, rows: int, columns: int) -> "TensorDescriptor":
    order = SWIZZLED_BYTES if matrix.itemsize == 1 else SWIZZLED
    return TensorDescriptor(
        matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], order.value
    )


SPLIT_ROWS = 64  # with more rows, a program adds up all splits itself, to save memory

_SERVED = (DenseMatrix, Float8Matrix)


def operand(weight: Weight) -> RowScaled:
    """The weight in the form that these kernels read.

    Raises:
        UsageError: the kernels do not support its format.
    """
    if type(weight) not in _SERVED:
        raise UsageError(
            f"the kernels for GPUs do not multiply {type(weight).__name__}; use another "
            "quantization, or device=cpu"
        )
    return cast(RowScaled, weight)


def multiply(
    x: MatmulRows,
    weight: RowScaled,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    splitting: bool = False,
    gated: Activation | None = None,
    loose: bool = False,
    low_rank: Gain | None = None,
) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N] in `dtype`.

    Args:
        splitting: the sum over K may be split; then the result is the partial sums
            [parts, T, N] float32, which the next op adds up.
        gated: weight [2I, K], bias [2I] -> activation(gate) * up, [T, I].
        loose: with more than 64 rows, a row's bits may depend on their number.
        low_rank: what adapters add, with up to 64 rows.
    """
    values = weight.values
    assert x.values.stride(-1) == 1
    assert values.is_contiguous()
    rows, width = len(x.values), len(values)
    assert low_rank is None or rows <= SPLIT_ROWS
    chosen = _plan(x.values, values, splitting, gated is not None, loose)
    splits = parts = chosen.splits
    tiles = chosen.tiles
    if rows > SPLIT_ROWS and isinstance(tiles, MatmulTiles):
        parts = 1
    if gated is not None:
        assert splits == 1
        out = empty_rows(rows, width // 2, dtype, values.device).unsqueeze(0)
    else:
        dtype = dtype if splits == 1 else torch.float32
        out = torch.empty(parts, rows, width, dtype=dtype, device=values.device)
    if out.numel() and isinstance(tiles, StreamTiles):
        stream_multiply(x, weight, bias, out, tiles, chosen.part, gated, low_rank)
    elif out.numel() and isinstance(tiles, MatmulTiles):
        _launch(x, weight, bias, out, chosen, tiles, gated, low_rank)
    return out if splitting and out.dtype == torch.float32 else out[0]


def _plan(x: Tensor, weight: Tensor, splitting: bool, gated: bool, loose: bool) -> MatmulPlan:
    rows, (width, depth) = len(x), weight.shape
    chosen = plan(width, depth, rows, weight.dtype, splitting)
    if not rows or not streams(x, weight):
        return chosen
    if rows <= SPLIT_ROWS:
        return few_rows(width, depth, rows, chosen, weight.itemsize)
    loose &= weight.itemsize > 1  # the library multiplies more rows in e4m3
    return (many_rows(width, depth, rows, splitting, gated) if loose else None) or chosen


def serves_many(x: Tensor, weight: RowScaled, splitting: bool, gated: bool) -> bool:
    """Whether our kernel is faster than the library for these more than 64 rows of x, if a row's
    bits may depend on their number."""
    if weight.scales is not None or not streams(x, weight.values):
        return False
    width, depth = weight.shape
    return many_rows(width, depth, len(x), splitting, gated) is not None


def _launch(
    x: MatmulRows,
    weight: RowScaled,
    bias: Tensor | None,
    out: Tensor,
    chosen: MatmulPlan,
    tiles: MatmulTiles,
    gated: Activation | None,
    low_rank: Gain | None,
) -> None:
    parts, rows, width = out.shape
    own = tiles.width if gated is None else tiles.width // 2
    grid = (cdiv(rows, tiles.rows), cdiv(width, own), parts)
    gain = NOT_SHRUNK if low_rank is None else low_rank.shrunk()
    loaded = tiles.rows * x.values.itemsize + tiles.width * weight.values.itemsize
    stages = launch.fitting_stages(out.device, tiles.stages, loaded * tiles.depth)
    matmul_kernel[grid](
        x.values, x.scales, weight.values, weight.scales, bias, out, x.values.stride(0), rows,
        width, depth=weight.shape[1], part=chosen.part, joined=chosen.splits // parts,
        gated=GATES[gated], block_m=tiles.rows, block_n=tiles.width, block_k=tiles.depth,
        stages=stages, ahead=tiles.ahead if launch.overlaps(out.device) else 0,
        num_warps=tiles.warps, num_stages=stages, **gain, **launch.options(out.device),
    )  # fmt: skip
