"""LoRA adapters (Hu et al. 2021): low-rank addends to the product of a matrix.

y += B (A x), with A [R, K] and B [N, R] of the row's adapter and R far below N and K. The factors
of all adapters are in slots of one size, so that their addresses are fixed for captured steps. Each
row names its slot, or -1 for none; the result of a row without an adapter is unchanged bit for bit.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LowRank:
    """The factors of one matrix [N, K], which may be several matrices (parts) stacked along N.

    `up` includes the adapters' scales. Factors beyond an adapter's rank are zeros.

    Attributes:
        down: [S, P R, K], the factors A of each slot, part by part.
        up: [S, R, N], the factors B, transposed.
        ends: the end (exclusive) of the rows of each of the P parts; the last one is N.
        packed: a backend's own form of the factors, by the backend's name.
    """

    down: Tensor
    up: Tensor
    ends: tuple[int, ...]
    packed: dict[str, object] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def empty(
        cls,
        slots: int,
        rank: int,
        ends: tuple[int, ...],
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "LowRank":
        """Slots filled with zeros."""
        return cls(
            torch.zeros((slots, len(ends) * rank, columns), dtype=dtype, device=device),
            torch.zeros((slots, rank, ends[-1]), dtype=dtype, device=device),
            ends,
        )

    @property
    def rank(self) -> int:
        """R, the maximum rank of an adapter."""
        return self.up.shape[1]

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + self.up.nbytes


@dataclass(frozen=True, eq=False)
class Adapted:
    """The adapters of the rows of one product.

    Attributes:
        slots: [T] int64, the slot of each row's adapter, or -1.
    """

    factors: LowRank
    slots: Tensor
