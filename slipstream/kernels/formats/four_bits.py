"""The base of formats with four bits a number and a scale for each group of columns."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.core.errors import UsageError
from slipstream.kernels.formats.weight import Weight, chosen_rows


class FourBitMatrix(Weight):
    """A weight [N, K]; subclasses are dataclasses whose tensors all have N rows.

    Attributes:
        values: [N, K / 2] uint8, two columns a byte, the even one in the lower half.
        group: columns that share a scale. Other tensors with two dimensions are [N, K / group].
    """

    values: Tensor
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], 2 * self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(it.nbytes for it in vars(self).values() if isinstance(it, Tensor))

    def select(self, index: Tensor) -> Self:
        return self._each(lambda tensor: chosen_rows(tensor, index))

    def rows(self, start: int, stop: int | None = None) -> Self:
        return self._each(lambda tensor: tensor[start:stop])

    def to(self, device: torch.device) -> Self:
        return self._each(lambda tensor: tensor.to(device))

    def columns(self, start: int, stop: int) -> Self:
        if start % self.group or stop % self.group:
            raise UsageError(
                f"four-bit weights in groups of {self.group} columns cannot be cut between columns "
                f"{start} and {stop}; use a number of ranks whose shares are whole groups"
            )
        return self._each_in_columns(
            lambda tensor, size: tensor[:, start // size : stop // size].contiguous()
        )

    def widened(self, columns: int) -> Self:
        more = columns - self.shape[1]  # new groups have scales of zero
        return self._each_in_columns(lambda tensor, size: pad(tensor, (0, more // size)))

    def _each_in_columns(self, change: Callable[[Tensor, int], Tensor]) -> Self:
        """`change` gets each tensor with columns, and how many of the K columns each represents."""

        def changed(tensor: Tensor) -> Tensor:
            size = 2 if tensor is self.values else self.group
            return tensor if tensor.dim() < 2 else change(tensor, size)

        return self._each(changed)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        found = vars(self).items()
        changed = {name: change(it) if isinstance(it, Tensor) else it for name, it in found}
        return type(self)(**changed)
