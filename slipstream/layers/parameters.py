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
MOST_RANKS = 16  # that an error message names


@dataclass(frozen=True)
class Fused:
    """One tensor in which a checkpoint may have all parts of a parameter, one below the other."""

    name: str


@dataclass(frozen=True)
class FusedExperts(Fused):
    """One tensor in which a checkpoint may have what all experts of a layer have.

    Attributes:
        experts: how many, which its first dimension counts.
        alternating: an expert's rows are one row of each of its parts in turn, and not all rows of
            one part before those of the next.
        transposed: matrices of floats are [experts, columns, rows].
    """

    experts: int
    alternating: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class Within:
    """Where a tensor has the rows of a part, between those of others.

    Attributes:
        rows: of the tensor, which are groups of one size.
        group: rows of a group, some of which, as many in each, are the part's.
        start: the first of them in a group.
    """

    rows: int
    group: int
    start: int


@dataclass(frozen=True)
class PairedRows:
    """Rows of heads whose rotated pairs are neighbours, (0, 1), (2, 3) and so on, in a checkpoint.

    They are put in order as they are read: the first of every pair, then the second, as all ops
    have it. Scores stay the same where queries and keys are put in order alike.

    Attributes:
        head_dim: rows of a head.
        rotary_dim: how many of them are rotated, the first ones.
    """

    head_dim: int
    rotary_dim: int

    def order(self, rows: int) -> Tensor:
        """[rows] int64: where each row of so many stands in the checkpoint."""
        turned = torch.arange(self.rotary_dim).view(-1, 2).T.flatten()
        head = torch.cat((turned, torch.arange(self.rotary_dim, self.head_dim)))
        starts = torch.arange(0, rows, self.head_dim)
        return (starts.unsqueeze(-1) + head).flatten()


@dataclass(frozen=True)
class Part:
    """Some rows of a parameter, as a checkpoint has them.

    Attributes:
        rows: how many, before they are split.
        split: the dimension, `ROWS` or `COLUMNS`, that ranks share; None: each rank has all of it.
        fused: where else the rows may be, together with all other parts of the parameter, which
            are in its order.
        dtype: that checkpoints are read in; None: the model's.
        offset: what is added to the numbers of a checkpoint, of vectors whose parts all have it.
        within: where its tensor has the rows of other parts as well; None: it has these alone.
        exact: a matrix of such parts is not rounded where others are on request.
        paired: None: the rows stand in the order in which they are used.
        heads: of keys or values, in the rows; see `Share.span`. None: the rows may be cut anywhere.
        unit: of the dimension that ranks share, so many go together; see `Share.span`. None: it is
            1, and the last rank has no fewer than others.
    """

    name: str
    rows: int
    split: int | None = None
    fused: Fused | None = None
    dtype: torch.dtype | None = None
    offset: float = 0.0
    within: Within | None = None
    exact: bool = False
    paired: PairedRows | None = None
    heads: int | None = None
    unit: int | None = None

    @property
    def tensor_rows(self) -> int:
        """Rows of its tensor."""
        return self.rows if self.within is None else self.within.rows

    @property
    def spans(self) -> list[tuple[int, int]]:
        """From where to before where its tensor has its rows, group by group."""
        within = self.within
        if within is None:
            return [(0, self.rows)]
        groups = within.rows // within.group
        count = self.rows // groups
        starts = [index * within.group + within.start for index in range(groups)]
        return [(start, start + count) for start in starts]


class UnequalSharesError(UsageError):
    """Ranks cannot have equal shares of something.

    Attributes:
        problem: of what, in words.
    """

    def __init__(self, problem: str, numbers: Sequence[int]) -> None:
        self.problem = problem
        named = ", ".join(map(str, numbers))
        super().__init__(f"{problem}; use a number of ranks that divides it ({named})")


