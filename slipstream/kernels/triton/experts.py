"""Mixtures of experts: norm, router, one product for gate and up, one for down, and a sum."""

import torch
import triton
from torch import Tensor

from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.table import Addend, ExpertsParts, JoiningAddend, SharedExpert
from slipstream.kernels.triton import grouped, launch, matmul
from slipstream.kernels.triton.linear import FEW_ROWS, Linears
from slipstream.kernels.triton.norm import Rows, normed_rows, round_rows
from slipstream.kernels.triton.operands import Operand, operand
from slipstream.kernels.triton.router import normed_logits
from slipstream.kernels.triton.routing_kernels import sum_kernel


class Experts:
    """What `kernels/table.py` calls experts. No number of rows is awaited by the host."""

    def __init__(self, linears: Linears) -> None:
        self._linears = linears

    def __call__(
        self, addend: Addend, residual: Tensor | None, parts: ExpertsParts
    ) -> tuple[Tensor, Tensor]:
        router, routing = parts.router, parts.router.routing
        values = addend.values if isinstance(addend, JoiningAddend) else addend
        few = values.shape[-2] <= FEW_ROWS or self._linears.invariant
        if few and parts.norm.bias is None:
            rows, total, logits = normed_logits(addend, residual, parts.norm, router)
        else:
            rows, total = normed_rows(addend, residual, parts.norm)
            matrix = DenseMatrix(router.weight)
            logits = matmul.addends(rows, matrix, router.bias, torch.float32)
        x = rows.values
        if not x.numel():
            return torch.zeros_like(total), total
        gate_up, down = operand(parts.gate_up), operand(parts.down)
        mean = len(x) * routing.num_chosen / routing.num_experts
        tile = grouped.tile_rows(len(x), mean, gate_up, down)
        choice = grouped.choose(logits, router, tile)
        active = grouped.multiply(
            _rows(x, gate_up), gate_up, parts.gate_up_bias, choice, x.dtype,
            routing.num_experts, gated=parts.activation, clamp=parts.clamp,
        )  # fmt: skip
        outputs = grouped.multiply(
            _rows(active, down), down, parts.down_bias, choice, torch.float32,
            routing.num_experts, scatters=True,
            splitting=few,
        )  # fmt: skip
        if parts.shared is None:
            return outputs, total  # what norms the stream next adds them up
        return self._with_shared(outputs, rows.values, parts.shared), total

    def _with_shared(self, outputs: Tensor, x: Tensor, shared: SharedExpert) -> Tensor:
        """outputs [parts, T, H] float32, weighted -> their sum with the shared expert of x."""
        active = self._linears.gated_linear(x, *shared.gate_up)
        weight, bias = shared.down
        added = self._linears.logits(active, weight)
        if bias is not None:
            added += bias
        out = torch.empty_like(x)
        block = triton.next_power_of_2(x.shape[1])
        sum_kernel[(len(x),)](
            outputs, added, shared.gate, x, out, outputs.stride(1), outputs.stride(0), x.stride(0),
            x.shape[1], parts=len(outputs), block=block,
            num_warps=min(16, max(1, block // 256)), **launch.options(x.device),
        )  # fmt: skip
        return out


def _rows(x: Tensor, weight: Operand) -> Rows:
    return round_rows(x) if weight.rounds_rows else Rows(x, None)
