"""Experts that data parallel ranks share; each rank holds all else whole, for its own requests.

Every rank has a share of the columns of every expert, as under tensor parallelism, so that all
ranks do equal work whatever the router chooses. In a mixture, each rank gathers the rows of all
ranks, computes its partial results for them, and gets the others' partial results for its own rows.
So all ranks must take part in each pass, with equal numbers of rows; `ExpertPool.agree` finds that
number.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor
from torch.nn.functional import pad

from slipstream.core.errors import OtherRankError
from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.ops import Ops
from slipstream.layers.parameters import ParameterSource, Part, Share

_FAILED = 1 << 40  # sent instead of a number of rows


class PooledExperts(Protocol):
    """A mixture whose experts are in a pool."""

    def assist(self, ops: Ops, num_rows: int) -> None:
        """Compute this rank's share for the rows of others, without rows of its own."""


class ExpertPool:
    """The ranks that share the experts of a network.

    Args:
        share: this rank's share of the experts.
        source: cuts experts to that share.
    """

    def __init__(self, share: Share, source: ParameterSource) -> None:
        self.share, self.source = share, source
        self._mixtures: list[PooledExperts] = []
        self._awaits = False

    @property
    def size(self) -> int:
        return self.share.size

    def join(self, mixture: PooledExperts) -> None:
        """Add a mixture; they are added in the order in which a pass runs them."""
        self._mixtures.append(mixture)

    def begin_step(self, agrees: bool) -> None:
        """Begin a step; `agrees`: all ranks will call `agree` in it."""
        self._awaits = agrees

    def agree(self, num_rows: int) -> int:
        """The largest of the ranks' numbers of rows; the host waits for it.

        Raises:
            OtherRankError: a rank failed before it called this.
        """
        self._awaits = False
        found = -self.share.least(-num_rows)
        if found == _FAILED:
            raise OtherRankError("another process could not do its part of this step")
        return found

    def break_off(self) -> None:
        """Report that this rank failed, so that ranks that wait in `agree` fail too."""
        if self._awaits:
            self._awaits = False
            self.share.least(-_FAILED)

    def gather(self, rows: Tensor, num_rows: int) -> Tensor:
        """rows [T, H] of each rank -> [ranks num_rows, H], each rank's padded with zeros."""
        assert self.share.stack is not None, "there are other ranks"
        return self.share.stack(pad(rows, (0, 0, 0, num_rows - len(rows)))).flatten(0, 1)

    def own(self, partial: Tensor, count: int, sums_addends: bool) -> Tensor:
        """Partial results [ranks num_rows, H] for all rows -> the sum of all ranks' for the first
        `count` of this rank's, as an addend of the stream.

        Args:
            sums_addends: see `Ops`; if set, the result is the stack of them, in the order of ranks.
        """
        assert self.share.all_to_all is not None, "there are other ranks"
        parts = self.share.all_to_all(partial.view(self.size, -1, partial.shape[-1]))[:, :count]
        return parts if sums_addends else in_order(parts)

    def assist(self, ops: Ops, num_rows: int) -> None:
        """Compute this rank's share in a pass of `num_rows` rows, without rows of its own."""
        for mixture in self._mixtures:
            mixture.assist(ops, num_rows)


def in_order(parts: Tensor) -> Tensor:
    """[ranks, T, H] -> their sum [T, H] in the order of the ranks, in float32, rounded once."""
    total = parts[0].float()
    for other in parts[1:]:
        total = total + other
    return total.to(parts.dtype)


class Unsplit:
    """Makes parameters in full from a source that cuts them to a rank's share."""

    def __init__(self, source: ParameterSource) -> None:
        self._source = source

    def matrix(self, parts: Sequence[Part], columns: int) -> Weight:
        return self._source.matrix(_whole(parts), columns)

    def alike(self, parts: Sequence[Part]) -> bool:
        return self._source.alike(parts)

    def head(self, parts: Sequence[Part], columns: int) -> Weight:
        return self._source.head(_whole(parts), columns)

    def table(self, parts: Sequence[Part], columns: int) -> DenseMatrix:
        return self._source.table(_whole(parts), columns)

    def embedding(self, parts: Sequence[Part], columns: int) -> Weight:
        return self._source.embedding(_whole(parts), columns)

    def tied(self, table: Weight) -> Weight:
        return self._source.tied(table)

    def vector(self, parts: Sequence[Part]) -> Tensor:
        return self._source.vector(_whole(parts))


def _whole(parts: Sequence[Part]) -> list[Part]:
    return [replace(part, split=None) for part in parts]
