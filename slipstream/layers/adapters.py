"""Where the factors of adapters lie: in slots beside the matrices of a network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.kernels.adapters import LowRank
from slipstream.layers.parameters import Part

# Of a module [N, K], by its name: A [r, K] and B [N, r], scaled.
Factors = Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class _Place:
    """Rows of a module that are a part of a matrix.

    Attributes:
        rows: [n] int64, which rows of the module they are.
        index: of the part.
        start: their first row in the matrix.
    """

    low_rank: LowRank
    rows: Tensor
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

    Attributes:
        modules: by their names in a checkpoint, without ".weight".
    """

    def __init__(self, count: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.count, self.rank, self.dtype, self.device = count, rank, dtype, device
        self.modules: dict[str, AdaptedModule] = {}
        self._all: list[LowRank] = []

    @property
    def nbytes(self) -> int:
        """All slots together."""
        return sum(it.nbytes for it in self._all)

    def matrix(self, parts: Sequence[Part], columns: int) -> LowRank:
        """Factors for the matrix [sum of rows, columns] that these parts make."""
        ends = torch.tensor([part.rows for part in parts]).cumsum(0).tolist()
        low_rank = LowRank.empty(
            self.count, self.rank, tuple(ends), columns, self.dtype, self.device
        )
        self._all.append(low_rank)
        for index, (part, end) in enumerate(zip(parts, ends, strict=True)):
            start = end - part.rows
            rows = torch.cat([torch.arange(*span) for span in part.spans])
            if part.paired is not None:
                rows = rows[part.paired.order(part.rows)]
            self._add(part.name, part.tensor_rows, columns, _Place(low_rank, rows, index, start))
            if part.fused is not None:  # one module for all parts
                rows = torch.arange(start, end)
                if part.paired is not None:
                    rows = rows[part.paired.order(part.rows)]
                own = _Place(low_rank, rows, index, start)
                self._add(part.fused.name, ends[-1], columns, own)
        return low_rank

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
                target = place.low_rank.down[slot, down : down + rank]
                target.copy_(first, non_blocking=True)
                rows = second[place.rows]
                target = place.low_rank.up[slot, :rank, start : start + len(rows)]
                target.copy_(rows.T, non_blocking=True)
