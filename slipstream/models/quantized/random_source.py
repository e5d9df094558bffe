"""Random weights rounded to what a quantization_config says that a checkpoint stores."""

from collections.abc import Collection, Sequence

from torch import Tensor

from slipstream.kernels.formats.dense import DenseMatrix
from slipstream.kernels.formats.weight import Rounding, Weight
from slipstream.layers.parameters import Part
from slipstream.models.parameter_sources import TensorSource
from slipstream.models.quantized.module import StoredQuantization
from slipstream.models.quantized.source import whole_numbers


class RandomQuantizedSource:
    """A `TensorSource` whose matrices have the forms of a quantised checkpoint.

    Args:
        tensors: makes the numbers that are rounded.
        kept: classes of the matrices that stay what they are rounded to; others become floats.
    """

    def __init__(
        self, tensors: TensorSource, stored: StoredQuantization, kept: Collection[type[Weight]]
    ) -> None:
        self._tensors, self._stored, self._kept = tensors, stored, kept

    def matrix(self, parts: Sequence[Part], columns: int) -> Tensor:
        return self._tensors.matrix(parts, columns)

    def vector(self, parts: Sequence[Part]) -> Tensor:
        return self._tensors.vector(parts)

    def weight(self, parts: Sequence[Part], columns: int) -> Weight:
        """[sum of rows, columns], a factor of products."""
        numbers = self._tensors.matrix(parts, columns)
        form = stored_rounding(self._stored, parts[0].name, numbers.shape[1])
        if form is None:
            return DenseMatrix(numbers)
        rounded = form.round(numbers)
        if type(rounded) in self._kept:
            return rounded
        return DenseMatrix(whole_numbers(rounded, numbers.dtype, numbers.device))

    def alike(self, parts: Sequence[Part]) -> bool:
        """See `ParameterSource`."""
        return len({self._stored.rounding(_module(part.name)) for part in parts}) == 1


def stored_rounding(stored: StoredQuantization, tensor: str, columns: int) -> Rounding | None:
    """What random numbers of a tensor of this name are rounded to; None: they stay."""
    form = stored.rounding(_module(tensor))
    return None if form is None else form.for_columns(columns)


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")
