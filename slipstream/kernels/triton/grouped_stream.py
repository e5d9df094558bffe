"""Launches the grouped product of fragments (`grouped_stream_kernels.py`)."""

from functools import singledispatch
from typing import Any

import torch
import triton
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.kernels.activation import Activation
from slipstream.kernels.experts import ClampedGate
from slipstream.kernels.formats.int4 import Int4Matrix
from slipstream.kernels.formats.int8 import Int8Matrix
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.triton import launch
from slipstream.kernels.triton.activation import GATES
from slipstream.kernels.triton.fragments import (
    ROWS,
    fits,
    from_int4,
    from_int8,
    from_mxfp4,
    from_nvfp4,
)
from slipstream.kernels.triton.matmul_stream import is_hopper
from slipstream.kernels.triton.operands import Choice, Operand

try:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from slipstream.kernels.triton.grouped_stream_kernels import (
        BYTES,
        HALVES,
        grouped_stream_kernel,
    )
except ImportError:  # Gluon is still an experiment of Triton's
    grouped_stream_kernel = None

FEW_PROGRAMS = 256  # of a sum that may be split
SHORTEST = 1024  # columns of a part of one
MEMORY = 221 * 1024  # bytes of a multiprocessor, for tiles on their way


def pack(weight: Weight) -> Weight:
    """`weight` in fragments, where there is a kernel for them."""
    packed: Weight = _packed(weight)
    return packed


@singledispatch
def _packed(weight: Any) -> Any:
    """A format without fragments stays as it is."""
    return weight


@_packed.register
def _(weight: Mxfp4Matrix) -> Weight:
    return from_mxfp4(weight) if _serves(weight.values) and fits(weight) else weight


@_packed.register
def _(weight: Nvfp4Matrix) -> Weight:
    return from_nvfp4(weight) if _serves(weight.values) and fits(weight) else weight


@_packed.register
def _(weight: Int4Matrix) -> Weight:
    return from_int4(weight) if _serves(weight.values) and fits(weight) else weight


@_packed.register
def _(weight: Int8Matrix) -> Weight:
    return from_int8(weight) if _serves(weight.values) and fits(weight) else weight


def _serves(values: Tensor) -> bool:
    return grouped_stream_kernel is not None and is_hopper(values.device)


def multiply(
    x: Tensor,
    weight: Operand,
    bias: Tensor | None,
    choice: Choice | None,
    out: Tensor,
    count: int,
    slots: int,
    experts: int,
    gated: Activation | None,
    clamp: ClampedGate | None,
    scatters: bool,
    part: int,
) -> None:
    """As `grouped.multiply`, into `out` [splits, .., N], a view whose rows are whole, by `slots`
    tiles of `count` rows.

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
    tiles = triton.cdiv(width, own)
    busy = min(slots, experts * (1 - (1 - 1 / experts) ** pairs) + pairs / count)
    columns, words, span = parts.columns_of_fragment, 0, 1
    if parts.scales is not None:
        words, span = parts.scales.shape[1], max(1, parts.group // columns)
    chunks, stages = _tiles(count, columns, words, tiles * splits * busy)
    described = TensorDescriptor(
        weight.values, list(weight.values.shape), [128, 1], [8 * chunks, 128], BYTES.value
    )
    x_tiles = None
    if choice is None and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0:
        tile = [count, columns * chunks]
        x_tiles = TensorDescriptor(x, list(x.shape), list(x.stride()), tile, HALVES.value)
    grouped_stream_kernel[(tiles, slots, splits)](
        x, x_tiles, described, weight.scales, weight.row_scales, bias,
        *((choice.pairs, choice.starts, choice.ends) if choice else (None, None, None)),
        choice.weights if choice is not None and scatters else None, out, x.stride(0), len(x),
        width, depth, part, size, pitch, parts.lift * 0x10001, parts.lift_back, experts=experts,
        block=triton.next_power_of_2(experts), chosen=choice.weights.shape[1] if choice else 1,
        gathers=choice is not None and not scatters, coding=parts.coding, columns=columns,
        words=words, span=span, shift=parts.shift, gated=GATES[gated],
        limit=clamp.limit if clamp else None, alpha=clamp.alpha if clamp else None, count=count,
        chunks=chunks, stages=stages, num_warps=4, **launch.options(out.device),
    )  # fmt: skip


def splits_of(width: int, depth: int) -> tuple[int, int]:
    """(splits of the sum, columns of each) for experts of `width` rows: two programs at least for
    each multiprocessor and chosen expert of few."""
    splits = 1
    while splits * triton.cdiv(width, 64) < FEW_PROGRAMS and 2 * splits * SHORTEST <= depth:
        splits *= 2
    part = triton.cdiv(depth, splits * 256) * 256
    return triton.cdiv(depth, part), part


def _tiles(count: int, columns: int, words: int, programs: float) -> tuple[int, int]:
    """(chunks, stages) of tiles for so many rows of x: so many that memory is always asked for
    enough, by as many programs as fit together: two, of one kernel and the next, always do.

    A chunk has so many columns, and so many words of scales for every 16 rows.
    """
    chunks = 4 if count * columns <= 1024 else 2
    size = chunks * (2048 + 2 * columns * count + max(256, 128 * words))
    together = min(4 if count <= 32 else 3 if count <= 64 else 2, int(programs) // 132 + 1)
    return chunks, max(3, min(12, MEMORY // max(2, together) // size))
