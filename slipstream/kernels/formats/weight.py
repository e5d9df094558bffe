"""The interface of weight formats. To add a format, add a file to this directory.

The products here are plain torch and define the correct result. A backend with its own kernels
packs the matrix (`Ops.pack`) or reads its tensors; no other code depends on how a weight is stored.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.core.errors import UsageError

# Weights that are converted to float32 or float64 at a time: few enough for a core's cache.
PRODUCT_SLICE = 1 << 19
# Numbers that are in float32 at a time during rounding: on a CPU few enough for a core's cache, on
# other devices enough to keep them busy.
_ROUNDED_ON_CPU, _ROUNDED = 1 << 17, 1 << 24


class Weight(ABC):
    """The weight W [N, K] of a linear layer y = x W^T.

    Attributes:
        floats: W, if it is unquantised; None for quantised formats.
        table_dtype: dtype of the rows that `look_up` returns; None if rows cannot be looked up.
        table_device: device of these rows.
        kept_on: types of devices that multiply quantised matrices in stored form; on others they
            are dequantised while loading.
        needs_float8: a GPU needs conversions of e4m3 in hardware for it.
        needs_float8_unpacked: the same, unless kernels have rearranged it (`Ops.pack`).
    """

    kept_on: ClassVar[frozenset[str]] = frozenset()
    needs_float8: ClassVar[bool] = False
    needs_float8_unpacked: ClassVar[bool] = False
    floats: Tensor | None = None
    table_dtype: torch.dtype | None = None
    table_device: torch.device = torch.device("cpu")

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(N, K)."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes in memory, scales included."""

    @abstractmethod
    def select(self, index: Tensor) -> "Weight":
        """Copy the rows `index` [n] int64, in this order."""

    @abstractmethod
    def rows(self, start: int, stop: int | None = None) -> "Weight":
        """Rows [start, stop), to the end if `stop` is None; a view if the layout allows it."""

    def columns(self, start: int, stop: int) -> "Weight":
        """Columns [start, stop).

        Raises:
            UsageError: the format cannot be cut there.
        """
        raise UsageError(f"{type(self).__name__} cannot be cut between columns {start} and {stop}")

    def widened(self, columns: int) -> "Weight":
        """Append columns of zeros, to `columns` in all; `Weight.columns` must allow a cut there."""
        raise AssertionError(f"{type(self).__name__} can be cut anywhere")

    @classmethod
    def stack(cls, weights: Sequence[Self]) -> "Weight | None":
        """Stack matrices vertically; None if their settings differ."""
        return None

    def dequantised(self) -> Tensor:
        """[N, K] float32."""
        raise TypeError(f"{type(self).__name__} does not give its numbers back")

    def to(self, device: torch.device) -> "Weight":
        """Move the matrix to `device`."""
        raise TypeError(f"{type(self).__name__} stays on its device")

    def logits(self, x: Tensor) -> Tensor:
        """x [T, K] -> x W^T [T, N] float32, without rounding the accumulator to a smaller dtype."""
        x = x.float()
        out = torch.empty(x.shape[0], self.shape[0], device=x.device)
        for part in row_slices(*self.shape, PRODUCT_SLICE):
            out[:, part] = F.linear(x, self.rows(part.start, part.stop).dequantised())
        return out

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K], bias [N] or None -> x W^T + bias, [T, N] in the dtype of x."""
        product = self.logits(x).to(x.dtype)
        return product if bias is None else product + bias

    def as_table(self, dtype: torch.dtype) -> "Weight | None":
        """This matrix as a table of rows in `dtype`; None for most quantised formats."""
        return None

    def look_up(self, index: Tensor) -> Tensor:
        """index [...] integers -> rows [..., K] in `table_dtype`."""
        raise TypeError(f"{type(self).__name__} is no table of rows")


class RowWise(Weight):
    """A weight [N, K]; subclasses are dataclasses whose tensors all have N rows."""

    @property
    def nbytes(self) -> int:
        return sum(it.nbytes for it in vars(self).values() if isinstance(it, Tensor))

    def select(self, index: Tensor) -> Self:
        return self._each(lambda tensor: chosen_rows(tensor, index))

    def rows(self, start: int, stop: int | None = None) -> Self:
        return self._each(lambda tensor: tensor[start:stop])

    def to(self, device: torch.device) -> Self:
        return self._each(lambda tensor: tensor.to(device))

    @classmethod
    def stack(cls, weights: Sequence[Self]) -> "Weight | None":
        fields = vars(weights[0])
        settings = [
            {name: it.dtype if isinstance(it, Tensor) else it for name, it in vars(each).items()}
            for each in weights
        ]
        if any(own != settings[0] for own in settings):
            return None
        tensors = [name for name, it in fields.items() if isinstance(it, Tensor)]
        joined = {name: joined_rows([vars(each)[name] for each in weights]) for name in tensors}
        return cls(**{**fields, **joined})

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        found = vars(self).items()
        changed = {name: change(it) if isinstance(it, Tensor) else it for name, it in found}
        return type(self)(**changed)


class RowScaled(RowWise):
    """A matrix with at most one scale for each row: W = values * scales[:, None].

    Attributes:
        values: [N, K].
        scales: [N] float32; None: all 1.
    """

    values: Tensor
    scales: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def columns(self, start: int, stop: int) -> Self:
        return self._each(lambda it: it[:, start:stop].contiguous() if it.dim() == 2 else it)

    def dequantised(self) -> Tensor:
        values = self.values.float()
        return values if self.scales is None else values * self.scales.unsqueeze(-1)


def chosen_rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Copy the rows `index` [n] of a tensor [N, ...] of any dtype."""
    return _bytes(tensor)[index].view(tensor.dtype)


