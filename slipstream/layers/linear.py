"""Matrix layers, named by how tensor parallelism would split them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from slipstream.kernels.formats.weight import Weight
from slipstream.kernels.stack_parts import Product
from slipstream.layers.parameters import ParameterSource, Part


@dataclass(frozen=True, eq=False)
class Linear:
    """y = x W^T + b, W [rows, columns]."""

    weight: Weight
    bias: Tensor | None

    @property
    def product(self) -> Product:
        """As ops of several products take it."""
        return self.weight, self.bias


def column_linear(
    source: ParameterSource, parts: Sequence[Part], columns: int, bias: bool
) -> Linear:
    """Several checkpoint tensors stacked into one W. The rows of each would be split over ranks;
    each rank keeps its share of y."""
    return _linear(source, parts, columns, bias)


def row_linear(source: ParameterSource, name: str, rows: int, columns: int, bias: bool) -> Linear:
    """The columns of W would be split over ranks; the ranks' y are summed, the bias added once."""
    return _linear(source, [Part(name, rows)], columns, bias)


def _linear(source: ParameterSource, parts: Sequence[Part], columns: int, bias: bool) -> Linear:
    weight = source.matrix([Part(f"{part.name}.weight", part.rows) for part in parts], columns)
    if not bias:
        return Linear(weight, None)
    return Linear(weight, source.vector([Part(f"{part.name}.bias", part.rows) for part in parts]))
