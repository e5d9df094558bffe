"""Slots for LoRA adapters: the memory for their factors, which a network's matrices use."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from slipstream.kernels.adapters import LowRank
from slipstream.layers.parameters import COLUMNS, ROWS, WHOLE, Part, Share

# The factors of each module [N, K], by its name: A [r, K] and the scaled B [N, r].
Factors = Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class _Place:
    """The place in a matrix of the rows of one part.

    Attributes:
        rows: [n] int64, rows of the module.
        columns: columns of the module that the matrix has.
        index: index of the part.
        start: first row in the matrix.
    """

    low_rank: LowRank
    rows: Tensor
    columns: slice
    index: int
    start: int


@dataclass(frozen=True)
class AdaptedModule:
    """A module [rows, columns] that adapters may change, and its places in matrices."""

    rows: int
    columns: int
    places: list[_Place] = field(default_factory=list)


class AdapterSlots:
    """Slots that hold the factors of one adapter each.

    Args:
        count: number of slots.
        rank: the largest rank of an adapter.
        share: this rank's share of each matrix. If rows are split over ranks, a rank has the
            whole A and its rows of B. If columns are split, it has its columns of A and the whole
            B; its product is a partial sum, like that of the matrix.
        canonical: the name in `modules` of a module that an adapter names otherwise.

    Attributes:
        modules: modules by their names in a checkpoint, without ".weight".
    """

    def __init__(
        self,
        count: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        share: Share = WHOLE,
        canonical: Callable[[str], str | None] = lambda name: name,
    ) -> None:
        self.count, self.rank, self.dtype, self.device = count, rank, dtype, device
        self._share, self.canonical = share, canonical
        self.modules: dict[str, AdaptedModule] = {}
        self._all: list[LowRank] = []

    @property
    def nbytes(self) -> int:
        return sum(it.nbytes for it in self._all)

    def matrix(self, parts: Sequence[Part], columns: int) -> LowRank:
        """Make the slots of this rank's share of a matrix, the stack of these parts."""
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
        """[n] int64: the rows of a part that this rank has, in its order."""
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
    def write(self, slot: int, factors: Factors, clear: bool = True) -> None:
        """Write an adapter to a slot that no row uses. On a GPU, in the caller's stream.

        Args:
            clear: set all factors that are not given to 0.
        """
        for low_rank in self._all if clear else ():
            low_rank.down[slot].zero_()
            low_rank.up[slot].zero_()
        for name, (first, second) in factors.items():
            rank = len(first)
            for place in self.modules[name].places:
                down, start = place.index * self.rank, place.start
                own = first[:, place.columns]  # fewer if the share of the matrix is padded
                target = place.low_rank.down[slot, down : down + rank, : own.shape[1]]
                target.copy_(own, non_blocking=True)
                rows = second[place.rows]
                target = place.low_rank.up[slot, :rank, start : start + len(rows)]
                target.copy_(rows.T, non_blocking=True)
