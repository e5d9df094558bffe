"""The parameters of a drafter in training, under the names that they have in its checkpoint."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.layers.parameters import Part
from slipstream.models.parameter_sources import TensorSource

_STD = 0.02


class FreshSource:
    """Initial numbers of a network that has not learned anything.

    Every matrix has a generator of its own, seeded in the order in which they are asked for.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, parts: Sequence[Part], columns: int) -> Tensor:
        rows = sum(part.rows for part in parts)
        # Drawn on the host, so that a seed means the same on every device.
        drawn = torch.empty(rows, columns).normal_(std=_STD, generator=self._generator)
        return drawn.to(self._device)

    def vector(self, parts: Sequence[Part]) -> Tensor:
        rows = sum(part.rows for part in parts)
        return torch.full((rows,), _constant(parts[0].name), device=self._device)


def _constant(name: str) -> float:
    """Norms begin as those that change nothing, biases as none."""
    return 1.0 if "norm" in name and name.endswith("weight") else 0.0


@dataclass(frozen=True, eq=False)
class Parameter:
    """One tensor that is trained: several of the checkpoint, stacked."""

    parts: tuple[Part, ...]
    tensor: Tensor

    @property
    def name(self) -> str:
        """Of its first part."""
        return self.parts[0].name


class Trainable:
    """A parameter source that remembers what it gave, and lets it learn.

    Args:
        tensors: the initial numbers, in float32.
        frozen: names of tensors that stay as they are and are not exported.
    """

    def __init__(self, tensors: TensorSource) -> None:
        self._tensors = tensors
        self.parameters: list[Parameter] = []

    def matrix(self, parts: Sequence[Part], columns: int) -> Tensor:
        return self._keep(parts, self._tensors.matrix(parts, columns))

    def head(self, parts: Sequence[Part], columns: int) -> Tensor:
        return self.matrix(parts, columns)

    def table(self, parts: Sequence[Part], columns: int) -> Tensor:
        return self.matrix(parts, columns)

    def tied(self, table: Tensor) -> Tensor:
        return table

    def vector(self, parts: Sequence[Part]) -> Tensor:
        return self._keep(parts, self._tensors.vector(parts))

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the checkpoint by its name, detached."""
        for parameter in self.parameters:
            start = 0
            for part in parameter.parts:
                yield part.name, parameter.tensor.detach()[start : start + part.rows]
                start += part.rows

    def put(self, name: str, values: Tensor) -> None:
        """Begin one tensor of the checkpoint with these numbers."""
        for own, tensor in self.named():
            if own == name:
                tensor.copy_(values)
                return
        raise KeyError(name)

    def _keep(self, parts: Sequence[Part], tensor: Tensor) -> Tensor:
        tensor.requires_grad_()
        self.parameters.append(Parameter(tuple(parts), tensor))
        return tensor
