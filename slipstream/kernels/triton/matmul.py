"""Launches the matmuls of few rows (`matmul_kernels.py`, `matmul_resident_kernels.py`)."""

import torch
import triton
from torch import Tensor

from slipstream.kernels.table import Float8Matrix, Weight
from slipstream.kernels.triton import launch
from slipstream.kernels.triton.matmul_kernels import matmul_kernel
from slipstream.kernels.triton.matmul_tiles import (
    LANES,
    RESIDENT_PART,
    Plan,
    Resident,
    plan,
    resident,
)
from slipstream.kernels.triton.norm import Rows

try:
    from slipstream.kernels.triton.matmul_resident_kernels import resident_kernel
except ImportError:  # Gluon is still an experiment of Triton's
    resident_kernel = None

SPLIT_ROWS = 64  # with more rows, a program adds up all splits itself: sums take much memory


def product(
    x: Rows, weight: Weight, bias: Tensor | None, dtype: torch.dtype, loose: bool = False
) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N] in `dtype`.

    `loose`, here and below: a row's bits may depend on the number of rows.
    """
    return _multiply(x, weight, bias, dtype, splitting=False, gated=False, loose=loose)[0]


def gated_product(
    x: Rows, weight: Weight, bias: Tensor | None, dtype: torch.dtype, loose: bool = False
) -> Tensor:
    """x [T, K], weight [2I, K], bias [2I] -> silu(gate) * up, [T, I] in `dtype`."""
    return _multiply(x, weight, bias, dtype, splitting=False, gated=True, loose=loose)[0]


def addends(
    x: Rows, weight: Weight, bias: Tensor | None, dtype: torch.dtype, loose: bool = False
) -> Tensor:
    """As `product`, or what is left to be added up: [parts, T, N] float32."""
    out = _multiply(x, weight, bias, dtype, splitting=True, gated=False, loose=loose)
    return out if out.dtype == torch.float32 else out[0]


def _multiply(
    x: Rows,
    weight: Weight,
    bias: Tensor | None,
    dtype: torch.dtype,
    splitting: bool,
    gated: bool,
    loose: bool,
) -> Tensor:
    """[parts, T, N]: in `dtype`, or in float32 where the sum was split."""
    values, scales = weight, None
    if isinstance(weight, Float8Matrix):
        values, scales = weight.values, weight.scales
    assert isinstance(values, Tensor)
    assert x.values.stride(-1) == 1
    assert values.is_contiguous()
    (rows, depth), width = x.values.shape, len(values)
    small = _resident(x.values, values, splitting) if loose else None
    if small is not None:
        x = _aligned(x)
        splits, parts = depth // RESIDENT_PART, depth // RESIDENT_PART
    else:
        chosen = plan(width, depth, rows, values.dtype, splitting)
        splits, parts = chosen.splits, 1 if rows > SPLIT_ROWS else chosen.splits
    out = torch.empty(
        parts, rows, width // 2 if gated else width,
        dtype=dtype if splits == 1 else torch.float32, device=x.values.device,
    )  # fmt: skip
    if not out.numel():
        return out
    if small is not None:
        _launch_resident(x, values, scales, bias, out, small, gated)
    else:
        _launch(x, values, scales, bias, out, chosen, gated)
    return out


def _aligned(x: Rows) -> Rows:
    """With rows that start at multiples of 16 numbers."""
    values = x.values
    if values.stride(0) % 16 == 0 and values.data_ptr() % 16 == 0:
        return x
    return Rows(values.clone(memory_format=torch.contiguous_format), x.scales)


def _resident(x: Tensor, weight: Tensor, splitting: bool) -> Resident | None:
    """Only for the tensor cores of a GPU."""
    if resident_kernel is None or not launch.overlaps(x.device) or weight.dtype == torch.float32:
        return None
    width, depth = weight.shape
    return resident(width, depth, len(x), splitting)


def _launch(
    x: Rows,
    weight: Tensor,
    weight_scales: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    chosen: Plan,
    gated: bool,
) -> None:
    tiles = chosen.tiles
    parts, rows, width = out.shape
    own = tiles.width // 2 if gated else tiles.width
    grid = (triton.cdiv(rows, tiles.rows), triton.cdiv(width, own), parts)
    matmul_kernel[grid](
        x.values, x.scales, weight, weight_scales, bias, out, x.values.stride(0), rows, width,
        depth=weight.shape[1], part=chosen.part, joined=chosen.splits // parts, gated=gated,
        block_m=tiles.rows, block_n=tiles.width, block_k=tiles.depth, stages=tiles.stages,
        ahead=tiles.ahead if launch.overlaps(out.device) else 0,
        num_warps=tiles.warps, num_stages=tiles.stages, **launch.options(out.device),
    )  # fmt: skip


def _launch_resident(
    x: Rows,
    weight: Tensor,
    weight_scales: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    tiles: Resident,
    gated: bool,
) -> None:
    parts, rows, width = out.shape
    own = tiles.width // 2 if gated else tiles.width
    grid = (triton.cdiv(rows, tiles.rows), triton.cdiv(width, own), parts)
    resident_kernel[grid](
        x.values, x.scales, weight, weight_scales, bias, out, x.values.stride(0), rows, width,
        depth=weight.shape[1], part=RESIDENT_PART, gated=gated, block_m=tiles.rows,
        block_n=tiles.width, lanes=LANES, row_warps=tiles.row_warps,
        num_warps=LANES * tiles.row_warps, **launch.options(out.device),
    )  # fmt: skip
