"""The matmul ops of the backend: our own kernels for few rows, mostly cuBLAS for more.

`Linears(invariant=True)` uses our own kernels for any number of rows, so that the bits of a row
never depend on the other rows; cuBLAS chooses its kernels by the number of rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.kernels.adapters import Adapted
from slipstream.kernels.formats.weight import RowScaled, Weight
from slipstream.kernels.norm import Activation
from slipstream.kernels.table import Addend, Norm
from slipstream.kernels.triton import grouped, matmul
from slipstream.kernels.triton.activation import gated_activation
from slipstream.kernels.triton.adapters import Gain, add_low_rank
from slipstream.kernels.triton.matmul import operand
from slipstream.kernels.triton.norm import MatmulRows, normed_rows, round_rows
from slipstream.kernels.triton.operands import is_packed
from slipstream.kernels.triton.operands import operand as packed

FEW_ROWS = 64


class Linears:
    """The ops `linear`, `logits`, and those that combine norms and matmuls (`kernels/ops.py`)."""

    def __init__(self, invariant: bool = False) -> None:
        self.invariant = invariant

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None, adapted: Adapted | None = None
    ) -> Tensor:
        joined = self._gain(x, weight, adapted)
        y = self._linear(x, weight, bias, joined)
        if adapted is None or joined is not None:
            return y
        return add_low_rank(y, _contiguous(x), adapted)

    def _gain(self, x: Tensor, weight: Weight, adapted: Adapted | None) -> Gain | None:
        """The adapters' product, if one of our kernels adds it to its own product; else None."""
        few = len(x) <= FEW_ROWS and x.dtype in (torch.bfloat16, torch.float16)
        if adapted is None or not few or self.invariant or is_packed(weight):
            return None
        if operand(weight).scales is not None and matmul.is_hopper(x.device):
            return None  # adapters multiply x before it is rounded, which that kernel does not have
        return Gain(_contiguous(x), adapted)

    def _linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None, low_rank: Gain | None
    ) -> Tensor:
        if is_packed(weight):
            splitting = len(x) <= 2 * FEW_ROWS or self.invariant
            return _packed(x, weight, bias, x.dtype, splitting=splitting)
        factor = operand(weight)
        if not self._ours(x, factor, splitting=True):
            return _library(_rows(x, factor), factor, bias, x.dtype)
        rows, free = _rows(x, factor), self._free(x)
        return matmul.multiply(
            rows, factor, bias, x.dtype, splitting=True, loose=free, low_rank=low_rank
        )

    def norm_linear(
        self,
        addend: Addend,
        residual: Tensor | None,
        norm: Norm | None,
        weight: Weight,
        bias: Tensor | None,
        adapted: Adapted | None = None,
    ) -> tuple[Tensor, Tensor]:
        if adapted is not None:
            x, total = self.norm(addend, residual, norm)
            return self._adapted(x, weight, bias, total.dtype, adapted), total
        if is_packed(weight):
            rows, total = normed_rows(addend, residual, norm)
            return _packed(rows.values, weight, bias, total.dtype), total
        factor = operand(weight)
        rows, total = normed_rows(addend, residual, norm, factor.scales is not None)
        if self._ours(total, factor):
            free = self._free(total)
            return matmul.multiply(rows, factor, bias, total.dtype, loose=free), total
        return _library(rows, factor, bias, total.dtype), total

    def norm_gated_linear(
        self,
        addend: Addend,
        residual: Tensor | None,
        norm: Norm | None,
        weight: Weight,
        bias: Tensor | None,
        activation: Activation = Activation.SILU,
        adapted: Adapted | None = None,
    ) -> tuple[Tensor, Tensor]:
        if adapted is not None:
            # The gate is computed from sums that are not rounded yet, as without adapters.
            x, total = self.norm(addend, residual, norm)
            joined = self._gain(x, weight, adapted)
            if joined is not None:
                rows = _rows(x, operand(weight))
                return self._gated(rows, weight, bias, total.dtype, activation, joined), total
            gate_up = self._adapted(x, weight, bias, torch.float32, adapted)
            return gated_activation(gate_up, activation, total.dtype), total
        rounded = not is_packed(weight) and operand(weight).scales is not None
        rows, total = normed_rows(addend, residual, norm, rounded)
        return self._gated(rows, weight, bias, total.dtype, activation), total

    def gated_linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """x [T, K], weight [2I, K] -> silu(gate) * up, [T, I] in the dtype of x."""
        rows = MatmulRows(x, None) if is_packed(weight) else _rows(x, operand(weight))
        return self._gated(rows, weight, bias, x.dtype, Activation.SILU)

    def _gated(
        self,
        x: MatmulRows,
        weight: Weight,
        bias: Tensor | None,
        dtype: torch.dtype,
        activation: Activation,
        low_rank: Gain | None = None,
    ) -> Tensor:
        if is_packed(weight):
            return _packed(x.values, weight, bias, dtype, gated=activation)
        factor = operand(weight)
        if self._ours(x.values, factor, gated=True):
            free = self._free(x.values)
            return matmul.multiply(
                x, factor, bias, dtype, gated=activation, loose=free, low_rank=low_rank
            )
        return gated_activation(_library(x, factor, bias, dtype), activation)

    def add_norm(self, addend: Addend, residual: Tensor, norm: Norm) -> Tensor:
        return normed_rows(addend, residual, norm)[0].values

    def norm(
        self, addend: Addend, residual: Tensor | None, norm: Norm | None
    ) -> tuple[Tensor, Tensor]:
        rows, total = normed_rows(addend, residual, norm)
        return rows.values, total

    def joined_linear(
        self,
        parts: Sequence[tuple[Tensor, Norm | None]],
        weight: Weight,
        bias: Tensor | None,
        adapted: Adapted | None = None,
    ) -> Tensor:
        sides = [self._normed(side, norm) for side, norm in parts]
        x = torch.cat(sides, -1) if len(sides) > 1 else sides[0]
        if adapted is not None:
            return self._adapted(x, weight, bias, x.dtype, adapted)
        return self._product(x, weight, bias, x.dtype)

    def _adapted(
        self, x: Tensor, weight: Weight, bias: Tensor | None, dtype: torch.dtype, adapted: Adapted
    ) -> Tensor:
        joined = self._gain(x, weight, adapted)
        y = self._product(x, weight, bias, dtype, joined)
        return y if joined is not None else add_low_rank(y, x, adapted)

    def _product(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        dtype: torch.dtype,
        low_rank: Gain | None = None,
    ) -> Tensor:
        """[T, N] in `dtype`; if cuBLAS multiplies, in the dtype of x."""
        if is_packed(weight):
            return _packed(x, weight, bias, dtype)
        factor = operand(weight)
        if self._ours(x, factor):
            rows, free = _rows(x, factor), self._free(x)
            return matmul.multiply(rows, factor, bias, dtype, loose=free, low_rank=low_rank)
        return _library(_rows(x, factor), factor, bias, x.dtype)

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        return x if norm is None else normed_rows(x, None, norm)[0].values

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        """cuBLAS multiplies many rows, except for e4m3, since it would round the result."""
        if is_packed(weight):
            return _packed(x, weight, None, torch.float32)
        factor = operand(weight)
        few = len(x) <= FEW_ROWS and self._ours(x, factor)
        if self.invariant or few or factor.scales is not None:
            return matmul.multiply(_rows(x, factor), factor, None, torch.float32)
        return factor.logits(x)

    def _ours(
        self, x: Tensor, weight: RowScaled, splitting: bool = False, gated: bool = False
    ) -> bool:
        """Whether to use our own kernels. For float32, tiles for tensor cores are not faster."""
        if self.invariant:
            return True
        if len(x) > FEW_ROWS:
            return matmul.serves_many(x, weight, splitting, gated)
        return x.dtype != torch.float32 or weight.scales is not None

    def _free(self, x: Tensor) -> bool:
        """Whether bits may depend on the number of rows."""
        return len(x) > FEW_ROWS and not self.invariant


