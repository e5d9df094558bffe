"""Matmuls, norms and activations in plain torch. Shapes and meanings: `kernels/composition.py`."""

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.reference.integers import integer_product
from slipstream.kernels.table import Float8Matrix, Int4Matrix, Int8Matrix, PackedMatrix, Weight

# Weights converted to float32 at a time: few enough to stay in a core's cache.
LOGITS_SLICE = 1 << 19
FLOAT8_MAX = 448.0  # of e4m3


def linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    if not isinstance(weight, Tensor):
        product = logits(x, weight).to(x.dtype)
        return product if bias is None else product + bias
    if x.shape[0] == 1 and x.dtype == torch.bfloat16 and x.device.type == "cpu":
        # On CPUs torch's product with a vector reads bf16 weights half as fast again as with a
        # matrix of one row; both accumulate in float32.
        row = torch.mv(weight, x[0]) if bias is None else torch.addmv(bias, weight, x[0])
        return row.unsqueeze(0)
    return F.linear(x, weight, bias)


def _float8_product(x: Tensor, weight: Float8Matrix) -> Tensor:
    """[T, N] float32, of x rounded to e4m3 row by row and the matrix, each with its scales."""
    values, scales = round_rows(x)
    product = F.linear(values.float(), weight.values.float())
    return product * scales.unsqueeze(-1) * weight.scales


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, K] as (e4m3 [N, K], scales [N] float32): the largest number of a row becomes 448."""
    largest = x.abs().amax(-1).float().clamp_min(torch.finfo(torch.float32).tiny * FLOAT8_MAX)
    scales = largest / FLOAT8_MAX
    return (x.float() / scales.unsqueeze(-1)).to(torch.float8_e4m3fn), scales


def logits(x: Tensor, weight: Weight) -> Tensor:
    if isinstance(weight, Float8Matrix):
        return _float8_product(x, weight)
    if isinstance(weight, Int8Matrix | Int4Matrix):
        return integer_product(x, weight)
    assert not isinstance(weight, PackedMatrix), "packed weights belong to their column"
    if weight.dtype == torch.float32:
        return F.linear(x, weight)
    if weight.device.type == "cuda":
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    # torch rounds a bf16 product to bf16, which makes ties; so convert slices and keep float32.
    x = x.float()
    out = torch.empty(x.shape[0], weight.shape[0], device=x.device)
    # One buffer for all slices, since fresh memory costs more than the conversion.
    buffer = torch.empty(max(1, LOGITS_SLICE // weight.shape[1]), weight.shape[1], device=x.device)
    for start in range(0, weight.shape[0], len(buffer)):
        rows = weight[start : start + len(buffer)]
        converted = buffer[: len(rows)].copy_(rows)
        out[:, start : start + len(rows)] = F.linear(x, converted)
    return out


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm (Zhang and Sennrich 2019)."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    residual = x + residual
    return norm(residual, weight, eps), residual


def gated_activation(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
