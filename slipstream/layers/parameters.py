"""Where layers get their weights from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Final, Protocol

import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.weight import Weight

ROWS, COLUMNS = 0, 1


@dataclass(frozen=True)
class Fused:
    """One tensor in which a checkpoint may have what all experts of a layer have.

    Attributes:
        name: of the tensor, whose first dimension counts experts.
        experts: how many.
        alternating: an expert's rows are one row of each of its parts in turn, and not all rows of
            one part before those of the next.
        transposed: matrices of floats are [experts, columns, rows].
    """

    name: str
    experts: int
    alternating: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class Part:
    """Some rows of a parameter, as a checkpoint has them.

    Attributes:
        rows: how many, before they are split.
        split: the dimension, `ROWS` or `COLUMNS`, that ranks share; None: each rank has all of it.
        fused: where else the rows may be, together with all other parts of the parameter, which
            are in the order of experts.
        dtype: that checkpoints are read in; None: the model's.
    """

    name: str
    rows: int
    split: int | None = None
    fused: Fused | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Share:
    """Which of `size` equal shares of a network this process holds.

    Attributes:
        reduce: sums a tensor over the ranks.
        gather: joins the last dimension of a tensor [T, n], rank by rank -> [T, size n].
    """

    rank: int = 0
    size: int = 1
    reduce: Callable[[Tensor], Tensor] | None = None
    gather: Callable[[Tensor], Tensor] | None = None

    def span(self, count: int, what: str) -> tuple[int, int]:
        """From where to before where this rank's share of `count` things lies.

        Raises:
            UsageError: there is no equal share of `what`.
        """
        if count % self.size:
            raise UsageError(
                f"{what} ({count}) cannot be split over {self.size} ranks; use a number of ranks "
                "that divides it"
            )
        each = count // self.size
        return self.rank * each, (self.rank + 1) * each

    def of(self, count: int, what: str) -> int:
        """This rank's number of `count` things; errors as `span`."""
        start, stop = self.span(count, what)
        return stop - start

    def cut(self, stacked: Tensor, parts: Sequence[Part]) -> Tensor:
        """What this rank keeps of whole parts that are stacked along the rows."""
        if self.size == 1:
            return stacked
        kept = []
        for part, block in zip(
            parts, torch.split(stacked, [part.rows for part in parts]), strict=True
        ):
            if part.split is not None:
                start, stop = self.span(block.shape[part.split], part.name)
                block = block.narrow(part.split, start, stop - start)
            kept.append(block)
        return torch.cat(kept)


WHOLE: Final = Share()
"""A network that one process holds alone."""


class ParameterSource(Protocol):
    """Makes parameters, already filled: from a checkpoint, or at random.

    A parameter may be several tensors of the checkpoint stacked along the first axis, each read
    straight into its place. Of parts that ranks share, the source gives what its own rank holds,
    cut before anything is rounded or packed: the shapes below are then smaller in that dimension.
    """

    def matrix(self, parts: Sequence[Part], columns: int) -> Weight:
        """[sum of rows, columns], a factor of products, in the precision that they work in."""

    def head(self, parts: Sequence[Part], columns: int) -> Weight:
        """A matrix whose products are logits: four bits would be too few for it."""

    def table(self, parts: Sequence[Part], columns: int) -> DenseMatrix:
        """[sum of rows, columns] in the model's dtype, whose rows are looked up."""

    def tied(self, table: Weight) -> Weight:
        """The factor of products that has the numbers of a table; the table itself if it can be."""

    def vector(self, parts: Sequence[Part]) -> Tensor:
        """[sum of rows] in the model's dtype."""


class InvalidSizesError(ValueError):
    """Numbers of a config that no network can have; callers that know the file name it."""


def require_positive(**values: float) -> None:
    """Raise InvalidSizesError naming the first key whose value is not above 0 and finite."""
    for key, value in values.items():
        if not (value > 0 and isfinite(value)):
            raise InvalidSizesError(f'"{key}" must be above 0, not {value}')
