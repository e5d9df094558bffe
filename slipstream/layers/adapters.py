"""Where the factors of adapters lie: in slots beside the matrices of a network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from slipstream.kernels.adapters import LowRank
from slipstream.layers.parameters import COLUMNS, ROWS, WHOLE, Part, Share

# Of a module [N, K], by its name: A [r, K] and B [N, r], scaled.
Factors = Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class _Place:
    """Rows of a module that are a part of a matrix.

    Attributes:
        rows: [n] int64, which rows of the module they are.
        columns: of the module that are those of the matrix.
        index: of the part.
        start: their first row in the matrix.
    """

    low_rank: LowRank
    rows: Tensor
    columns: slice
    index: int
    start: int


@dataclass(frozen=True)
class AdaptedModule:
    """A module of a checkpoint [rows, columns] that adapters may change, and where it is used."""

    rows: int
    columns: int
    places: list[_Place] = field(default_factory=list)


class AdapterSlots:
    """The factors of as many adapters as there are slots, each of which one holds at a time.

    Args:
        count: of slots.
        rank: the largest of an adapter.
        share: of each matrix, of which this rank has some rows or columns. Where ranks share the
            rows, each has the whole first factors and its rows of the second ones; where they
            share the columns, it has its columns of the first ones, and what the whole second
            ones make of those is a summand of y like that of the matrix.

    Attributes:
        modules: by their names in a checkpoint, without ".weight".
    """

    def __init__(
        self,
        count: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        share: Share = WHOLE,
    ) -> None:
        self.count, self.rank, self.dtype, self.device = count, rank, dtype, device
        self._share = share
        self.modules: dict[str, AdaptedModule] = {}
        self._all: list[LowRank] = []

    @property
    def nbytes(self) -> int:
        """All slots together."""
        return sum(it.nbytes for it in self._all)

    def matrix(self, parts: Sequence[Part], columns: int) -> LowRank:
        """Factors for this rank's share of the matrix [sum of rows, columns] that these parts
        make."""
        share, whole_columns = self._share, columns
        own_columns = slice(0, columns)
        if parts[0].split == COLUMNS:
            own_columns = slice(*share.span_of(parts[0], columns))
            columns = own_columns.stop - own_columns.start
        kept = [self._rows(part) for part in parts]
        ends = torch.tensor([len(rows) for rows in kept]).cumsum(0).tolist()
        low_rank = LowRank.empty(
            self.count, self.rank, tuple(ends), columns, self.dtype, self.device
        )
        self._all.append(low_rank)
        before, whole_rows = 0, sum(part.rows for part in parts)
        for index, (part, own, end) in enumerate(zip(parts, kept, ends, strict=True)):
            start = end - len(own)
            rows = torch.cat([torch.arange(*span) for span in part.spans])
            place = _Place(low_rank, rows[own], own_columns, index, start)
            self._add(part.name, part.tensor_rows, whole_columns, place)
            if part.fused is not None:  # one module for all parts
                place = replace(place, rows=before + own)
                self._add(part.fused.name, whole_rows, whole_columns, place)
            before += part.rows
        return low_rank

    def _rows(self, part: Part) -> Tensor:
        """[n] int64, which rows of a part this rank has, in the order in which it has them."""
        rows = torch.arange(part.rows)
        if part.paired is not None:
            rows = rows[part.paired.order(part.rows)]
        if part.split == ROWS:
            start, stop = self._share.span_of(part, part.rows)
            rows = rows[torch.arange(start, stop).clamp_max(part.rows - 1)]
        return rows

    def _add(self, name: str, rows: int, columns: int, place: _Place) -> None:
        module = self.modules.setdefault(name, AdaptedModule(rows, columns))
        assert (module.rows, module.columns) == (rows, columns), f"{name} has two shapes"
        module.places.append(place)

    @torch.inference_mode()
    def write(self, slot: int, factors: Factors) -> None:
        """Put an adapter into a slot that no row names. On a GPU in the stream of the caller."""
        for low_rank in self._all:
            low_rank.down[slot].zero_()
            low_rank.up[slot].zero_()
        for name, (first, second) in factors.items():
            rank = len(first)
            for place in self.modules[name].places:
                down, start = place.index * self.rank, place.start
                own = first[:, place.columns]  # fewer where a share of the matrix is filled up
                target = place.low_rank.down[slot, down : down + rank, : own.shape[1]]
                target.copy_(own, non_blocking=True)
                rows = second[place.rows]
                target = place.low_rank.up[slot, :rank, start : start + len(rows)]
                target.copy_(rows.T, non_blocking=True)
