"""Mixture of experts: norm and router, choice, grouped products for gate-up and down, and a sum.

For few rows, a shared expert of the same form as the others is one more expert of both products.
"""

import torch
from torch import Tensor

from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.norm import Activation, UnreducedSum
from slipstream.kernels.table import Addend, ExpertsParts, PostNormAddend, SharedExpert
from slipstream.kernels.triton import grouped, launch, matmul
from slipstream.kernels.triton.chosen_experts import choose
from slipstream.kernels.triton.launch import next_power_of_2
from slipstream.kernels.triton.linear import FEW_ROWS, Linears
from slipstream.kernels.triton.norm import MatmulRows, normed_rows, round_rows
from slipstream.kernels.triton.operands import Operand, operand
from slipstream.kernels.triton.router import normed_logits
from slipstream.kernels.triton.routing_kernels import sum_kernel


class GroupedExperts:
    """The `experts` op of `kernels/table.py`. The host never waits for the routing's results."""

    def __init__(self, linears: Linears) -> None:
        self._linears = linears

    def __call__(
        self, addend: Addend, residual: Tensor | None, parts: ExpertsParts
    ) -> tuple[Tensor, Tensor]:
        router, routing, shared = parts.router, parts.router.routing, parts.shared
        made = addend.values if isinstance(addend, PostNormAddend) else addend
        values = made.values if isinstance(made, UnreducedSum) else made
        few = values.shape[-2] <= FEW_ROWS or self._linears.invariant
        joins = few and shared is not None and _is_expert(parts, shared)
        joined = shared if joins else None
        if few and parts.norm.bias is None:
            gate = None if joined is None else joined.gate
            rows, total, logits = normed_logits(addend, residual, parts.norm, router, gate)
        else:
            rows, total = normed_rows(addend, residual, parts.norm)
            matrix = DenseMatrix(router.weight)
            logits = matmul.multiply(rows, matrix, router.bias, torch.float32, splitting=True)
        x = rows.values
        if not x.numel():
            return torch.zeros_like(total), total
        gate_up, down = operand(parts.gate_up), operand(parts.down)
        mean = len(x) * routing.num_chosen / routing.num_experts
        tile = grouped.tile_rows(len(x), mean, gate_up, down)
        choice = choose(logits, router, tile, joined is not None)
        active = grouped.multiply(
            _rows(x, gate_up), gate_up, parts.gate_up_bias, choice, x.dtype,
            routing.num_experts, gated=parts.activation, clamp=parts.clamp,
            shared=None if joined is None else operand(joined.gate_up[0]),
        )  # fmt: skip
        outputs = grouped.multiply(
            _rows(active, down), down, parts.down_bias, choice, torch.float32,
            routing.num_experts, scatters=True, splitting=few,
            shared=None if joined is None else operand(joined.down[0]),
        )  # fmt: skip
        if shared is joined:
            return outputs, total  # the next norm adds them up
        assert shared is not None
        return self._with_shared(outputs, x, shared), total

    def _with_shared(self, outputs: Tensor, x: Tensor, shared: SharedExpert) -> Tensor:
        """outputs [parts, T, H] float32, weighted -> their sum with the shared expert of x."""
        active = self._linears.gated_linear(x, *shared.gate_up)
        weight, bias = shared.down
        added = self._linears.logits(active, weight)
        if bias is not None:
            added += bias
        out = torch.empty_like(x)
        block = next_power_of_2(x.shape[1])
        sum_kernel[(len(x),)](
            outputs, added, shared.gate, x, out, outputs.stride(1), outputs.stride(0), x.stride(0),
            x.shape[1], parts=len(outputs), block=block,
            num_warps=min(16, max(1, block // 256)), **launch.options(x.device),
        )  # fmt: skip
        return out


def _rows(x: Tensor, weight: Operand) -> MatmulRows:
    return round_rows(x) if weight.rounds_rows else MatmulRows(x, None)


def _is_expert(parts: ExpertsParts, shared: SharedExpert) -> bool:
    """Whether the grouped products can compute the shared expert as one more expert."""
    biases = parts.gate_up_bias, parts.down_bias, shared.gate_up[1], shared.down[1], parts.norm.bias
    if parts.clamp is not None or parts.activation is not Activation.SILU:
        return False
    if any(bias is not None for bias in biases):
        return False
    pairs = (parts.gate_up, shared.gate_up[0]), (parts.down, shared.down[0])
    experts = parts.router.routing.num_experts
    return all(grouped.could_join(operand(all_), operand(one), experts) for all_, one in pairs)
