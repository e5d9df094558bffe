"""The interface from which layers get their weights, and tensor parallel shares of weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Final, Protocol

import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.norm import SublayerOutput, UnreducedSum, sum_parts

ROWS, COLUMNS = 0, 1
MOST_RANKS = 16  # the largest number of ranks that error messages suggest


@dataclass(frozen=True)
class Fused:
    """A tensor of a checkpoint that has all parts of a parameter, stacked along the rows."""

    name: str


@dataclass(frozen=True)
class FusedExperts(Fused):
    """A tensor of a checkpoint that has the matrices of all experts of a layer.

    Attributes:
        experts: number of experts, the first dimension of the tensor.
        alternating: the rows of an expert's parts are interleaved (a row of gate, a row of up, and
            so on) instead of stacked.
        transposed: unquantised tensors are [experts, columns, rows]; None: if they have that shape
            and not [experts, rows, columns].
    """

    experts: int
    alternating: bool = False
    transposed: bool | None = False


@dataclass(frozen=True)
class Interleaved:
    """The place of a part's rows in a tensor that interleaves them with rows of other parts.

    Attributes:
        rows: number of rows of the tensor, which is a sequence of groups of equal size.
        group: number of rows of a group; every group has equally many rows of the part.
        start: index within a group of the part's first row.
    """

    rows: int
    group: int
    start: int


@dataclass(frozen=True)
class PairedRows:
    """Rows of heads for interleaved RoPE, which rotates the pairs (0, 1), (2, 3) and so on.

    The ops rotate the two halves of a head instead, so loading permutes the rows: first the even
    ones, then the odd ones. Attention scores are unchanged if queries and keys are both permuted.

    Attributes:
        head_dim: number of rows of a head.
        rotary_dim: number of rows that are rotated, the first of each head.
    """

    head_dim: int
    rotary_dim: int

    def order(self, rows: int) -> Tensor:
        """[rows] int64, the permutation: the index in the checkpoint of each row."""
        turned = torch.arange(self.rotary_dim).view(-1, 2).T.flatten()
        head = torch.cat((turned, torch.arange(self.rotary_dim, self.head_dim)))
        starts = torch.arange(0, rows, self.head_dim)
        return (starts.unsqueeze(-1) + head).flatten()


@dataclass(frozen=True)
class Part:
    """A block of rows of a parameter, and how a checkpoint stores them.

    Attributes:
        name: name of the checkpoint's tensor.
        rows: number of rows over all ranks.
        split: dimension that is split over ranks, `ROWS` or `COLUMNS`; None: replicated.
        fused: alternative tensor, which has all parts of the parameter in the same order.
        dtype: dtype to load the tensor in; None: the model's.
        offset: added to the checkpoint's numbers (vectors only; the same for all parts of one).
        within: place of the rows in a tensor that also has rows of other parts; None: the tensor
            has only this part.
        exact: a matrix of such parts is not quantised when `quantization` is set.
        paired: permutation of the rows for interleaved RoPE; None: rows are used in stored order.
        heads: number of key or value heads in the rows, see `Share.span`; None: no head boundaries.
        unit: number of adjacent rows or columns that must stay on one rank, see `Share.span`; None:
            1, and all ranks have equally many.
    """

    name: str
    rows: int
    split: int | None = None
    fused: Fused | None = None
    dtype: torch.dtype | None = None
    offset: float = 0.0
    within: Interleaved | None = None
    exact: bool = False
    paired: PairedRows | None = None
    heads: int | None = None
    unit: int | None = None

    @property
    def tensor_rows(self) -> int:
        """Number of rows of the checkpoint's tensor."""
        return self.rows if self.within is None else self.within.rows

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Ranges (start, stop) of the part's rows in its tensor, one for each group."""
        within = self.within
        if within is None:
            return [(0, self.rows)]
        groups = within.rows // within.group
        count = self.rows // groups
        starts = [index * within.group + within.start for index in range(groups)]
        return [(start, start + count) for start in starts]


class UnequalSharesError(UsageError):
    """A dimension cannot be split equally over the ranks.

    Attributes:
        problem: the message without the advice.
    """

    def __init__(self, problem: str, numbers: Sequence[int]) -> None:
        self.problem = problem
        named = ", ".join(map(str, numbers))
        super().__init__(f"{problem}; use a number of ranks that divides it ({named})")


