"""Root mean square norms: one program per row, float32 inside, one rounding at the end."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm_kernel(x, residual, weight, out, total, row_stride, eps, width, block: tl.constexpr):
    """Rows of `x` (plus `residual`, where there is one) over `width` columns, kept in registers.

    The sum is rounded to the model's dtype before it is normed: what the next layer adds to and
    what this one sees are the same numbers.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    scales = tl.load(weight + column, mask=inside, other=0.0)
    value = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row * width + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * width + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    normed = value * scale * scales.to(tl.float32)
    tl.store(out + row * width + column, normed.to(out.dtype.element_ty), mask=inside)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _launch(rows, None, weight, eps, out, None)
    return out.view(x.shape)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    residual = residual.contiguous()
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    _launch(x, residual, weight, eps, out, total)
    return out, total


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    total: Tensor | None,
) -> None:
    if not x.numel():
        return
    assert x.stride(-1) == 1
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    # 16 numbers a thread: what one thread can load in two wide loads.
    warps = min(16, max(1, block // 512))
    _norm_kernel[(rows,)](
        x, residual, weight, out, total, x.stride(0), eps, width, block, num_warps=warps
    )
