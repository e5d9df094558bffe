"""Launches the matmul of few rows (`matmul_kernels.py`)."""

import torch
import triton
from torch import Tensor

from slipstream.kernels.table import Float8Matrix, Weight
from slipstream.kernels.triton import launch
from slipstream.kernels.triton.matmul_kernels import matmul_kernel
from slipstream.kernels.triton.matmul_tiles import Plan, plan
from slipstream.kernels.triton.norm import Rows

SPLIT_ROWS = 64  # with more rows, a program adds up all splits itself: sums take much memory


def product(x: Rows, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N] in `dtype`."""
    return _multiply(x, weight, bias, dtype, splitting=False, gated=False)[0]


def gated_product(x: Rows, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [T, K], weight [2I, K], bias [2I] -> silu(gate) * up, [T, I] in `dtype`."""
    return _multiply(x, weight, bias, dtype, splitting=False, gated=True)[0]


def addends(x: Rows, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """As `product`, or what is left to be added up: [parts, T, N] float32."""
    out = _multiply(x, weight, bias, dtype, splitting=True, gated=False)
    return out if out.dtype == torch.float32 else out[0]


def _multiply(
    x: Rows,
    weight: Weight,
    bias: Tensor | None,
    dtype: torch.dtype,
    splitting: bool,
    gated: bool,
) -> Tensor:
    """[parts, T, N]: in `dtype`, or in float32 where the sum was split."""
    values, scales = weight, None
    if isinstance(weight, Float8Matrix):
        values, scales = weight.values, weight.scales
    assert isinstance(values, Tensor)
    assert x.values.stride(-1) == 1
    assert values.is_contiguous()
    (rows, depth), width = x.values.shape, len(values)
    chosen = plan(width, depth, rows, values.dtype, splitting)
    joined = chosen.splits if rows > SPLIT_ROWS else 1
    parts = chosen.splits // joined
    out = torch.empty(
        parts, rows, width // 2 if gated else width,
        dtype=dtype if chosen.splits == 1 else torch.float32, device=x.values.device,
    )  # fmt: skip
    if out.numel():
        _launch(x, values, scales, bias, out, chosen, joined, gated)
    return out


def _launch(
    x: Rows,
    weight: Tensor,
    weight_scales: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    chosen: Plan,
    joined: int,
    gated: bool,
) -> None:
    tiles = chosen.tiles
    parts, rows, width = out.shape
    own = tiles.width // 2 if gated else tiles.width
    grid = (triton.cdiv(rows, tiles.rows), triton.cdiv(width, own), parts)
    matmul_kernel[grid](
        x.values, x.scales, weight, weight_scales, bias, out, x.values.stride(0), rows, width,
        depth=weight.shape[1], part=chosen.part, joined=joined, gated=gated, block_m=tiles.rows,
        block_n=tiles.width, block_k=tiles.depth, stages=tiles.stages,
        ahead=tiles.ahead if launch.overlaps(out.device) else 0, peeled=tiles.peeled,
        num_warps=tiles.warps, num_stages=tiles.stages, **launch.options(out.device),
    )  # fmt: skip