@dataclass(frozen=True)
class Share:
    """This rank's share of a tensor parallel network, and the collectives of its ranks.

    Attributes:
        rank: index of this rank.
        size: number of ranks.
        reduce: all-reduce (sum) in rank order, so that all ranks get the same bits.
        stack: all-gather along a new first dimension, [T, n] -> [size, T, n].
        gather: all-gather along the last dimension, [T, n] -> [T, size * n].
        least: minimum of a number over the ranks, so that decisions from measurements (free memory)
            are the same on all ranks.
        within: number of ranks n -> the share of a second network that is split over groups of n
            adjacent ranks; a collective call. None: the process has no other ranks.
        unit: columns of feed-forward parts that must stay on one rank, by the checkpoint's format.
        unreduced: leaves the sum of the ranks' partial results (see `addend`) to the op that takes
            it, which fetches them from the GPUs' memory; None: there is no such memory, or it is
            not for this shape.
        all_to_all: [size, ...], a part for each rank -> [size, ...], each rank's part for this one.
        reaches_memory: ranks reach each other's GPU memory, so that sums take few microseconds.
    """

    rank: int = 0
    size: int = 1
    reduce: Callable[[Tensor], Tensor] | None = None
    gather: Callable[[Tensor], Tensor] | None = None
    least: Callable[[int], int] = lambda number: number
    within: "Callable[[int], Share] | None" = None
    unit: int = 1
    stack: Callable[[Tensor], Tensor] | None = None
    unreduced: Callable[[Tensor, torch.dtype], UnreducedSum | None] = lambda partial, dtype: None
    all_to_all: Callable[[Tensor], Tensor] | None = None
    reaches_memory: bool = False

    def addend(self, partial: Tensor, dtype: torch.dtype, sums_addends: bool) -> SublayerOutput:
        """The sum over ranks of their partial results, as an addend of the stream.

        Args:
            partial: [T, n] in `dtype`, or partial sums of it, [parts, T, n].
            sums_addends: see `Ops`; if set, the next op does the sum: the result is an
                `UnreducedSum`, or else the stack of the ranks' partial results, [ranks, T, n].
        """
        if self.reduce is None:
            return partial
        unreduced = self.unreduced(partial, dtype) if sums_addends else None
        if unreduced is not None:
            return unreduced
        mine = sum_parts(partial, dtype)
        return self.stack(mine) if sums_addends and self.stack is not None else self.reduce(mine)

    def copies(self, heads: int | None) -> int:
        """Number of adjacent ranks that hold the same KV head: 1, or more if ranks are a multiple
        of `heads`."""
        fewer = heads is not None and heads < self.size and self.size % heads == 0
        return self.size // heads if heads is not None and fewer else 1

    def span(
        self, count: int, what: str, heads: int | None = None, unit: int = 1
    ) -> tuple[int, int]:
        """The range (start, stop) of this rank's share of `count` rows or columns.

        Args:
            what: name of the dimension, for the error.
            heads: number of KV heads in them; if lower than the number of ranks, heads are
                replicated, each on adjacent ranks.
            unit: number of adjacent ones that must stay on one rank. If above 1, the last share may
                be smaller; its range then ends beyond `count`, and `cut` pads it with zeros.

        Raises:
            UnequalSharesError: `count` cannot be split equally.
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
        """The size of this rank's share of `count`; arguments and errors as `span`."""
        start, stop = self.span(count, what, heads)
        return stop - start

    def span_of(self, part: Part, count: int) -> tuple[int, int]:
        """The range of this rank's share of a part whose split dimension has size `count`."""
        return self.span(count, part.name, part.heads, part.unit or 1)

    def cut(self, stacked: Tensor, parts: Sequence[Part]) -> Tensor:
        """This rank's shares of `parts`, given all parts in full, stacked along the rows."""
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
    """Creates parameters with their values, from a checkpoint or at random.

    A parameter may stack several tensors of the checkpoint along the first dimension. The split
    dimension of a part is cut to this rank's share before anything is quantised or packed, so on
    several ranks the shapes below are smaller in that dimension.
    """

    def matrix(self, parts: Sequence[Part], columns: int) -> Weight:
        """[sum of rows, columns], the weight of a linear layer, which may be quantised."""

    def alike(self, parts: Sequence[Part]) -> bool:
        """Whether these parts have the same precision, so that they can be stacked."""

    def head(self, parts: Sequence[Part], columns: int) -> Weight:
        """[sum of rows, columns], the weight of an LM head; loading does not round it to 4 bits."""

    def table(self, parts: Sequence[Part], columns: int) -> DenseMatrix:
        """[sum of rows, columns], always dense in the model's dtype, for ops that slice it."""

    def embedding(self, parts: Sequence[Part], columns: int) -> Weight:
        """[sum of rows, columns], an embedding table; rows are looked up in the model's dtype."""

    def tied(self, table: Weight) -> Weight:
        """The weight of a tied LM head: the embedding `table` itself, or a quantised copy of it."""

    def vector(self, parts: Sequence[Part]) -> Tensor:
        """[sum of rows] in the model's dtype."""


class InvalidSizesError(ValueError):
    """Invalid sizes in a config; callers that know the config's file add its name."""


def require_positive(**values: float) -> None:
    """Raise InvalidSizesError, naming the first key whose value is not positive and finite."""
    for key, value in values.items():
        if not (value > 0 and isfinite(value)):
            raise InvalidSizesError(f'"{key}" must be above 0, not {value}')
