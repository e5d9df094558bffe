"""A norm and the router's product in one kernel, with the gate of a shared expert.

All programs of a row compute the norm, which takes less time than the launch of a separate kernel.
They load the router's weights before their inputs are ready. The order of a sum over k depends only
on the width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.experts import Router
from slipstream.kernels.norm import UnreducedSum
from slipstream.kernels.table import Addend, Norm, PostNormAddend
from slipstream.kernels.triton import launch
from slipstream.kernels.triton.launch import (
    cdiv,
    empty_rows,
    launch_dependents,
    next_power_of_2,
    wait_for_inputs,
)
from slipstream.kernels.triton.norm import (
    MatmulRows,
    ResidualSum,
    normed_row,
    normed_rows,
    residual_row,
    summed_row,
    weight_of,
)

EXPERTS = 8  # experts of a program


@triton.jit
def router_kernel(
    addend, post_weight, post_eps, residual, factor, weight, eps, out, total, router, gate, bias,
    logits, part_stride, row_stride, width, parts: tl.constexpr, experts: tl.constexpr,
    own: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Programs (row, `own` experts). Arguments like those of `_norm_kernel`; router
    [experts, width], gate [1, width] or None. Writes logits [rows, experts] float32, or
    [rows, experts + 1] with a gate."""
    launch_dependents(pdl)
    expert = tl.program_id(1) * own + tl.arange(0, own)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    there = (expert < experts)[:, None] & inside[None, :]
    matrix = tl.load(router + expert[:, None] * width + column[None, :], mask=there, other=0.0)
    pitch: tl.constexpr = experts if gate is None else experts + 1
    if gate is not None:
        there = (expert == experts)[:, None] & inside[None, :]
        matrix += tl.load(gate + column[None, :] + 0 * expert[:, None], mask=there, other=0.0)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    post_gain = None
    if post_weight is not None:
        post_gain = tl.load(post_weight + column, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros((own,), tl.float32)
    if bias is not None:
        sums = tl.load(bias + expert, mask=expert < experts, other=0.0).to(tl.float32)
    wait_for_inputs(pdl)
    place = row * width + column
    value = summed_row(addend, row * row_stride + column, part_stride, inside, parts)
    before = None
    if residual is not None:
        before = tl.load(residual + place, mask=inside, other=0.0)
    value = residual_row(value, post_weight, post_gain, post_eps, before, factor, total, width)
    writes = column < tl.where(tl.program_id(1) == 0, width, 0)  # only a row's first program
    if total is not None:
        tl.store(total + place, value.to(total.dtype.element_ty), mask=writes)
    normed = normed_row(value, gain, width, eps).to(weight.dtype.element_ty)
    tl.store(out + place, normed, mask=writes)
    sums += tl.sum(matrix.to(tl.float32) * normed.to(tl.float32)[None, :], axis=1)
    tl.store(logits + row * pitch + expert, sums, mask=expert < pitch)


def normed_logits(
    addend: Addend, residual: Tensor | None, norm: Norm, router: Router, gate: Tensor | None = None
) -> tuple[MatmulRows, Tensor, Tensor]:
    """(norm of residual + addend, residual + addend, router logits [1, T, E] float32).

    With `gate` [1, H] of a shared expert the logits are [1, T, E + 1], and the gate's is the last.
    """
    assert norm.bias is None
    made = addend.values if isinstance(addend, PostNormAddend) else addend
    if isinstance(made, UnreducedSum):  # else every program of a row would exchange it
        addend, residual = normed_rows(addend, residual, None)[1], None
    stream = ResidualSum.of(addend, residual, norm)
    values, post_norm, total = stream.values, stream.post_norm, stream.total
    (rows, width), experts, device = total.shape, len(router.weight), total.device
    pitch = experts + (gate is not None)
    assert values.stride(-1) == 1
    assert router.weight.is_contiguous()
    out = empty_rows(rows, width, norm.weight.dtype, device)
    logits = torch.empty(1, rows, pitch, dtype=torch.float32, device=device)
    parts, block = len(values) if values.ndim == 3 else 1, next_power_of_2(width)
    if rows:
        router_kernel[(rows, cdiv(pitch, EXPERTS))](
            values, *weight_of(post_norm.norm), stream.residual, post_norm.factor,
            *weight_of(norm), out, None if total is values else total, router.weight, gate,
            router.bias,
            logits, values.stride(0) if parts > 1 else 0, values.stride(-2), width, parts=parts,
            experts=experts, own=EXPERTS, block=block, num_warps=min(16, max(1, block // 128)),
            **launch.options(device),
        )  # fmt: skip
    return MatmulRows(out, None), total, logits