def _packed(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    dtype: torch.dtype,
    gated: Activation | None = None,
    splitting: bool = False,
) -> Tensor:
    """Multiply as the only expert of a mixture: bits do not depend on other rows."""
    rows = MatmulRows(_contiguous(x), None)
    return grouped.multiply(
        rows, packed(weight), bias, None, dtype, gated=gated, splitting=splitting
    )


def _contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows(x: Tensor, weight: RowScaled) -> MatmulRows:
    x = _contiguous(x)
    return MatmulRows(x, None) if weight.scales is None else round_rows(x)


def _library(x: MatmulRows, weight: RowScaled, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[T, N] in `dtype`."""
    if x.scales is None or weight.scales is None:
        return weight.linear(x.values, bias)
    if not _scaled_matmul_serves(x.values, weight.values, dtype):
        return matmul.multiply(x, weight, bias, dtype)
    out: Tensor = torch._scaled_mm(  # type: ignore[no-untyped-call,unused-ignore]
        x.values, weight.values.T, scale_a=x.scales[:, None], scale_b=weight.scales[None, :],
        out_dtype=dtype, use_fast_accum=False,
    )  # fmt: skip
    return out if bias is None else out + bias


def _scaled_matmul_serves(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch's scaled matmul supports these: sizes in multiples of 16, bfloat16 results."""
    if x.device.type != "cuda" or dtype != torch.bfloat16:
        return False
    if torch.cuda.get_device_capability(x.device) < (9, 0):
        return False
    return all(size % 16 == 0 for size in weight.shape) and len(x) > 0
