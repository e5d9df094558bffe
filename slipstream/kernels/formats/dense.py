"""Unquantised weights: float32, bfloat16, float16."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.formats.weight import PRODUCT_SLICE, RowScaled


@dataclass(frozen=True, eq=False)
class DenseMatrix(RowScaled):
    """A weight [N, K] in a floating-point dtype."""

    values: Tensor
    scales = None

    @property
    def floats(self) -> Tensor:  # type: ignore[override]
        return self.values

    @property
    def table_dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.values.dtype

    @property
    def table_device(self) -> torch.device:  # type: ignore[override]
        return self.values.device

    def look_up(self, index: Tensor) -> Tensor:
        rows: Tensor = F.embedding(index, self.values)
        return rows

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = self.values
        if x.shape[0] == 1 and x.dtype == torch.bfloat16 and x.device.type == "cpu":
            # On CPUs torch's product with a vector reads bf16 weights half as fast again as with a
            # matrix of one row; both accumulate in float32.
            row = torch.mv(weight, x[0]) if bias is None else torch.addmv(bias, weight, x[0])
            return row.unsqueeze(0)
        return F.linear(x, weight, bias)

    def logits(self, x: Tensor) -> Tensor:
        weight = self.values
        if weight.dtype == torch.float32:
            return F.linear(x, weight)
        if weight.device.type == "cuda":
            return torch.mm(x, weight.T, out_dtype=torch.float32)
        # torch rounds a bf16 product to bf16, which makes ties; so convert slices, keep float32.
        x = x.float()
        out = torch.empty(x.shape[0], weight.shape[0], device=x.device)
        # One buffer for all slices, since fresh memory costs more than the conversion.
        step = max(1, PRODUCT_SLICE // weight.shape[1])
        buffer = torch.empty(step, weight.shape[1], device=x.device)
        for start in range(0, weight.shape[0], step):
            rows = weight[start : start + step]
            converted = buffer[: len(rows)].copy_(rows)
            out[:, start : start + len(rows)] = F.linear(x, converted)
        return out
