"""Shapes and rows of weights, whatever they are stored as."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.table import (
    Float8Matrix,
    Int4Matrix,
    Int8Matrix,
    PackedMatrix,
    Weight,
)


def shape_of(weight: Weight) -> tuple[int, int]:
    """(N, K): products take rows of K numbers and give rows of N."""
    if isinstance(weight, PackedMatrix):
        return weight.shape
    if isinstance(weight, Int4Matrix):
        return weight.values.shape[0], 2 * weight.values.shape[1]
    stored = weight if isinstance(weight, Tensor) else weight.values
    return stored.shape[0], stored.shape[1]


def bytes_of(weight: Weight) -> int:
    """What it takes in memory, scales included."""
    if isinstance(weight, Tensor | PackedMatrix):
        return weight.nbytes
    zeros = weight.zeros if isinstance(weight, Int4Matrix) else None
    return weight.values.nbytes + weight.scales.nbytes + (0 if zeros is None else zeros.nbytes)


def select_rows(weight: Weight, index: Tensor) -> Weight:
    """The rows `index` [n] int64, in this order, as a copy."""
    if isinstance(weight, Tensor):
        return weight[index]
    if isinstance(weight, PackedMatrix):
        return weight.select(index)
    if isinstance(weight, Float8Matrix):
        # Not every device can index float8, but each can index bytes.
        values = weight.values.view(torch.uint8)[index].view(weight.values.dtype)
        return Float8Matrix(values, weight.scales[index])
    rows = replace(weight, values=weight.values[index], scales=weight.scales[index])
    if isinstance(rows, Int4Matrix) and rows.zeros is not None:
        return replace(rows, zeros=rows.zeros[index])
    return rows


def row_range(weight: Weight, start: int, stop: int | None = None) -> Weight:
    """The rows from `start` to before `stop` (None: the last), without a copy where it can be."""
    if isinstance(weight, PackedMatrix):
        return weight.part(start, weight.shape[0] if stop is None else stop)
    rows = slice(start, stop)
    if isinstance(weight, Tensor):
        return weight[rows]
    part = replace(weight, values=weight.values[rows], scales=weight.scales[rows])
    if isinstance(part, Int4Matrix) and part.zeros is not None:
        return replace(part, zeros=part.zeros[rows])
    return part


def look_up(weight: Tensor | PackedMatrix, index: Tensor) -> Tensor:
    """index [...] integers -> [..., K], rows of a table."""
    if isinstance(weight, PackedMatrix):
        return weight.look_up(index)
    rows: Tensor = F.embedding(index, weight)
    return rows


def stacked(weights: Sequence[Weight]) -> Weight | None:
    """All their rows, one below the other; None where they are stored in different ways."""
    first = weights[0]
    if len(weights) == 1:
        return first
    if isinstance(first, Tensor):
        tensors = [weight for weight in weights if isinstance(weight, Tensor)]
        return torch.cat(tensors) if len(tensors) == len(weights) else None
    if isinstance(first, Float8Matrix):
        floats = [weight for weight in weights if isinstance(weight, Float8Matrix)]
        if len(floats) < len(weights):
            return None
        values = torch.cat([weight.values.view(torch.uint8) for weight in floats])
        return Float8Matrix(values.view(first.values.dtype), _scales(floats))
    if isinstance(first, Int8Matrix):
        integers = [weight for weight in weights if isinstance(weight, Int8Matrix)]
        if any(weight.rounds_input != first.rounds_input for weight in integers):
            return None
        if len(integers) < len(weights):
            return None
        values = torch.cat([weight.values for weight in integers])
        return Int8Matrix(values, _scales(integers), first.rounds_input)
    halves = [weight for weight in weights if isinstance(weight, Int4Matrix)]
    return _stacked_int4(halves) if len(halves) == len(weights) else None


def regrouped(weight: Int4Matrix, group: int) -> Int4Matrix:
    """The same numbers with a scale for every `group` columns, a divisor of what it has now."""
    times = weight.group // group
    zeros = weight.zeros
    return Int4Matrix(
        weight.values,
        weight.scales.repeat_interleave(times, 1),
        None if zeros is None else zeros.repeat_interleave(times, 1),
        group,
    )


def _scales(weights: Sequence[Float8Matrix | Int8Matrix | Int4Matrix]) -> Tensor:
    return torch.cat([weight.scales for weight in weights])


def _stacked_int4(weights: Sequence[Int4Matrix]) -> Int4Matrix:
    group = min(weight.group for weight in weights)
    weights = [regrouped(weight, group) for weight in weights]
    zeros: Tensor | None = None
    if any(weight.zeros is not None for weight in weights):
        zeros = torch.cat(
            [
                torch.full_like(weight.scales, 8, dtype=torch.uint8)
                if weight.zeros is None
                else weight.zeros
                for weight in weights
            ]
        )
    return Int4Matrix(torch.cat([it.values for it in weights]), _scales(weights), zeros, group)
