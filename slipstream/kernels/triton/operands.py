"""Weights of all formats, and choices of experts, in the form that the grouped matmul reads."""

from dataclasses import dataclass
from functools import singledispatch
from typing import Any

from torch import Tensor

from slipstream.kernels.formats.float8_blocks import BLOCK, Float8BlockMatrix
from slipstream.kernels.formats.int4 import Int4Matrix
from slipstream.kernels.formats.int8 import Int8Matrix
from slipstream.kernels.formats.mxfp4 import Mxfp4Matrix
from slipstream.kernels.formats.nvfp4 import Nvfp4Matrix
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.triton import matmul
from slipstream.kernels.triton.fragments import Fragments
from slipstream.kernels.triton.grouped_kernels import FLOAT8_BLOCKS, INT4, INT8, MXFP4, NVFP4, PLAIN

FRAGMENTS = -1  # for `grouped_stream_kernels.py`


@dataclass(frozen=True)
class Operand:
    """A weight matrix [N, K].

    Attributes:
        values: the elements; 4-bit formats have two in a byte.
        scales: scales of groups or blocks of elements.
        zeros: zero points of the groups of INT4; None: all are 8.
        row_scales: [N] float32, factors of the sums.
        rounds_rows: whether rows of activations are quantized to e4m3 as well.
        block_rows: rows that share a scale, for FLOAT8_BLOCKS.
        block_columns: columns that share a scale.
        fragments: the layout of FRAGMENTS.
    """

    form: int
    shape: tuple[int, int]
    values: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    row_scales: Tensor | None = None
    rounds_rows: bool = False
    block_rows: int = BLOCK
    block_columns: int = BLOCK
    fragments: Fragments | None = None


@dataclass(frozen=True)
class SortedPairs:
    """Pairs of a row and one of its experts, sorted by expert.

    Attributes:
        pairs: [T k] int32, the sorted pairs.
        starts: [E + 1] int32, the start of each expert's pairs, and last the number of pairs.
        ends: [E] int32, how many tiles of `ChosenExperts.tile` pairs each expert and all before it
            need.
    """

    pairs: Tensor
    starts: Tensor
    ends: Tensor


@dataclass(frozen=True)
class ChosenExperts:
    """Which experts T rows chose, k each: pair row * k + place is a row and one of its experts.

    Attributes:
        weights: [T, k] float32.
        experts: [T, k] int32.
        order: None where rows are few: each pair then has a tile, in which the first pair of an
            expert finds the others, and the rest is empty.
        tile: the most pairs of a tile.
        slots: the most tiles that there can be.
    """

    weights: Tensor
    experts: Tensor
    order: SortedPairs | None
    tile: int
    slots: int

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that a product reads: experts, or pairs, starts and ends."""
        if self.order is None:
            return self.experts, None, None, None
        return None, self.order.pairs, self.order.starts, self.order.ends


@singledispatch
def operand(weight: Any) -> Operand:
    """The weight as the kernels read it.

    Raises:
        UsageError: they have no product for its format.
    """
    factor = matmul.operand(weight)
    return Operand(
        PLAIN.value, factor.shape, factor.values, row_scales=factor.scales,
        rounds_rows=factor.scales is not None,
    )  # fmt: skip


@operand.register
def _(weight: Float8BlockMatrix) -> Operand:
    return Operand(
        FLOAT8_BLOCKS.value, weight.shape, weight.values, weight.scales,
        block_rows=weight.block_rows, block_columns=weight.block_columns,
    )  # fmt: skip


@operand.register
def _(weight: Mxfp4Matrix) -> Operand:
    return Operand(
        MXFP4.value, weight.shape, weight.values, weight.scales, block_columns=weight.group
    )


@operand.register
def _(weight: Nvfp4Matrix) -> Operand:
    return Operand(
        NVFP4.value, weight.shape, weight.values, weight.scales,
        row_scales=weight.global_scales, block_columns=weight.group,
    )  # fmt: skip


@operand.register
def _(weight: Int4Matrix) -> Operand:
    return Operand(
        INT4.value, weight.shape, weight.values, weight.scales, weight.zeros,
        block_columns=weight.group,
    )  # fmt: skip


@operand.register
def _(weight: Int8Matrix) -> Operand:
    """Activations are not rounded, even if the format asks for it."""
    return Operand(INT8.value, weight.shape, weight.values, row_scales=weight.scales)


@operand.register
def _(weight: Fragments) -> Operand:
    return Operand(
        FRAGMENTS, weight.shape, weight.values, weight.scales, row_scales=weight.row_scales,
        fragments=weight,
    )  # fmt: skip


def is_packed(weight: Weight) -> bool:
    """Whether only the grouped product reads a format."""
    return bool(operand(weight).form != PLAIN.value)
