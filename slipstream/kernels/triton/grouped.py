"""Launches the grouped product (`grouped_kernels.py`), and sorts rows by expert before it."""

import torch
import triton
from torch import Tensor

from slipstream.kernels.activation import Activation
from slipstream.kernels.experts import ClampedGate, Router, Scores
from slipstream.kernels.triton import grouped_stream, launch
from slipstream.kernels.triton.activation import GATES
from slipstream.kernels.triton.grouped_kernels import FLOAT8_BLOCKS, PLAIN, grouped_kernel
from slipstream.kernels.triton.launch import empty_rows
from slipstream.kernels.triton.norm import Rows
from slipstream.kernels.triton.operands import FRAGMENTS, Choice, Operand
from slipstream.kernels.triton.routing_kernels import (
    CHOSEN_SOFTMAX,
    SIGMOID,
    SOFTMAX,
    place_kernel,
    route_kernel,
    sort_kernel,
)

FEW_ROWS = 64
_KINDS = {
    Scores.SOFTMAX: SOFTMAX.value,
    Scores.CHOSEN_SOFTMAX: CHOSEN_SOFTMAX.value,
    Scores.SIGMOID: SIGMOID.value,
}


def choose(logits: Tensor, router: Router, tile: int) -> Choice:
    """logits [parts, T, E] float32, whose sum is meant."""
    parts, rows, experts = logits.shape
    routing, device = router.routing, logits.device
    chosen = routing.num_chosen
    numbers = torch.empty(3, rows, chosen, dtype=torch.int32, device=device)
    choices, ranks, pairs = numbers
    weights = torch.empty(rows, chosen, dtype=torch.float32, device=device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=device)
    ends = torch.empty(experts, dtype=torch.int32, device=device)
    slots = min(rows * chosen, experts + rows * chosen // tile)
    programs = triton.cdiv(rows, FEW_ROWS)
    shape = {
        "experts": experts, "chosen": chosen, "span": FEW_ROWS,
    }  # fmt: skip
    counts = None
    if programs > 1:
        counts = torch.empty(programs, experts, dtype=torch.int32, device=device)
    options, block = launch.options(device), triton.next_power_of_2(experts)
    route_kernel[(programs,)](
        logits, router.correction, router.gains, choices, weights, ranks, counts, starts, ends,
        pairs, logits.stride(0), rows, parts=parts, kind=_KINDS[routing.scores],
        normalised=routing.normalised, scale=routing.scale, groups=routing.num_groups,
        kept=routing.kept_groups, block=block, tile=tile, num_warps=16, **shape, **options,
    )  # fmt: skip
    if counts is not None:
        sort_kernel[(1,)](
            counts, starts, ends, programs, experts=experts, block=block, span=FEW_ROWS,
            tile=tile, num_warps=8, **options,
        )  # fmt: skip
        place_kernel[(programs,)](
            choices, ranks, starts, counts, pairs, rows, num_warps=4, **shape, **options
        )
    return Choice(weights, pairs.view(-1), starts, ends, tile, slots)


def tile_rows(rows: int, mean: float, *weights: Operand) -> int:
    """Rows of x in a tile, where an expert has `mean` of `rows`: mostly all of them."""
    small = all(weight.form == FRAGMENTS for weight in weights)
    sizes = (8, 16, 32, 64, 128) if small else (16, 32, 64, 128)
    for size in sizes:
        if rows <= size or (rows != mean and 2 * mean <= size):
            return size if rows > FEW_ROWS else min(size, 64)
    return sizes[-1]


def multiply(
    x: Rows,
    weight: Operand,
    bias: Tensor | None,
    choice: Choice | None,
    dtype: torch.dtype,
    experts: int = 1,
    gated: Activation | None = None,
    clamp: ClampedGate | None = None,
    scatters: bool = False,
    splitting: bool = False,
) -> Tensor:
    """The rows' pairs, or without a choice the rows, times the matrices of their experts.

    Args:
        x: [T, K]; where it `scatters`, [T k, K] in the order of `choice.pairs`.
        weight: [experts * N, K].
        bias: [experts * N].
        gated: the rows of an expert's matrix are gates, which go through this activation, and then
            what they multiply.
        scatters: what comes out is weighted, and left to be added up row by row.
        splitting: sums of fragments may be left to be added up.

    Returns:
        [T k, N], or [T, N] without a choice; N / 2 where `gated`. Where it `scatters` or the sum is
        split, what is left to be added up in this order: [parts, T, N] in `dtype` or float32.
    """
    rows = len(x.values)
    height, depth = weight.shape
    width = height // experts // (1 if gated is None else 2)
    if choice is None:
        pairs, chosen, tile = rows, 1, tile_rows(rows, rows, weight)
        slots = triton.cdiv(rows, tile)
    else:
        pairs, chosen, tile = len(choice.pairs), choice.weights.shape[1], choice.tile
        slots = choice.slots
    splits, part = 1, depth
    if splitting and weight.form == FRAGMENTS:
        splits, part = grouped_stream.splits_of(width, depth)
    device = x.values.device
    if scatters:  # a row's experts, and of each the parts of its sum, one behind the other
        addends = torch.empty(pairs // chosen, chosen * splits, width, dtype=dtype, device=device)
        out, result = addends.view(pairs, splits, width).transpose(0, 1), addends.transpose(0, 1)
    elif splits > 1:
        out = result = torch.empty(splits, pairs, width, dtype=torch.float32, device=device)
    else:
        result = empty_rows(pairs, width, dtype, device)
        out = result.unsqueeze(0)
    if not out.numel():
        return result
    assert x.values.stride(-1) == 1
    if weight.form == FRAGMENTS:
        # Tiles of 128 rows are slower than 64 rows and then the rest of them.
        cut = FEW_ROWS if choice is None and rows <= 2 * FEW_ROWS else rows
        for first in range(0, rows, cut):
            own = x.values[first : first + cut]
            if choice is None:
                tile = tile_rows(len(own), len(own), weight)
                slots = triton.cdiv(len(own), tile)
            grouped_stream.multiply(
                own, weight, bias, choice, out[:, first:], tile, slots, experts, gated, clamp,
                scatters, part,
            )  # fmt: skip
        return result
    block_n, block_k, warps = _tiles(weight, x.values.dtype, tile)
    stages = 2 if x.values.dtype == torch.float32 else 4  # that shared memory holds
    grid = (triton.cdiv(width, block_n if gated is None else block_n // 2), slots)
    grouped_kernel[grid](
        x.values, x.scales, weight.values, weight.scales, weight.zeros, weight.row_scales, bias,
        *((choice.pairs, choice.starts, choice.ends) if choice else (None, None, None)),
        choice.weights if choice is not None and scatters else None, out, x.values.stride(0), rows,
        width, depth=depth, experts=experts, block=triton.next_power_of_2(experts), chosen=chosen,
        gathers=not scatters, form=weight.form, block_rows=weight.block_rows,
        block_columns=weight.block_columns, gated=GATES[gated],
        limit=clamp.limit if clamp else None, alpha=clamp.alpha if clamp else None,
        block_m=tile, block_n=block_n, block_k=block_k,
        stages=stages, num_warps=warps, num_stages=stages, **launch.options(device),
    )  # fmt: skip
    return result


def _tiles(weight: Operand, dtype: torch.dtype, tile: int) -> tuple[int, int, int]:
    """(rows of weights, columns, warps) of a tile."""
    if dtype == torch.float32:
        return 64, 64, 4
    if weight.form == FLOAT8_BLOCKS.value:
        return 64, min(128, triton.next_power_of_2(weight.block_columns)), 4
    if weight.form == PLAIN.value:
        return (128, 64, 8) if tile > 32 else (64, 128, 4)
    return 64, 64, 4
