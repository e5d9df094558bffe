"""FP8 weights (e4m3) with a scale for each block of rows and columns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import pad

from slipstream.core.errors import UsageError
from slipstream.kernels.formats.float8 import FLOAT8_MAX
from slipstream.kernels.formats.weight import (
    PRODUCT_SLICE,
    Rounding,
    Weight,
    chosen_rows,
    joined_rows,
    rounding_slices,
    row_slices,
)

BLOCK = 128  # default rows and columns of a block
_TINY = torch.finfo(torch.float32).tiny * FLOAT8_MAX


@dataclass(frozen=True, eq=False)
class Float8BlockMatrix(Weight):
    """A weight [N, K] in e4m3 with a scale for each block.

    Number (n, k) is values[n, k] * scales[n // block_rows, k // block_columns]. If matrices are
    stacked or cut in the middle of a block, scales are repeated for blocks of fewer rows, possibly
    of one row, such that all parts consist of whole blocks.

    Attributes:
        values: [N, K] float8_e4m3fn.
        scales: [N / block_rows, K / block_columns] float32, both rounded up.
    """

    values: Tensor
    scales: Tensor
    block_rows: int = BLOCK
    block_columns: int = BLOCK

    kept_on = frozenset({"cuda"})
    needs_float8_unpacked = True

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def select(self, index: Tensor) -> "Float8BlockMatrix":
        scales = self.scales[index // self.block_rows]
        return Float8BlockMatrix(chosen_rows(self.values, index), scales, 1, self.block_columns)

    def rows(self, start: int, stop: int | None = None) -> "Float8BlockMatrix":
        stop = self.shape[0] if stop is None else min(stop, self.shape[0])
        whole = self.regrouped(gcd(self.block_rows, start))
        first, last = start // whole.block_rows, -(-stop // whole.block_rows)
        return replace(whole, values=self.values[start:stop], scales=whole.scales[first:last])

    def columns(self, start: int, stop: int) -> "Float8BlockMatrix":
        if start % self.block_columns or (stop % self.block_columns and stop != self.shape[1]):
            raise UsageError(
                f"eight-bit floats in blocks of {self.block_columns} columns cannot be cut between "
                f"columns {start} and {stop}; use a number of ranks whose shares are whole blocks"
            )
        blocks = slice(start // self.block_columns, -(-stop // self.block_columns))
        values, scales = self.values[:, start:stop], self.scales[:, blocks]
        return replace(self, values=values.contiguous(), scales=scales.contiguous())

    def widened(self, columns: int) -> "Float8BlockMatrix":
        more = columns - self.shape[1]
        values = torch.cat((self.values, self.values.new_zeros(self.shape[0], more)), 1)
        scales = pad(self.scales, (0, more // self.block_columns))
        return replace(self, values=values, scales=scales)

    @classmethod
    def stack(cls, weights: Sequence[Self]) -> "Float8BlockMatrix | None":
        columns = weights[0].block_columns
        if any(weight.block_columns != columns for weight in weights):
            return None
        starts = [weight.shape[0] for weight in weights[:-1]]
        unit = gcd(*(weight.block_rows for weight in weights), *starts)
        return Float8BlockMatrix(
            joined_rows([weight.values for weight in weights]),
            torch.cat([weight.regrouped(unit).scales for weight in weights]),
            unit,
            columns,
        )

    def regrouped(self, block_rows: int) -> "Float8BlockMatrix":
        """Split blocks into blocks of fewer rows, a divisor of `block_rows`."""
        if block_rows == self.block_rows:
            return self
        scales = self.scales.repeat_interleave(self.block_rows // block_rows, 0)
        needed = -(-self.shape[0] // block_rows)
        return Float8BlockMatrix(self.values, scales[:needed], block_rows, self.block_columns)

    def dequantised(self) -> Tensor:
        numbers = self.values.float()
        of_rows = self.scales.repeat_interleave(self.block_columns, 1)[:, : self.shape[1]]
        for part in row_slices(len(of_rows), self.shape[1] * self.block_rows, PRODUCT_SLICE):
            some = numbers[part.start * self.block_rows : part.stop * self.block_rows]
            some.mul_(of_rows[part].repeat_interleave(self.block_rows, 0)[: len(some)])
        return numbers

    def to(self, device: torch.device) -> "Float8BlockMatrix":
        return replace(self, values=self.values.to(device), scales=self.scales.to(device))


@dataclass(frozen=True)
class ToFloat8Blocks(Rounding):
    """Rounds to a `Float8BlockMatrix`, scaling each block of 128 x 128 by its largest magnitude."""

    weight = Float8BlockMatrix
    bits = 8
    words = f"e4m3 with a scale for each block of {BLOCK} x {BLOCK}"

    def round(self, matrix: Tensor) -> Float8BlockMatrix:
        rows, columns = matrix.shape
        values = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn, device=matrix.device)
        scales = []
        for part in rounding_slices(-(-rows // BLOCK), columns * BLOCK, matrix.device):
            of_rows = slice(part.start * BLOCK, part.stop * BLOCK)
            numbers = matrix[of_rows].float()
            blocks = _in_blocks(numbers)
            largest = blocks.abs().amax((1, 3)).clamp_min(_TINY)
            scaled = blocks * (FLOAT8_MAX / largest)[:, None, :, None]
            rounded = scaled.flatten(2).flatten(0, 1)[: len(numbers), :columns]
            values[of_rows] = rounded.clamp_(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
            scales.append(largest / FLOAT8_MAX)
        return Float8BlockMatrix(values, torch.cat(scales))


def _in_blocks(numbers: Tensor) -> Tensor:
    """[N, K] -> [N / 128, 128, K / 128, 128], incomplete blocks are padded with zeros."""
    rows, columns = numbers.shape
    padded = F.pad(numbers, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.view(-1, BLOCK, padded.shape[1] // BLOCK, BLOCK)
