"""Matrix layers, named by how tensor parallelism would split them."""

from collections.abc import Sequence

from torch import Tensor

from slipstream.kernels.table import Ops
from slipstream.layers.parameters import ParameterSource, Part


class Linear:
    """y = x W^T + b. Several checkpoint tensors may be stacked into one W."""

    def __init__(
        self, ops: Ops, source: ParameterSource, names: Sequence[Part], columns: int, bias: bool
    ) -> None:
        self._linear = ops.linear
        self.weight = source.matrix([Part(f"{p.name}.weight", p.rows) for p in names], columns)
        self.bias = source.vector([Part(f"{p.name}.bias", p.rows) for p in names]) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, columns] -> [T, rows]."""
        return self._linear(x, self.weight, self.bias)


class ColumnLinear(Linear):
    """The rows of each part of W would be split over ranks; each rank keeps its share of y."""


class RowLinear(Linear):
    """The columns of W would be split over ranks; the ranks' y are summed, the bias added once."""
