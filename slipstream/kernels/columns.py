"""The tokens of the columns of logits, and reductions over whole rows.

If ranks split the vocabulary, each holds some columns of every row. A reduction over a whole row
(maximum, sum, argmax) is first computed over a rank's own columns; then the ranks exchange the
results, a few numbers a row, and combine them in the order of the ranks. So all ranks get equal
bits, and whole rows are never gathered.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
Peaks = tuple[Tensor, Tensor]  # [N, 1], the largest number of each row, and [N] int64, its token


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns that this rank holds; all ranks hold equally many.

    Attributes:
        rank: of `num_ranks`, which hold consecutive parts of the vocabulary.
        gather: all-gather along the last dimension, [T, n] -> [T, num_ranks n]; None if one rank
            holds all columns.
    """

    rank: int = 0
    num_ranks: int = 1
    gather: Callable[[Tensor], Tensor] | None = None

    def first(self, rows: Tensor) -> int:
        """The token of the first column of rows [N, v]."""
        return self.rank * rows.shape[-1]

    def tokens(self, rows: Tensor) -> Tensor:
        """[v] int64, the tokens of the columns of rows [N, v]."""
        first = self.first(rows)
        return torch.arange(first, first + rows.shape[-1], device=rows.device)

    def own(self, whole: Tensor, rows: Tensor) -> Tensor:
        """The part of `whole` [..., V or fewer] for the columns of rows [N, v]; a view."""
        if self.gather is None:
            return whole
        first = self.first(rows)
        return whole[..., first : first + rows.shape[-1]]

    def places(self, tokens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The column of each token in rows [N, v], and whether this rank has it (otherwise the
        column is arbitrary). Tokens may have any shape."""
        place = tokens - self.first(rows)
        is_own = (place >= 0) & (place < rows.shape[-1])
        return torch.where(is_own, place, 0), is_own

    def joined(self, found: Tensor) -> Tensor:
        """[...] of each rank -> [num_ranks, ...]."""
        if self.gather is None:
            return found.unsqueeze(0)
        return self.gather(found.reshape(1, -1)).view(self.num_ranks, *found.shape)

    def combined(self, found: Tensor) -> Tensor:
        """The sum of all ranks' values, in the order of the ranks."""
        if self.gather is None:
            return found
        first, *others = self.joined(found).unbind(0)
        return sum(others, first)

    def total(self, rows: Tensor) -> Tensor:
        """[N, 1], the sum of each row [N, v]."""
        return self.combined(rows.sum(-1, keepdim=True))

    def largest(self, rows: Tensor) -> Tensor:
        """[N, 1], the largest number of each row [N, v]; NaN where there is one."""
        largest = rows.amax(-1, keepdim=True)
        return largest if self.gather is None else self.joined(largest).amax(0)

    def best(self, rows: Tensor) -> Tensor:
        """[N] int64, the token of the largest number of each row [N, v], the first among equals."""
        return rows.argmax(-1) if self.gather is None else self.peaks(rows)[1]

    def peaks(self, rows: Tensor) -> Peaks:
        """`largest` and `best` of rows [N, v], by one pass and one exchange."""
        if self.gather is None:
            return self.largest(rows), self.best(rows)
        values, places = rows.max(-1)
        kind = _BITS[values.dtype]
        tokens = (places + self.first(rows)).to(kind)
        bits, tokens = self.joined(torch.stack((values.view(kind), tokens))).unbind(1)
        values = bits.contiguous().view(rows.dtype)
        best = values.argmax(0, keepdim=True)
        return values.gather(0, best).T, tokens.gather(0, best).squeeze(0).to(torch.int64)

    def log_total(self, rows: Tensor) -> Tensor:
        """[N, 1], the logarithm of the sum of the exponentials of each row [N, v]."""
        if self.gather is None:
            return rows.logsumexp(-1, keepdim=True)
        largest = self.largest(rows)
        return self.total((rows - largest).exp_()).log_() + largest

    def confidence(self, rows: Tensor, largest: Tensor) -> Tensor:
        """[N], the largest probability of each row [N, v] of logits with these `largest`."""
        if self.gather is None:
            return rows.softmax(-1).amax(-1)
        return self.total((rows - largest).exp_()).reciprocal_().squeeze(-1)

    def at(self, rows: Tensor, index: Tensor, tokens: Tensor) -> Tensor:
        """The numbers of legal tokens in the rows `index` of rows [N, v]; both have one shape."""
        places, is_own = self.places(tokens, rows)
        return self.combined(rows[index, places].masked_fill(~is_own, 0.0))

    def top(self, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` largest numbers of each row [N, v], falling, and their tokens, both
        [N, count]; fewer where there are fewer columns."""
        if self.gather is None:
            found = torch.topk(rows, min(count, rows.shape[-1]))
            return found.values, found.indices
        mine = torch.topk(rows, min(count, rows.shape[-1]))
        # [num_ranks, N, c]: the largest of all are among the largest of each.
        values = self.joined(mine.values).transpose(0, 1).flatten(1)
        tokens = self.joined(mine.indices + self.first(rows)).transpose(0, 1).flatten(1)
        best = torch.topk(values, min(count, values.shape[-1]))
        return best.values, tokens.gather(-1, best.indices)

    def top_values(self, rows: Tensor, count: int) -> Tensor:
        """The values of `top`, without their tokens."""
        values = torch.topk(rows, min(count, rows.shape[-1])).values
        if self.gather is None:
            return values
        values = self.joined(values).transpose(0, 1).flatten(1)
        return torch.topk(values, min(count, values.shape[-1])).values


ALL_COLUMNS: Final = Columns()
"""All tokens of the vocabulary on one rank."""
