"""LoRA products, with a different adapter for each row; see `kernels/adapters.py`.

There are two launches. The first (shrink) computes x times A, split along K into parts of a fixed
size so that even one row has many programs. The second (expand) adds the result times B to y.
Programs of rows without an adapter end early. A row's bits depend only on the shapes.

If one of our own kernels multiplies few rows, it adds the second product itself. On Hopper it
also computes the first one (`adapters_stream.py`). Otherwise that is a launch before it, `shrink`,
whose programs process all rows of a slot at once, on the tensor cores.

Slots and factors are read before the previous kernel has ended. This is safe: factors in use are
never written, and slots are written before an ordinary launch, the embedding of the pass.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.adapters import Adapted
from slipstream.kernels.triton import launch
from slipstream.kernels.triton.launch import (
    cdiv,
    launch_dependents,
    next_power_of_2,
    wait_for_inputs,
)
from slipstream.kernels.triton.matmul_tiles import MULTIPROCESSORS, SMALLEST_PART

_RANKS, _DEPTH = 8, 1024  # shrink kernel: ranks and columns of x of a program
_WIDTH, _STEP = 256, 32  # expand kernel: columns of y of a program, and ranks at a time
_SHALLOW, _PARTS = 512, 12  # columns of x at a time, and parts of K, of `shrink`
_GROUP = 16  # ranks that the tensor cores multiply at once; a slot's ranks begin at a multiple
_TALL = 64  # rows of A in a tile of `adapters_stream.py`
_CHUNK = 128  # ranks of several slots that `add_expanded` multiplies at a time


@dataclass(frozen=True, eq=False)
class Gain:
    """The adapters' addend to a product of up to 64 rows x [T, K] in 16 bits.

    inner [parts of K, T, P R] float32 has partial sums of A times x; rows without an adapter are
    not written.
    """

    x: Tensor
    adapted: Adapted

    def shrunk(self) -> dict[str, object]:
        """Arguments of `matmul_kernel`, after a launch that computes A times x."""
        inner = shrink(self.x, self.adapted)
        return self._arguments(inner) | {"splits_k": len(inner)}

    def streamed(self, programs: int) -> dict[str, object]:
        """Arguments of `stream_kernel` with `programs` other programs, without A's descriptor."""
        down, rows = self.adapted.factors.down, len(self.x)
        count, width, depth = down.shape
        shares, lanes, share = _makers(programs, depth, cdiv(count * width, _TALL))
        inner = torch.empty((shares, rows, width), dtype=torch.float32, device=down.device)
        counts = _on_device(self.adapted)[:4].view(torch.int64)
        own = {"makers": shares * lanes, "shares": shares, "share": share, "counts": counts}
        return self._arguments(inner) | own

    def _arguments(self, inner: Tensor) -> dict[str, object]:
        factors = self.adapted.factors
        padded = max(_GROUP, next_power_of_2(factors.rank))
        return {
            "inner": inner, "up": factors.up, "ends": _on_device(self.adapted)[4:],
            "adapters": self.adapted.slots, "rank": factors.rank, "padded": padded,
            "chunk": _CHUNK, "chunks": cdiv(len(factors.up) * padded, _CHUNK),
            "parts": len(factors.ends),
        }  # fmt: skip


_NUMBERS = ("rank", "padded", "chunk", "chunks", "parts")
_NO_GAIN: dict[str, object] = dict.fromkeys(("inner", "up", "ends", "adapters"))
_NO_GAIN |= dict.fromkeys(_NUMBERS, 0)
NOT_SHRUNK = _NO_GAIN | {"splits_k": 0}
NOT_STREAMED = _NO_GAIN | {"down": None, "counts": None, "share": 0, "makers": 0, "shares": 0}


