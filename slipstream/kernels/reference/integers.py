"""Products with matrices of integers. Meanings: `kernels/table.py`."""

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.table import Float8Matrix, Int4Matrix, Int8Matrix, PackedMatrix, Weight
from slipstream.kernels.weights import row_range, shape_of

# Weights that are whole numbers of float32 or float64 at a time: few enough for a core's cache.
SLICE = 1 << 19
INT8_MAX = 127
_WHOLE = 1.5 * 2.0**23  # from here to 2 ** 24 float32 has the integers and nothing between
_TINY = torch.finfo(torch.float32).tiny * INT8_MAX


def integer_product(x: Tensor, weight: Int8Matrix | Int4Matrix) -> Tensor:
    """x [T, K] -> [T, N] float32."""
    if isinstance(weight, Int8Matrix) and weight.rounds_input:
        return _exact_product(x, weight)
    rows, columns = shape_of(weight)
    x = x.float()
    out = torch.empty(x.shape[0], rows, device=x.device)
    step = max(1, SLICE // columns)
    for start in range(0, rows, step):
        part = dequantised(row_range(weight, start, start + step))
        out[:, start : start + step] = F.linear(x, part)
    return out


def _exact_product(x: Tensor, weight: Int8Matrix) -> Tensor:
    """Of integers on both sides; float64 holds every sum of such products as it is."""
    values, scales = round_rows(x)
    values = values.double()
    rows, columns = weight.values.shape
    out = torch.empty(x.shape[0], rows, device=x.device)
    step = max(1, SLICE // columns)
    for start in range(0, rows, step):
        part = weight.values[start : start + step]
        out[:, start : start + step] = F.linear(values, part.double())
    return out * scales.unsqueeze(-1) * weight.scales


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, K] as (int8 [N, K], scales [N] float32): the largest number of a row becomes 127.

    Halves go to the even neighbour.
    """
    scales = x.abs().amax(-1).float().clamp_min(_TINY) / INT8_MAX
    scaled = x.float() / scales.unsqueeze(-1)
    return to_nearest(scaled, out=scaled).to(torch.int8), scales


def to_nearest(x: Tensor, out: Tensor) -> Tensor:
    """Float32 numbers below 2 ** 22 as integers in `out`, halves to the even neighbour.

    Torch's own function shares even a few thousand numbers among threads, which takes far longer
    than the work where others keep the machine busy.
    """
    return torch.add(x, _WHOLE, out=out).sub_(_WHOLE)


def dequantised(weight: Weight) -> Tensor:
    """[N, K] float32, the numbers that a weight stands for."""
    if isinstance(weight, Tensor):
        return weight.float()
    if isinstance(weight, Float8Matrix | Int8Matrix):
        return weight.values.float() * weight.scales.unsqueeze(-1)
    assert not isinstance(weight, PackedMatrix), "packed weights belong to their column"
    grouped = unpacked(weight.values).float().view(*weight.scales.shape, weight.group)
    zeros = 8.0 if weight.zeros is None else weight.zeros.float().unsqueeze(-1)
    return ((grouped - zeros) * weight.scales.unsqueeze(-1)).flatten(1)


def unpacked(values: Tensor) -> Tensor:
    """[N, K / 2] uint8, two integers a byte -> [N, K] uint8, the lower half first."""
    return torch.stack((values & 15, values >> 4), -1).flatten(-2)
