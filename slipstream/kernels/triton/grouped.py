"""Launches the grouped products (`grouped_kernels.py`, `grouped_stream_kernels.py`)."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.kernels.devices import LEAST_FLOAT8_CAPABILITY
from slipstream.kernels.experts import ClampedGate
from slipstream.kernels.formats.float8_blocks import Float8BlockMatrix
from slipstream.kernels.formats.int4 import Int4Matrix
from slipstream.kernels.formats.int8 import Int8Matrix
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.norm import Activation
from slipstream.kernels.triton import launch
from slipstream.kernels.triton.activation import GATES
from slipstream.kernels.triton.fragments import (
    FLOAT8,
    ROWS,
    Fragments,
    fits,
    from_float8_blocks,
    from_int4,
    from_int8,
    from_mxfp4,
    from_nvfp4,
)
from slipstream.kernels.triton.grouped_kernels import FLOAT8_BLOCKS, PLAIN, grouped_kernel
from slipstream.kernels.triton.launch import cdiv, empty_rows, next_power_of_2
from slipstream.kernels.triton.matmul import is_hopper
from slipstream.kernels.triton.norm import MatmulRows
from slipstream.kernels.triton.operands import FRAGMENTS, ChosenExperts, Operand

try:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from slipstream.kernels.triton.grouped_stream_kernels import (
        HALVES,
        grouped_stream_kernel,
    )
except ImportError:  # Gluon is still an experiment of Triton's
    grouped_stream_kernel = None

FEW_PROGRAMS = 256  # with fewer programs a sum over K is split, where that is allowed
MANY_PROGRAMS = 400  # from so many on, two tiles of weights may share a program
SHORTEST = 1024  # fewest columns of a part of a split sum
EARLY_PAIRS = 8  # up to so many unsorted pairs, weights are loaded before the rows are ready
OTHER_MEMORY = 7 * 1024  # bytes of shared memory of a multiprocessor that tiles leave to others


_FRAGMENTS: Final[Mapping[type[Weight], Callable[[Any], Fragments | None]]] = {
    Mxfp4Matrix: from_mxfp4,
    Nvfp4Matrix: from_nvfp4,
    Int4Matrix: from_int4,
    Int8Matrix: from_int8,
    Float8BlockMatrix: from_float8_blocks,
}


def pack(weight: Weight) -> Weight:
    """`weight` rearranged into fragments if its format has a kernel for them, else unchanged."""
    make = _FRAGMENTS.get(type(weight))
    if make is None or grouped_stream_kernel is None or not fits(weight):
        return weight
    values: Tensor = weight.values  # type: ignore[attr-defined]
    return (values.is_cuda and make(weight)) or weight


def require_conversions(weight: Weight) -> None:
    """Raise UsageError for a matrix that is not in fragments, if its kernel converts e4m3 and the
    GPU has no instruction for that. Fragments are unpacked by shifts."""
    values: Tensor | None = getattr(weight, "values", None)
    if not weight.needs_float8_unpacked or values is None or not values.is_cuda:
        return
    capability = torch.cuda.get_device_capability(values.device)
    if capability < LEAST_FLOAT8_CAPABILITY:
        raise UsageError(
            f"matrices with e4m3 numbers or scales need dtype=bfloat16 and rows in multiples of "
            f"{2 * ROWS} on a GPU of compute capability {capability[0]}.{capability[1]}, and one "
            f"has shape {list(weight.shape)}; use another quantization or device=cpu"
        )


@dataclass(frozen=True)
class Card:
    """What decides about tiles. `memory`: bytes of shared memory of a multiprocessor for them."""

    multiprocessors: int
    memory: int
    is_hopper: bool


@functools.cache
def card_of(device: torch.device) -> Card:
    found = torch.cuda.get_device_properties(device)
    memory = found.shared_memory_per_multiprocessor - OTHER_MEMORY
    return Card(found.multi_processor_count, memory, is_hopper(device))


def stream_multiply(
    x: Tensor,
    weight: Operand,
    bias: Tensor | None,
    choice: ChosenExperts | None,
    out: Tensor,
    count: int,
    slots: int,
    experts: int,
    gated: Activation | None,
    clamp: ClampedGate | None,
    scatters: bool,
    part: int,
) -> None:
    """Like `multiply`, for weights in fragments: writes `out` [splits, .., N], a view with
    contiguous rows, in `slots` tiles of `count` rows.

    Raises:
        UsageError: an expert's rows are not whole fragments.
    """
    assert x.dtype == torch.bfloat16, "weights are packed for no other dtype"
    parts = weight.fragments
    assert parts is not None
    splits, pairs, width = out.shape
    size, pitch = out.stride()[:2]
    depth = weight.shape[1]
    if width % ROWS and (gated is not None or experts > 1):
        raise UsageError(
            f"the kernels for GPUs multiply packed weights of experts in multiples of {ROWS} rows,"
            f" not of {width}; use device=cpu"
        )
    own = 64 if gated is None else 32
    tiles = cdiv(width, own)
    busy = min(slots, experts * (1 - (1 - 1 / experts) ** pairs) + pairs / count)
    columns, words, span = parts.fragment_columns, 0, 1
    if parts.scales is not None and parts.coding != FLOAT8:
        words, span = parts.scales.shape[1], max(1, parts.group // columns)
    card = card_of(out.device)
    high, chunks, stages = _stream_tiles(count, columns, words, tiles * splits * busy, card)
    x_tiles, by_tma = None, card.is_hopper and count > 8 and choice is None
    if by_tma and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0:
        tile = [count, columns * chunks]
        x_tiles = TensorDescriptor(x, list(x.shape), list(x.stride()), tile, HALVES.value)
    elif x.stride(0) % 16 or x.data_ptr() % 16:
        x = x.contiguous()  # threads copy 16 bytes at a time
    grouped_stream_kernel[(cdiv(tiles, high), slots, splits)](
        x, x_tiles, weight.values, weight.scales, weight.row_scales, bias,
        *(choice.tensors if choice else [None] * 4),
        choice.weights if choice is not None and scatters else None, out, x.stride(0),
        len(choice.weights) if choice else len(x),
        width, depth, part, size, pitch, parts.lift * 0x10001, parts.lift_back, experts=experts,
        block=next_power_of_2(experts), chosen=choice.weights.shape[1] if choice else 1,
        gathers=choice is not None and not scatters, coding=parts.coding, columns=columns,
        late=choice is None or (scatters and pairs <= EARLY_PAIRS), words=words, span=span,
        shift=parts.shift, gated=GATES[gated], limit=clamp.limit if clamp else None,
        alpha=clamp.alpha if clamp else None, count=count, chunks=chunks, stages=stages,
        high=high, wgmma=card.is_hopper, num_warps=4, **launch.options(out.device),
    )  # fmt: skip


def splits_of(width: int, depth: int) -> tuple[int, int]:
    """(splits of the sum, columns of each) for experts of `width` rows, such that even one chosen
    expert has about two programs for each multiprocessor."""
    splits = 1
    while splits * cdiv(width, 64) < FEW_PROGRAMS and 2 * splits * SHORTEST <= depth:
        splits *= 2
    part = cdiv(depth, splits * 256) * 256
    return cdiv(depth, part), part


def _stream_tiles(
    count: int, columns: int, words: int, programs: float, card: Card
) -> tuple[int, int, int]:
    """(tiles of 64 rows of weights, chunks, stages) of programs for `count` rows of x, with enough
    loads in flight to saturate the memory. At least two programs fit into a multiprocessor, one of
    this kernel and one of the next, unless two or three stages need more memory.

    A chunk has `columns` columns, and `words` words of scales for every 16 rows. Programs of two
    tiles of weights read x half as often. That pays for tiles of 64 rows of x, if enough programs
    are left; two tiles for 128 rows would not fit into the registers.
    """
    high = 2 if card.is_hopper and count == 64 and programs >= MANY_PROGRAMS else 1
    programs /= high
    chunks = 4 if count * columns <= 1024 else 2
    size = chunks * (2048 * high + 2 * columns * count + high * max(256, 128 * words))
    most = 5 if count == 8 else 4 if count <= 32 else 3 if count <= 64 else 2
    together = min(most, int(programs) // card.multiprocessors + 1)
    # Measured for Llama 8B's qkv: four stages are faster than more, except with one word of scales.
    deepest = 4 if count == 8 and programs < card.multiprocessors and words != 1 else 12
    fewest = min(3, card.memory // size)
    return high, chunks, max(fewest, min(deepest, card.memory // max(2, together) // size))


FEW_ROWS = 64


def tile_rows(rows: int, mean: float, *weights: Operand) -> int:
    """Rows of x in a tile, if experts have `mean` of the `rows` rows on average: mostly one tile
    holds all rows of an expert."""
    small = all(weight.form == FRAGMENTS for weight in weights)
    sizes = (8, 16, 32, 64, 128) if small else (16, 32, 64, 128)
    for size in sizes:
        if rows <= size or (rows != mean and 2 * mean <= size):
            return size if rows > FEW_ROWS else min(size, 64)
    return sizes[-1]


def multiply(
    x: MatmulRows,
    weight: Operand,
    bias: Tensor | None,
    choice: ChosenExperts | None,
    dtype: torch.dtype,
    experts: int = 1,
    gated: Activation | None = None,
    clamp: ClampedGate | None = None,
    scatters: bool = False,
    splitting: bool = False,
    shared: Operand | None = None,
) -> Tensor:
    """Multiply each pair's row by its expert's matrix; without a choice, each row by the matrix.

    Args:
        x: [T, K]; if `scatters`, [T k, K] in the order of the output without `scatters`.
        weight: [experts * N, K].
        bias: [experts * N].
        gated: the first half of an expert's matrix is the gate, which goes through this activation,
            the second half is up.
        scatters: outputs are multiplied by the pairs' weights and stored by row, not yet summed.
        splitting: for weights in fragments, the sum over K may be returned in parts.
        shared: one more expert of the same form, which is stored separately.

    Returns:
        [T k, N], or [T, N] without a choice; N / 2 if `gated`. With `scatters` or a split sum:
        [parts, T, N], to be added up in this order, in `dtype` or float32.
    """
    rows = len(x.values)
    height, depth = weight.shape
    width = height // experts // (1 if gated is None else 2)
    if choice is None:
        pairs, chosen, tile = rows, 1, tile_rows(rows, rows, weight)
        slots = cdiv(rows, tile)
    else:
        pairs, chosen = choice.weights.numel(), choice.weights.shape[1]
        tile, slots = choice.tile, choice.slots
    splits, part = 1, depth
    if splitting and weight.form == FRAGMENTS:
        splits, part = splits_of(width, depth)
    device = x.values.device
    if scatters:  # for each row: its experts, and for each expert its splits
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
        # One launch with tiles of 128 rows is slower than two, of 64 rows and of the rest.
        cut = FEW_ROWS if choice is None and rows <= 2 * FEW_ROWS else rows
        for first in range(0, rows, cut):
            own = x.values[first : first + cut]
            if choice is None:
                tile = tile_rows(len(own), len(own), weight)
                slots = cdiv(len(own), tile)
            stream_multiply(
                own, weight, bias, choice, out[:, first:], tile, slots, experts, gated, clamp,
                scatters, part,
            )  # fmt: skip
        return result
    _multiply(
        x, weight, bias, choice, out, tile, slots, experts, gated, clamp, scatters, width, shared
    )
    return result


def _multiply(
    x: MatmulRows,
    weight: Operand,
    bias: Tensor | None,
    choice: ChosenExperts | None,
    out: Tensor,
    tile: int,
    slots: int,
    experts: int,
    gated: Activation | None,
    clamp: ClampedGate | None,
    scatters: bool,
    width: int,
    shared: Operand | None,
) -> None:
    """Like `multiply`, for weights that are not in fragments: writes `out`."""
    rows = len(x.values) if choice is None else len(choice.weights)
    experts += shared is not None
    block_n, block_k, warps, stages = _tiles(weight, x.values.dtype, tile)
    grid = (cdiv(width, block_n if gated is None else block_n // 2), slots)
    grouped_kernel[grid](
        x.values, x.scales, weight.values, weight.scales, weight.zeros, weight.row_scales, bias,
        None if shared is None else shared.values, *(choice.tensors if choice else [None] * 4),
        choice.weights if choice is not None and scatters else None, out, x.values.stride(0), rows,
        width, depth=weight.shape[1], experts=experts, block=next_power_of_2(experts),
        chosen=choice.weights.shape[1] if choice else 1, gathers=not scatters, form=weight.form,
        block_rows=weight.block_rows, block_columns=weight.block_columns, gated=GATES[gated],
        limit=clamp.limit if clamp else None, alpha=clamp.alpha if clamp else None, block_m=tile,
        block_n=block_n, block_k=block_k, stages=stages, num_warps=warps, num_stages=stages,
        **launch.options(out.device),
    )  # fmt: skip


def could_join(stacked: Operand, one: Operand, experts: int) -> bool:
    """Whether `one` has the format, dtype and shape of each of the `experts` stacked matrices."""
    return (
        stacked.form == one.form == PLAIN.value
        and stacked.shape == (one.shape[0] * experts, one.shape[1])
        and stacked.values.dtype == one.values.dtype
        and stacked.row_scales is one.row_scales is None
    )


def _tiles(weight: Operand, dtype: torch.dtype, tile: int) -> tuple[int, int, int, int]:
    """(rows of weights, columns, warps, stages) of a tile."""
    if dtype == torch.float32:
        return 64, 64, 4, 2
    if weight.form == FLOAT8_BLOCKS.value:
        return 64, min(128, next_power_of_2(weight.block_columns)), 4, 4
    if weight.form == PLAIN.value:
        # Triton starts a sum of one step with its bias, so either all tiles have one step or none.
        return (128, 64, 8, 4) if tile > 32 else (64, 128 if weight.shape[1] > 128 else 64, 4, 4)
    return 64, 64, 4, 4