@dataclass(frozen=True)
class Share:
    """Which of `size` equal shares of a network this process holds.

    Attributes:
        reduce: sums a tensor over the ranks, in their order: all get the same bits.
        stack: what is to be summed, [T, n] of each rank -> [size, T, n].
        gather: joins the last dimension of a tensor [T, n], rank by rank -> [T, size n].
        least: the least of the numbers that the ranks have. Where ranks measure (free memory), they
            must not conclude different things.
        within: gives a rank's share of a network that each group of so many neighbours has all of;
            all ranks ask for it, at the same point. None: there are no others.
        unit: of feed-forward parts, columns that a checkpoint stores so that they cannot be parted.
    """

    rank: int = 0
    size: int = 1
    reduce: Callable[[Tensor], Tensor] | None = None
    gather: Callable[[Tensor], Tensor] | None = None
    least: Callable[[int], int] = lambda number: number
    within: "Callable[[int], Share] | None" = None
    unit: int = 1
    stack: Callable[[Tensor], Tensor] | None = None

    def addend(self, made: Tensor, sums_addends: bool) -> Tensor:
        """What all ranks together have made [T, n], of which this is a part, as an addend.

        Args:
            sums_addends: of the ops that take it (`Ops`), which then add the parts up themselves.
        """
        if self.reduce is None:
            return made
        return self.stack(made) if sums_addends and self.stack is not None else self.reduce(made)

    def copies(self, heads: int | None) -> int:
        """How many ranks in a row have the same of so many heads of keys: one, unless there are
        fewer heads than ranks."""
        fewer = heads is not None and heads < self.size and self.size % heads == 0
        return self.size // heads if heads is not None and fewer else 1

    def span(
        self, count: int, what: str, heads: int | None = None, unit: int = 1
    ) -> tuple[int, int]:
        """From where to before where this rank's share of `count` things lies.

        Args:
            heads: of keys, in them; where there are fewer than ranks, several ranks have the same
                one, which serves the query heads of each of them.
            unit: so many of them go together. If it is above 1 the last rank may have fewer than
                others: its share then ends behind the last of them, and is filled up there.

        Raises:
            UsageError: there is no equal share of `what`.
        """
        if self.size == 1:
            return 0, count
        copies = self.copies(heads)
        shares = self.size // copies
        units = count // unit
        each = -(-units // shares)
        fills_up = unit > 1 and units > each * (shares - 1)
        if count % unit or (units % shares and not fills_up):
            raise UnequalSharesError(
                f"{what} ({count}) cannot be split over {self.size} ranks",
                [it for it in range(1, min(count, MOST_RANKS) + 1) if count % it == 0],
            )
        each *= unit
        return self.rank // copies * each, (self.rank // copies + 1) * each

    def of(self, count: int, what: str, heads: int | None = None) -> int:
        """This rank's number of `count` things; arguments and errors as `span`."""
        start, stop = self.span(count, what, heads)
        return stop - start

    def span_of(self, part: Part, count: int) -> tuple[int, int]:
        """Where its share of a part lies, of which `count` rows or columns are split."""
        return self.span(count, part.name, part.heads, part.unit or 1)

    def cut(self, stacked: Tensor, parts: Sequence[Part]) -> Tensor:
        """What this rank keeps of whole parts that are stacked along the rows."""
        if self.size == 1:
            return stacked
        kept = []
        for part, block in zip(
            parts, torch.split(stacked, [part.rows for part in parts]), strict=True
        ):
            if part.split is not None:
                count = block.shape[part.split]
                start, stop = self.span_of(part, count)
                block = block.narrow(part.split, start, min(stop, count) - start)
                if stop > count:
                    zeros = torch.zeros_like(block.narrow(part.split, 0, 1))
                    sizes = [-1] * block.ndim
                    sizes[part.split] = stop - count
                    block = torch.cat((block, zeros.expand(sizes)), part.split)
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

    def alike(self, parts: Sequence[Part]) -> bool:
        """Whether matrices of these parts have one precision, so that they may be one matrix."""

    def head(self, parts: Sequence[Part], columns: int) -> Weight:
        """A matrix whose products are logits: four bits would be too few for it."""

    def table(self, parts: Sequence[Part], columns: int) -> DenseMatrix:
        """[sum of rows, columns] in the model's dtype, however it is stored: an op takes parts of
        it."""

    def embedding(self, parts: Sequence[Part], columns: int) -> Weight:
        """[sum of rows, columns] whose rows are looked up, in the model's dtype."""

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
