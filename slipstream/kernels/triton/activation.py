"""The gated activation of the feed-forward layer, and the gates of attention."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.norm import Activation
from slipstream.kernels.triton import launch
from slipstream.kernels.triton.launch import cdiv, launch_dependents, wait_for_inputs

BLOCK = 1024
# The `gated` argument of kernels: a number for each activation, 0 without a gate.
SILU, GELU_TANH = tl.constexpr(1), tl.constexpr(2)
GATES = {None: 0, Activation.SILU: SILU.value, Activation.GELU_TANH: GELU_TANH.value}


@triton.jit
def gated_value(gate, up, gated: tl.constexpr):
    """activation(gate) * up, in float32. The tanh form of GELU is a sigmoid, too."""
    power = gate
    if gated == GELU_TANH:
        power = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-power)) * up


@triton.jit
def _gated_kernel(
    gate_up, out, row_stride, width, gated: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr
):
    """activation(gate) * up for one row's `block` columns; float32 inside, one rounding."""
    launch_dependents(pdl)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    source = gate_up + row * row_stride + column
    wait_for_inputs(pdl)
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    value = gated_value(gate, up, gated)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


def gated_activation(
    gate_up: Tensor, activation: Activation = Activation.SILU, dtype: torch.dtype | None = None
) -> Tensor:
    """gate_up [T, 2I], gate first -> activation(gate) * up, [T, I] in `dtype`, or its own."""
    assert gate_up.stride(-1) == 1
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = launch.empty_rows(rows, width, dtype or gate_up.dtype, gate_up.device)
    if out.numel():
        grid = (rows, cdiv(width, BLOCK))
        _gated_kernel[grid](
            gate_up, out, gate_up.stride(0), width, gated=GATES[activation], block=BLOCK,
            num_warps=4, **launch.options(gate_up.device),
        )  # fmt: skip
    return out


@triton.jit
def _gate_kernel(
    x, gates, out, row_stride, gates_stride, width, block: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    """x * sigmoid(gates) for one row's `block` columns."""
    launch_dependents(pdl)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    wait_for_inputs(pdl)
    value = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gates + row * gates_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = value / (1.0 + tl.exp(-gate))
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


def gated_rows(x: Tensor, gates: Tensor) -> Tensor:
    """x * sigmoid(gates), [T, N], in float32 and rounded once."""
    assert x.stride(-1) == gates.stride(-1) == 1
    rows, width = x.shape
    out = launch.empty_rows(rows, width, x.dtype, x.device)
    if out.numel():
        _gate_kernel[(rows, cdiv(width, BLOCK))](
            x, gates, out, x.stride(0), gates.stride(0), width, block=BLOCK, num_warps=4,
            **launch.options(x.device),
        )  # fmt: skip
    return out
