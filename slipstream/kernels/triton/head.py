"""The head's matmul, whose results stay in float32."""

import torch
from torch import Tensor

from slipstream.kernels.reference import dense
from slipstream.kernels.table import Float8Matrix, Weight
from slipstream.kernels.triton import matmul
from slipstream.kernels.triton.norm import Rows, round_rows


def few_logits(x: Tensor, weight: Weight) -> Tensor:
    """x [T, K], weight [V, K] -> [T, V] float32."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows = round_rows(x) if isinstance(weight, Float8Matrix) else Rows(x, None)
    return matmul.product(rows, weight, None, torch.float32)


def many_logits(x: Tensor, weight: Weight) -> Tensor:
    """The same by the library, but for e4m3: its matmul rounds what comes out."""
    if isinstance(weight, Float8Matrix):
        return few_logits(x, weight)
    return dense.logits(x, weight)
