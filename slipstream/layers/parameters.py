"""Where layers get their weights from."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Protocol

from torch import Tensor

from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.weight import Weight


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

    def matrix(self, parts: Sequence[Part], columns: int) -> Weight:
        """[sum of rows, columns], a factor of products, in the precision that they work in."""

    def head(self, parts: Sequence[Part], columns: int) -> Weight:
        """A matrix whose products are logits: four bits would be too few for it."""

    def table(self, parts: Sequence[Part], columns: int) -> DenseMatrix:
        """[sum of rows, columns] in the model's dtype, whose rows are looked up."""

    def tied(self, table: Weight) -> Weight:
        """The factor of products that has the numbers of a table; the table itself if it can be."""

    def vector(self, parts: Sequence[Part]) -> Tensor:
        """[sum of rows] in the model's dtype."""


class InvalidSizesError(ValueError):
    """Numbers of a config that no network can have; whoever knows the file says so to the user."""


def require_positive(**values: float) -> None:
    """Raise InvalidSizesError naming the first key whose value is not above 0 and finite."""
    for key, value in values.items():
        if not (value > 0 and isfinite(value)):
            raise InvalidSizesError(f'"{key}" must be above 0, not {value}')
