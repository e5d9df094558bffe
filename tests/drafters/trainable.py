"""Networks whose parameters are to be trained."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.weight import Weight
from slipstream.layers.parameters import Part


class Trainable:
    """Parameters by their published names, of which gradients are wanted."""

    def __init__(self, stored: Mapping[str, Tensor]) -> None:
        self.stored = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
        self.parameters: dict[str, Tensor] = {}

    def matrix(self, parts: Sequence[Part], columns: int) -> DenseMatrix:
        return DenseMatrix(self.vector(parts))

    def head(self, parts: Sequence[Part], columns: int) -> DenseMatrix:
        return self.matrix(parts, columns)

    def table(self, parts: Sequence[Part], columns: int) -> DenseMatrix:
        return self.matrix(parts, columns)

    def embedding(self, parts: Sequence[Part], columns: int) -> DenseMatrix:
        return self.table(parts, columns)

    def alike(self, parts: Sequence[Part]) -> bool:
        return True

    def tied(self, table: Weight) -> Weight:
        return table

    def vector(self, parts: Sequence[Part]) -> Tensor:
        return torch.cat([self._parameter(part.name) for part in parts])

    def _parameter(self, name: str) -> Tensor:
        short = name.removeprefix("model.")
        return self.parameters.setdefault(short, self.stored[short].requires_grad_())