def _makers(programs: int, depth: int, tiles: int) -> tuple[int, int, int]:
    """(shares of the columns, lanes of tiles of A, columns of a share) of the programs that compute
    A times x: as many as can run together with the product's. The bits depend on the shares, so
    these depend only on the shape of the weights."""
    free = -programs % MULTIPROCESSORS
    share = cdiv(cdiv(depth, min(8, max(4, free))), SMALLEST_PART) * SMALLEST_PART
    shares = cdiv(depth, share)
    return shares, max(1, min(tiles, free // shares)), share


@triton.jit
def _tiles(place, known, column, end, columns: tl.constexpr):
    """The next `columns` columns of a tile's known rows: a tile for each step of the product."""
    tiles = ()
    for start in tl.static_range(0, columns, column.shape[0]):
        mask = known[:, None] & (column + start < end)[None, :]
        tiles += (tl.load(place + start, mask=mask, other=0.0),)  # type: ignore[assignment]
    return tiles


@triton.jit
def _shrink_rows_kernel(
    x, down, slots, inner, row_stride, rows, depth, width, part, block_m: tl.constexpr,
    block_r: tl.constexpr, block_k: tl.constexpr, step: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Programs (slot, `block_r` ranks, part of K): `_shrink_kernel` for all rows of a slot."""
    launch_dependents(pdl)
    slot = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * block_r + tl.arange(0, block_r)
    first = tl.program_id(2) * part
    end = tl.minimum(first + part, depth)
    row, column = tl.arange(0, block_m), tl.arange(0, step)
    mine = tl.load(slots + row, mask=row < rows, other=-1) == slot
    active = tl.max(mine.to(tl.int32), 0) > 0
    known = number < width
    down_at = down + (slot * width + number[:, None]) * depth + column[None, :]
    x_at = x + row[:, None].to(tl.int64) * row_stride + column[None, :]
    if active:
        tiles = _tiles(down_at + first, known, column + first, end, block_k)
        wait_for_inputs(pdl)
        total = tl.zeros((block_r, block_m), dtype=tl.float32)
        for k in range(first, end, block_k):
            tiles_x = _tiles(x_at + k, mine, column + k, end, block_k)
            for index in tl.static_range(block_k // step):
                operand = tl.trans(tiles_x[index])
                total = tl.dot(tiles[index], operand, total, input_precision="ieee")
            tiles = _tiles(down_at + k + block_k, known, column + k + block_k, end, block_k)
        place = (tl.program_id(2) * rows + row)[None, :].to(tl.int64) * width + number[:, None]
        tl.store(inner + place, total, mask=known[:, None] & mine[None, :])
    else:
        wait_for_inputs(pdl)


def shrink(x: Tensor, adapted: Adapted) -> Tensor:
    """The first half of `add_low_rank` -> `inner` of a `Gain`."""
    (rows, depth), factors = x.shape, adapted.factors
    assert x.stride(-1) == 1
    count, width, _ = factors.down.shape
    part = cdiv(cdiv(depth, _PARTS), _SHALLOW) * _SHALLOW
    splits = cdiv(depth, part)
    inner = torch.empty((splits, rows, width), dtype=torch.float32, device=x.device)
    if rows:
        _shrink_rows_kernel[(count, cdiv(width, _GROUP), splits)](
            x, factors.down, adapted.slots, inner, x.stride(0), rows, depth, width, part,
            block_m=max(16, next_power_of_2(rows)), block_r=_GROUP, block_k=_SHALLOW,
            step=128, num_warps=4, **launch.options(x.device),
        )  # fmt: skip
    return inner


@triton.jit
def _or(one, other):
    return one | other


@triton.jit
def add_expanded(
    sums, row, line, rows, inner, up, ends, adapters, rank: tl.constexpr, padded: tl.constexpr,
    chunk: tl.constexpr, chunks: tl.constexpr, splits_k: tl.constexpr, parts: tl.constexpr,
):  # fmt: skip
    """`sums` [rows of weights, rows of x] plus B times `inner`, in chunks of ranks of all slots.

    row: the rows of weights; line: the rows of x; padded: ranks of a slot, rounded up to whole
    groups. So a column's bits depend only on its own adapter: ranks of others are multiplied by
    zeros.
    """
    group: tl.constexpr = padded if padded < chunk else chunk
    own = tl.zeros_like(row).to(tl.int32)
    for index in tl.static_range(parts - 1):
        own += (row >= tl.load(ends + index)).to(tl.int32)
    total = tl.load(ends + parts - 1)
    slot = tl.load(adapters + line, mask=line < rows, other=-1).to(tl.int32)
    number = tl.arange(0, chunk)
    for step in range(tl.min(own, 0) * chunks, (tl.max(own, 0) + 1) * chunks):
        part, begin = step // chunks, step % chunks * chunk
        place = slot - begin // padded
        inside = (place >= 0) & (place < chunk // group)
        used = tl.reduce(tl.where(inside, 1 << place, 0), 0, _or)
        if used != 0:
            at = begin % padded + number % group
            source = ((begin // padded + number // group).to(tl.int64) * rank + at) * total
            mask = ((used >> (number // group)) & 1 != 0) & (at < rank)
            mask = mask[None, :] & (own == part)[:, None]
            factors = tl.load(up + source[None, :] + row[:, None], mask=mask, other=0.0)
            mine = place[:, None] == (number // group)[None, :]
            mask = mine & (at < rank)[None, :]
            source = (line * (parts * rank) + part * rank)[:, None] + at[None, :]
            value = tl.zeros((line.shape[0], chunk), dtype=tl.float32)
            for split in tl.static_range(splits_k):
                offset = split * rows * (parts * rank)
                value += tl.load(inner + offset + source, mask=mask, other=0.0)
            value = tl.trans(value.to(factors.dtype))
            sums = tl.dot(factors, value, sums, input_precision="ieee")
    return sums


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
    width, splits = factors.down.shape[1], cdiv(depth, _DEPTH)
    if not rows:
        return y
    inner = torch.empty((splits, rows, width), dtype=torch.float32, device=x.device)
    _shrink_kernel[(rows, cdiv(width, _RANKS), splits)](
        x, factors.down, slots, inner, x.stride(0), depth, width, block_r=_RANKS, block_k=_DEPTH,
        num_warps=4, **launch.options(x.device),
    )  # fmt: skip
    blocks = sum(cdiv(length, _WIDTH) for length in _lengths(factors.ends))
    step = min(_STEP, max(2, next_power_of_2(factors.rank)))
    _expand_kernel[(rows, blocks)](
        made, inner, factors.up, _on_device(adapted)[4:], slots, made.stride(0), factors.rank,
        factors.ends[-1], splits, parts=len(factors.ends), block_n=_WIDTH, block_r=step,
        block_s=next_power_of_2(splits), num_warps=4, **launch.options(x.device),
    )  # fmt: skip
    return y


def _lengths(ends: tuple[int, ...]) -> list[int]:
    return [end - start for start, end in zip((0, *ends), ends, strict=False)]


def _on_device(adapted: Adapted) -> Tensor:
    """[4 + P] int32: two counts of 64 bits (`adapters_stream.py`), then the end of each part.

    It is created once, before CUDA graphs are captured.
    """
    factors = adapted.factors
    found = factors.packed.get("triton")
    if not isinstance(found, Tensor):
        device = factors.up.device
        found = torch.tensor((0, 0, 0, 0, *factors.ends), dtype=torch.int32, device=device)
        factors.packed["triton"] = found
    return found
