"""LoRA products, with a different adapter for each row; see `kernels/adapters.py`.

There are two launches. The first (shrink) computes x times A, split along K into parts of a fixed
size so that even one row has many programs. The second (expand) adds the result times B to y.
Programs of rows without an adapter end early. A row's bits depend only on the shapes.

Slots and factors are read before the previous kernel has ended. This is safe: factors in use are
never written, and slots are written before an ordinary launch, the embedding of the pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.adapters import Adapted
from slipstream.kernels.triton import launch
from slipstream.kernels.triton.launch import launch_dependents, wait_for_inputs

_RANKS, _DEPTH = 8, 1024  # ranks and columns of x of a program of the shrink kernel
_WIDTH, _STEP = 256, 32  # columns of y, and ranks at a time, of one of the expand kernel


@triton.jit
def _shrink_kernel(
    x, down, slots, inner, row_stride, depth, width, block_r: tl.constexpr, block_k: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    """Programs (row, `block_r` ranks, split of `block_k` columns): partial sums of x times A, to
    inner [splits, T, width] float32."""
    launch_dependents(pdl)
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * block_r + tl.arange(0, block_r)
    column = tl.program_id(2) * block_k + tl.arange(0, block_k)
    inside = column < depth
    slot = tl.load(slots + row)
    source = down + (slot * width + number[:, None]) * depth + column[None, :]
    mask = (number[:, None] < tl.where(slot >= 0, width, 0)) & inside[None, :]
    factors = tl.load(source, mask=mask, other=0.0)
    wait_for_inputs(pdl)
    if slot >= 0:
        value = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
        total = tl.sum(factors.to(tl.float32) * value[None, :], 1)
        rows = tl.num_programs(0).to(tl.int64)
        place = inner + (tl.program_id(2) * rows + row) * width + number
        tl.store(place, total, mask=number < width)


@triton.jit
def _expand_kernel(
    y, inner, up, ends, slots, y_stride, rank, total, splits, parts: tl.constexpr,
    block_n: tl.constexpr, block_r: tl.constexpr, block_s: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Programs (row, `block_n` columns of a part of y): adds the sum of `inner`, times B, to y."""
    launch_dependents(pdl)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part, start, stop, first = 0, 0, 0, 0
    for index in tl.static_range(parts):
        end = tl.load(ends + index)
        blocks = tl.cdiv(end - first, block_n)
        here = (block >= 0) & (block < blocks)
        part = tl.where(here, index, part)
        start = tl.where(here, first + block * block_n, start)
        stop = tl.where(here, end, stop)
        block -= blocks
        first = end
    column = start + tl.arange(0, block_n)
    slot = tl.load(slots + row)
    inside = column < tl.where(slot >= 0, stop, 0)
    number, split = tl.arange(0, block_r), tl.arange(0, block_s)
    numbers = up + slot * rank * total + column[None, :]
    mask = (number < rank)[:, None] & inside[None, :]
    factors = tl.load(numbers + number[:, None] * total, mask=mask, other=0.0)
    wait_for_inputs(pdl)
    if slot >= 0:
        place = y + row * y_stride + column
        made = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        rows, width = tl.num_programs(0).to(tl.int64), parts * rank
        source = inner + (split * rows + row)[:, None] * width + part * rank
        for step in range(0, rank, block_r):
            known = (split < splits)[:, None] & (step + number < rank)[None, :]
            value = tl.sum(tl.load(source + (step + number)[None, :], mask=known, other=0.0), 0)
            made += tl.sum(factors.to(tl.float32) * value[:, None], 0)
            ahead = step + block_r + number
            mask = (ahead < rank)[:, None] & inside[None, :]
            factors = tl.load(numbers + ahead[:, None] * total, mask=mask, other=0.0)
        tl.store(place, made.to(y.dtype.element_ty), mask=inside)


def add_low_rank(y: Tensor, x: Tensor, adapted: Adapted) -> Tensor:
    """Add each row's LoRA product of x [T, K] to y in place, and return y: [T, N], or partial sums
    [parts, T, N] float32, of which the first is changed."""
    factors, slots = adapted.factors, adapted.slots
    made = y if y.ndim == 2 else y[0]
    assert x.stride(-1) == made.stride(-1) == 1
    rows, depth = x.shape
    width, splits = factors.down.shape[1], triton.cdiv(depth, _DEPTH)
    if not rows:
        return y
    inner = torch.empty((splits, rows, width), dtype=torch.float32, device=x.device)
    _shrink_kernel[(rows, triton.cdiv(width, _RANKS), splits)](
        x, factors.down, slots, inner, x.stride(0), depth, width, block_r=_RANKS, block_k=_DEPTH,
        num_warps=4, **launch.options(x.device),
    )  # fmt: skip
    blocks = sum(triton.cdiv(length, _WIDTH) for length in _lengths(factors.ends))
    step = min(_STEP, max(2, triton.next_power_of_2(factors.rank)))
    _expand_kernel[(rows, blocks)](
        made, inner, factors.up, _on_device(adapted), slots, made.stride(0), factors.rank,
        factors.ends[-1], splits, parts=len(factors.ends), block_n=_WIDTH, block_r=step,
        block_s=triton.next_power_of_2(splits), num_warps=4, **launch.options(x.device),
    )  # fmt: skip
    return y


def _lengths(ends: tuple[int, ...]) -> list[int]:
    return [end - start for start, end in zip((0, *ends), ends, strict=False)]


def _on_device(adapted: Adapted) -> Tensor:
    """[P] int32, the end of each part; created once, before CUDA graphs are captured."""
    factors = adapted.factors
    found = factors.packed.get("triton")
    if not isinstance(found, Tensor):
        device = factors.up.device
        found = torch.tensor(factors.ends, dtype=torch.int32, device=device)
        factors.packed["triton"] = found
    return found
