"""The base of formats with four bits a number and a scale for each group of columns."""

from collections.abc import Callable
from typing import Self

from torch import Tensor
from torch.nn.functional import pad

from slipstream.core.errors import UsageError
from slipstream.kernels.formats.weight import RowWise


class FourBitMatrix(RowWise):
    """A weight [N, K] in groups of columns.

    Attributes:
        values: [N, K / 2] uint8, two columns a byte, the even one in the lower half.
        group: columns that share a scale. Other tensors with two dimensions are [N, K / group].
    """

    values: Tensor
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], 2 * self.values.shape[1]

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
