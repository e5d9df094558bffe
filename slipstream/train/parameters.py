"""The trainable parameters of a drafter, by their names in its checkpoint."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.weight import Weight
from slipstream.layers.parameters import Part
from slipstream.models.parameter_sources import TensorSource

_STD = 0.02


class RandomSource:
    """Random matrices, norm weights of ones, biases of zeros."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, parts: Sequence[Part], columns: int) -> Tensor:
        rows = sum(part.rows for part in parts)
        # Drawn on the host, so that a seed gives the same numbers on all devices.
        drawn = torch.empty(rows, columns).normal_(std=_STD, generator=self._generator)
        return drawn.to(self._device)

    def vector(self, parts: Sequence[Part]) -> Tensor:
        name, rows = parts[0].name, sum(part.rows for part in parts)
        value = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        return torch.full((rows,), value, device=self._device)


@dataclass(frozen=True, eq=False)
class Parameter:
    """One trained tensor, which may stack several tensors of the checkpoint."""

    parts: tuple[Part, ...]
    tensor: Tensor

    @property
    def name(self) -> str:
        """The name of its first part."""
        return self.parts[0].name


class Trainable:
    """A parameter source that registers all parameters it creates as trainable.

    Args:
        tensors: source of the initial values, in float32.
    """

    def __init__(self, tensors: TensorSource) -> None:
        self._tensors = tensors
        self.parameters: list[Parameter] = []

    def matrix(self, parts: Sequence[Part], columns: int) -> DenseMatrix:
        return DenseMatrix(self._collect(parts, self._tensors.matrix(parts, columns)))

    head = table = embedding = matrix

    def alike(self, parts: Sequence[Part]) -> bool:
        return True

    def tied(self, table: Weight) -> Weight:
        return table

    def vector(self, parts: Sequence[Part]) -> Tensor:
        return self._collect(parts, self._tensors.vector(parts))

    @property
    def num_parameters(self) -> int:
        return sum(parameter.tensor.numel() for parameter in self.parameters)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors of the checkpoint with their names, as detached views of the parameters."""
        for parameter in self.parameters:
            start = 0
            for part in parameter.parts:
                yield part.name, parameter.tensor.detach()[start : start + part.rows]
                start += part.rows

    def put(self, name: str, values: Tensor) -> None:
        """Set the values of one tensor of the checkpoint."""
        dict(self.named())[name].copy_(values)

    def add_identity(self, name: str, start: int) -> None:
        """Add the identity to the columns of a matrix [H, N] from `start` on."""
        matrix = dict(self.named())[name]
        width = len(matrix)
        matrix[:, start : start + width] += torch.eye(width, device=matrix.device)

    def _collect(self, parts: Sequence[Part], tensor: Tensor) -> Tensor:
        tensor.requires_grad_()
        self.parameters.append(Parameter(tuple(parts), tensor))
        return tensor
