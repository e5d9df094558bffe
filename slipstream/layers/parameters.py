"""Where layers get their weights from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Part:
    """Some rows of a parameter: the name they have in a checkpoint and how many they are."""

    name: str
    rows: int


class ParameterSource(Protocol):
    """Makes parameters, already filled: from a checkpoint, or at random.

    A parameter may be several tensors of the checkpoint stacked along the first axis, each read
    straight into its place.
    """

    def matrix(self, parts: Sequence[Part], columns: int) -> Tensor:
        """[sum of rows, columns] in the model's dtype."""

    def vector(self, parts: Sequence[Part]) -> Tensor:
        """[sum of rows] in the model's dtype."""
