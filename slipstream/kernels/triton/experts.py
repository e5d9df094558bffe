"""Mixtures of experts: norm, router, one product for gate and up, one for down, and a sum.

A shared expert is one more expert of both products, where it has the size of the others. A single
row chooses within the first of them.
"""

from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.activation import Activation
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.table import Addend, ExpertsParts, SharedExpert
from slipstream.kernels.triton import grouped, launch, matmul
from slipstream.kernels.triton.grouped import Scored
from slipstream.kernels.triton.grouped_kernels import PLAIN
from slipstream.kernels.triton.linear import FEW_ROWS, Linears
from slipstream.kernels.triton.norm import Rows, normed_rows, round_rows
from slipstream.kernels.triton.operands import FRAGMENTS, Operand, operand
from slipstream.kernels.triton.routing_kernels import sum_kernel

RouterProduct = tuple[DenseMatrix, Tensor | None]

# By parts: the router's matrix and bias, and behind them the gate of the shared expert. None where
# that is none of the experts.
_JOINED: WeakKeyDictionary[ExpertsParts, RouterProduct | None] = WeakKeyDictionary()


class Experts:
    """What `kernels/table.py` calls experts. No number of rows is awaited by the host."""

    def __init__(self, linears: Linears) -> None:
        self._linears = linears

    def __call__(
        self, addend: Addend, residual: Tensor | None, parts: ExpertsParts
    ) -> tuple[Tensor, Tensor]:
        rows, total = normed_rows(addend, residual, parts.norm)
        x = rows.values
        if not x.numel():
            return torch.zeros_like(total), total
        router, of_shared = joined_router(parts), parts.shared
        few = len(x) <= FEW_ROWS or self._linears.invariant
        # Of many rows the shared expert's tiles would be too small.
        if router is None or not few:
            router, of_shared = (DenseMatrix(parts.router.weight), parts.router.bias), None
        outputs = self._outputs(rows, parts, router, of_shared, few)
        if parts.shared is of_shared:
            return outputs, total  # what norms the stream next adds them up
        assert parts.shared is not None
        return self._with_shared(outputs, x, parts.shared), total

    def _outputs(
        self,
        rows: Rows,
        parts: ExpertsParts,
        router: RouterProduct,
        of_shared: SharedExpert | None,
        splitting: bool,
    ) -> Tensor:
        """[parts, T, H] float32, weighted, with those of a shared expert that is given."""
        x, routing = rows.values, parts.router.routing
        gate_up, down = operand(parts.gate_up), operand(parts.down)
        shared: tuple[Operand | None, Operand | None] = None, None
        if of_shared is not None:
            shared = operand(of_shared.gate_up[0]), operand(of_shared.down[0])
        mean = len(x) * routing.num_chosen / routing.num_experts
        tile = grouped.tile_rows(len(x), mean, gate_up, down)
        logits = matmul.addends(rows, *router, torch.float32)
        scored = Scored(logits, parts.router, of_shared is not None)
        alone = len(x) == 1 and FRAGMENTS not in (gate_up.form, down.form)
        choice = grouped.choose_alone(scored, tile) if alone else grouped.choose(scored, tile)
        active = grouped.multiply(
            _rows(x, gate_up), gate_up, parts.gate_up_bias, choice, x.dtype,
            routing.num_experts, gated=parts.activation, clamp=parts.clamp,
            scored=scored if alone else None, shared=shared[0],
        )  # fmt: skip
        return grouped.multiply(
            _rows(active, down), down, parts.down_bias, choice, torch.float32,
            routing.num_experts, scatters=True, splitting=splitting, shared=shared[1],
        )  # fmt: skip

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


def joined_router(parts: ExpertsParts) -> RouterProduct | None:
    """See `_JOINED`."""
    if parts not in _JOINED:
        _JOINED[parts] = _join(parts) if _is_expert(parts) else None
    return _JOINED[parts]


def _join(parts: ExpertsParts) -> RouterProduct:
    router, shared = parts.router, parts.shared
    if shared is None or shared.gate is None:
        return DenseMatrix(router.weight), router.bias
    bias = None if router.bias is None else F.pad(router.bias, (0, 1))
    return DenseMatrix(torch.cat((router.weight, shared.gate))), bias


def _is_expert(parts: ExpertsParts) -> bool:
    """Whether the shared expert is like those that are chosen."""
    shared, experts = parts.shared, parts.router.routing.num_experts
    if shared is None or parts.clamp is not None or parts.activation is not Activation.SILU:
        return False
    biases = parts.gate_up_bias, parts.down_bias, shared.gate_up[1], shared.down[1]
    if any(bias is not None for bias in biases):
        return False
    pairs = (parts.gate_up, shared.gate_up[0]), (parts.down, shared.down[0])
    return all(_alike(operand(all_), operand(one), experts) for all_, one in pairs)


def _alike(stacked: Operand, one: Operand, experts: int) -> bool:
    """Whether `one` could be another of the stacked matrices."""
    return (
        stacked.form == one.form == PLAIN.value
        and stacked.shape == (one.shape[0] * experts, one.shape[1])
        and stacked.values.dtype == one.values.dtype
        and (stacked.row_scales is None) == (one.row_scales is None)
    )
