"""Weights in the blocks of GGUF files, kept as stored and dequantised when they are used."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.core.errors import UsageError
from slipstream.kernels.formats.weight import Weight, chosen_rows, joined_rows


class BlockType(Protocol):
    """A block type of GGUF files.

    Attributes:
        numbers: how many numbers a block has.
        nbytes: size of a block in bytes.
    """

    @property
    def name(self) -> str: ...
    @property
    def numbers(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def dequantised(self, raw: Tensor) -> Tensor:
        """raw [N, bytes of a row] uint8 -> [N, K] float32, exactly as the type defines it."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Rows whose blocks have one type: raw [N, bytes of a row] uint8."""

    raw: Tensor
    type: BlockType


@dataclass(frozen=True, eq=False)
class BlockMatrix(Weight):
    """A weight [N, K] of blocks, whose rows may be of several types.

    Attributes:
        parts: groups of consecutive rows, at least one, all with the same number of columns.
        table_dtype: dtype of looked-up rows; None: rows cannot be looked up.
    """

    parts: tuple[Blocks, ...]
    table_dtype: torch.dtype | None = None

    kept_on = frozenset({"cpu"})

    @property
    def shape(self) -> tuple[int, int]:
        first = self.parts[0]
        blocks = first.raw.shape[1] // first.type.nbytes
        return sum(len(part.raw) for part in self.parts), blocks * first.type.numbers

    @property
    def table_device(self) -> torch.device:  # type: ignore[override]
        return self.parts[0].raw.device

    @property
    def nbytes(self) -> int:
        return sum(part.raw.nbytes for part in self.parts)

    def select(self, index: Tensor) -> Self:
        return self._with(
            Blocks(chosen_rows(self.parts[place].raw, own), self.parts[place].type)
            for place, own in runs([len(part.raw) for part in self.parts], index)
        )

    def rows(self, start: int, stop: int | None = None) -> Self:
        return self._with(self._rows(start, self.shape[0] if stop is None else stop))

    def _rows(self, start: int, stop: int) -> Iterator[Blocks]:
        for part in self.parts:
            own = part.raw[max(start, 0) : max(stop, 0)]
            start, stop = start - len(part.raw), stop - len(part.raw)
            if len(own):
                yield Blocks(own, part.type)

    def columns(self, start: int, stop: int) -> Self:
        for part in self.parts:
            if start % part.type.numbers or stop % part.type.numbers:
                raise UsageError(
                    f"{part.type.name} weights cannot be cut between columns {start} and {stop}; "
                    "use a number of ranks whose shares are whole blocks"
                )
        return self._with(
            Blocks(part.raw[:, _place(part.type, start) : _place(part.type, stop)], part.type)
            for part in self.parts
        )

    def widened(self, columns: int) -> Self:
        more = columns - self.shape[1]
        return self._with(
            Blocks(pad(part.raw, (0, _place(part.type, more))), part.type) for part in self.parts
        )

    @classmethod
    def stack(cls, weights: Sequence[Self]) -> Self:
        """Merge adjacent parts of one type; parts of other types stay separate."""
        parts: list[Blocks] = []
        for part in (part for weight in weights for part in weight.parts):
            if parts and parts[-1].type is part.type:
                parts[-1] = Blocks(joined_rows([parts[-1].raw, part.raw]), part.type)
            else:
                parts.append(part)
        return weights[0]._with(parts)

    def to(self, device: torch.device) -> Self:
        return self._with(Blocks(part.raw.to(device), part.type) for part in self.parts)

    def dequantised(self) -> Tensor:
        return torch.cat([part.type.dequantised(part.raw.contiguous()) for part in self.parts])

    def as_table(self, dtype: torch.dtype) -> Self:
        return replace(self, table_dtype=dtype)

    def look_up(self, index: Tensor) -> Tensor:
        assert self.table_dtype is not None, "this matrix is no table"
        rows = self.select(index.flatten().long()).dequantised().to(self.table_dtype)
        return rows.view(*index.shape, self.shape[1])

    def _with(self, parts: Iterator[Blocks] | Sequence[Blocks]) -> Self:
        none = Blocks(self.parts[0].raw[:0], self.parts[0].type)
        return replace(self, parts=tuple(parts) or (none,))


def runs(lengths: Sequence[int], index: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Split index [n] int64, of rows of stacked parts, into runs of rows of one part:
    yields the number of the part, and the rows within it."""
    ends = torch.tensor(lengths, device=index.device).cumsum(0)
    places: list[int] = torch.searchsorted(ends, index, right=True).tolist()
    start = 0
    for place, same in groupby(places):
        stop = start + len(list(same))
        yield place, index[start:stop] - sum(lengths[:place])
        start = stop


def _place(kind: BlockType, column: int) -> int:
    """The offset in bytes, within a row, of the block that begins at this column."""
    return column // kind.numbers * kind.nbytes
