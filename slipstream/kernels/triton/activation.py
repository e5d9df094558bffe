"""The gated activation of the feed-forward layer."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton import launch
from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs

BLOCK = 1024


@triton.jit
def gated_value(gate, up):
    """silu(gate) * up, in float32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _gated_kernel(gate_up, out, row_stride, width, block: tl.constexpr, pdl: tl.constexpr):
    """silu(gate) * up for one row's `block` columns; float32 inside, one rounding."""
    launch_dependents(pdl)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    source = gate_up + row * row_stride + column
    wait_for_inputs(pdl)
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    value = gated_value(gate, up)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


def gated_activation(gate_up: Tensor) -> Tensor:
    assert gate_up.stride(-1) == 1
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (rows, triton.cdiv(width, BLOCK))
        _gated_kernel[grid](
            gate_up, out, gate_up.stride(0), width, block=BLOCK, num_warps=4,
            **launch.options(gate_up.device),
        )  # fmt: skip
    return out