def joined_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors [N, ...] of one dtype along their rows.

    The result is a view if they are adjacent in memory.
    """
    first = tensors[0]
    if all(_follows(after, before) for before, after in pairwise(tensors)):
        rows = sum(len(tensor) for tensor in tensors)
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    return torch.cat([_bytes(tensor) for tensor in tensors]).view(first.dtype)


def _follows(after: Tensor, before: Tensor) -> bool:
    """Whether a contiguous tensor begins where another one ends, in the same storage."""
    return (
        after.is_contiguous()
        and before.is_contiguous()
        and after.dtype == before.dtype
        and after.shape[1:] == before.shape[1:]
        and after.data_ptr() == before.data_ptr() + before.nbytes
        and after.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    )


def _bytes(values: Tensor) -> Tensor:
    """View float8 as bytes: not every device can index or concatenate float8."""
    return values.view(torch.uint8) if values.dtype.itemsize == 1 else values


class Rounding(ABC):
    """A quantisation method for matrices of floats.

    Attributes:
        weight: the class of quantised matrices.
        bits: bits of a number.
        words: a description of the format for users.
        is_for_gpus: GPUs have kernels for it.
    """

    weight: ClassVar[type[Weight]]
    bits: int
    is_for_gpus: bool = True

    @property
    @abstractmethod
    def words(self) -> str: ...

    @property
    def bytes_per_number(self) -> float:
        """Bytes of a number, including its share of group scales."""
        return self.bits / 8

    @abstractmethod
    def round(self, matrix: Tensor) -> Weight:
        """Quantise a matrix [N, K] of floats."""

    def for_columns(self, columns: int) -> "Rounding | None":
        """The method for matrices with this number of columns: this one, or a fallback.

        None: such matrices stay unquantised.
        """
        return self


def stacked(weights: Sequence[Weight]) -> Weight | None:
    """Stack matrices vertically; None if formats or settings differ."""
    first = weights[0]
    if len(weights) == 1:
        return first
    if any(type(weight) is not type(first) for weight in weights):
        return None
    return type(first).stack(weights)


def row_slices(num_rows: int, columns: int, size: int) -> list[slice]:
    """Slices of rows with about `size` numbers each."""
    step = max(1, size // columns)
    return [slice(start, start + step) for start in range(0, num_rows, step)]


def rounding_slices(
    num_rows: int, columns: int, device: torch.device, on_cpu: int = _ROUNDED_ON_CPU
) -> list[slice]:
    """Slices of rows to round at a time; on CPUs with about `on_cpu` numbers each."""
    return row_slices(num_rows, columns, on_cpu if device.type == "cpu" else _ROUNDED)
