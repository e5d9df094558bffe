"""Four-bit integers with a scale, and optionally a zero, for each group of columns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from slipstream.kernels.formats.four_bits import FourBitMatrix
from slipstream.kernels.formats.int8 import CACHED_SLICE, ToInt8, to_nearest
from slipstream.kernels.formats.weight import Rounding, rounding_slices

GROUPS = (128, 32)  # supported group sizes, in columns, the larger first
_GROUPS_AT_ONCE = (1 << 15) - 1  # numbers that are rounded at a time on CPUs; see CACHED_SLICE
_LARGEST = 15  # of four bits
_MIDDLE = 8
# Factors of a group's scale, chosen by the squared error. At 1 the largest number is representable;
# a smaller scale clips it, but rounds the others in finer steps.
_CLIPS = (1.0, 0.9)
_HALF_EXPONENT, _HALF_MAX = 16, 65504.0  # the largest float16
_EXPONENTS = 126  # limits of float32 exponents
_FINITE = 1e38


@dataclass(frozen=True, eq=False)
class Int4Matrix(FourBitMatrix):
    """A weight [N, K] of four-bit integers q: (q - zero) * scale, a scale for each group.

    Attributes:
        values: [N, K / 2] uint8, two columns a byte, the even one in the lower half.
        scales: [N, K / group] float32; in each row, float16 numbers times one power of two.
        zeros: [N, K / group] uint8, from 0 to 15; None: 8 everywhere.
        group: columns of a group: a multiple of 32 that divides K.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int

    kept_on = frozenset({"cpu", "cuda"})

    @classmethod
    def stack(cls, weights: Sequence[Self]) -> "Int4Matrix":
        group = min(weight.group for weight in weights)
        parts = [weight.regrouped(group) for weight in weights]
        zeros: Tensor | None = None
        if any(part.zeros is not None for part in parts):
            zeros = torch.cat([part.own_zeros() for part in parts])
        values = torch.cat([part.values for part in parts])
        return Int4Matrix(values, torch.cat([part.scales for part in parts]), zeros, group)

    def regrouped(self, group: int) -> "Int4Matrix":
        """Split groups into smaller ones; `group` divides the present size."""
        times, zeros = self.group // group, self.zeros
        zeros = None if zeros is None else zeros.repeat_interleave(times, 1)
        return Int4Matrix(self.values, self.scales.repeat_interleave(times, 1), zeros, group)

    def own_zeros(self) -> Tensor:
        """The zeros [N, K / group] uint8, also if all of them are 8."""
        if self.zeros is None:
            return torch.full_like(self.scales, _MIDDLE, dtype=torch.uint8)
        return self.zeros

    def dequantised(self) -> Tensor:
        grouped = unpacked(self.values).float().view(*self.scales.shape, self.group)
        zeros = float(_MIDDLE) if self.zeros is None else self.zeros.float().unsqueeze(-1)
        return ((grouped - zeros) * self.scales.unsqueeze(-1)).flatten(1)


@dataclass(frozen=True)
class ToInt4(Rounding):
    """Rounds to an `Int4Matrix`, each number to the nearest integer times its group's scale.

    Backends that round with their own kernels give the same bits, since sums have a fixed order.

    Attributes:
        group: columns that share a scale, 32 or 128; must divide the number of columns.
        zeros: whether each group has a zero of its own (asymmetric), so that groups whose
            numbers are not centred use all 16 integers.
    """

    group: int
    zeros: bool = False

    weight = Int4Matrix
    bits = 4

    @property
    def words(self) -> str:
        zero = " and a zero" if self.zeros else ""
        return f"integers of 4 bits with a scale{zero} for each {self.group} columns"

    @property
    def bytes_per_number(self) -> float:
        return 0.5 + (torch.float32.itemsize + self.zeros) / self.group

    def for_columns(self, columns: int) -> Rounding:
        """Four bits, with the largest group that divides the columns; eight bits if none does."""
        fitting = [size for size in GROUPS if size <= self.group and columns % size == 0]
        return ToInt4(fitting[0], self.zeros) if fitting else ToInt8()

    def round(self, matrix: Tensor) -> Int4Matrix:
        rows, columns = matrix.shape
        shape, device = (rows, columns // self.group), matrix.device
        values = torch.empty((rows, columns // 2), dtype=torch.uint8, device=device)
        scales = torch.empty(shape, dtype=torch.float32, device=device)
        zeros = torch.empty(shape, dtype=torch.uint8, device=device) if self.zeros else None
        for part in rounding_slices(rows, columns, device, _GROUPS_AT_ONCE * self.group):
            values[part], scales[part], own = _some_rows_to_int4(
                matrix[part], self.group, self.zeros
            )
            if zeros is not None and own is not None:
                zeros[part] = own
        return Int4Matrix(values, scales, zeros, self.group)


def _some_rows_to_int4(
    matrix: Tensor, group: int, asymmetric: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """matrix [N, K] -> values, scales and zeros of an `Int4Matrix`."""
    rounding = _Groups(matrix, group)
    low, high = rounding.extremes()
    choices = _choices_with_zeros(low, high) if asymmetric else _choices(low, high)
    errors = rounding.errors(choices)
    better = torch.lt(errors[1], errors[0]).float()  # 0 or 1, for which lerp is exact
    (first, first_zeros), (second, second_zeros) = choices
    scales, zeros = half_scales(torch.lerp(first, second, better)), None
    if first_zeros is not None and second_zeros is not None:
        zeros = torch.lerp(first_zeros, second_zeros, better)
    return rounding.values(scales, zeros), scales, zeros


class _Groups:
    """The groups of a matrix, converted to float32 a few rows at a time, in a reused buffer.

    Args:
        matrix: [N, K].
        group: columns of each of the G groups of a row.
    """

    def __init__(self, matrix: Tensor, group: int) -> None:
        rows, columns = matrix.shape
        self._shape = (rows, columns // group)
        self._matrix = matrix.view(*self._shape, group)
        self._slices = rounding_slices(rows, columns, matrix.device, CACHED_SLICE)
        # Allocating memory for each slice would cost as much as the work itself.
        space = (3, self._slices[0].stop, columns // group, group)
        self._space = torch.empty(space, dtype=torch.float32, device=matrix.device)

    def extremes(self) -> tuple[Tensor, Tensor]:
        """The smallest and the largest number of each group, [N, G]."""
        low, high = self._per_group(2)
        for part, groups, _, _ in self._pieces():
            torch.amin(groups, -1, out=low[part])
            torch.amax(groups, -1, out=high[part])
        return low, high

    def errors(self, choices: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
        """[choices, N, G]: the norm of the rounding error with each choice of scales and zeros."""
        errors = self._per_group(len(choices))
        inverses = [_inverse(scales) for scales, _ in choices]
        for part, groups, scaled, error in self._pieces():
            for index, (_, zeros) in enumerate(choices):
                own = None if zeros is None else zeros[part]
                least = _divided(groups, inverses[index][part], own, scaled)
                to_nearest(scaled, out=error).clamp_(least, least + _LARGEST).sub_(scaled)
                torch.sqrt(_sums(error.square_()), out=errors[index, part])
        for error, (scales, _) in zip(errors, choices, strict=True):
            error.mul_(scales.abs())
        return errors

    def values(self, scales: Tensor, zeros: Tensor | None) -> Tensor:
        """[N, K / 2] uint8: `values` of an `Int4Matrix`."""
        rows, count = self._shape
        shape = (rows, count * self._matrix.shape[-1] // 2)
        values = torch.empty(shape, dtype=torch.uint8, device=self._matrix.device)
        inverse = _inverse(scales)
        for part, groups, scaled, _ in self._pieces():
            own = None if zeros is None else zeros[part]
            least = _divided(groups, inverse[part], own, scaled)
            # First to int8, to which torch converts several times faster than to uint8.
            integers = (
                to_nearest(scaled, out=scaled)
                .clamp_(least, least + _LARGEST)
                .to(torch.int8)
                .sub_(least)
            )
            values[part] = packed(integers.flatten(1))
        return values

    def _per_group(self, count: int) -> Tensor:
        shape = (count, *self._shape)
        return torch.empty(shape, dtype=torch.float32, device=self._matrix.device)

    def _pieces(self) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yields rows, their numbers [rows, G, group] float32, and two buffers of that shape."""
        for part in self._slices:
            stored = self._matrix[part]
            groups, scaled, error = self._space[:, : len(stored)]
            yield part, groups.copy_(stored), scaled, error


def _sums(numbers: Tensor) -> Tensor:
    """[..., a power of two] -> [...]: sums by adding halves repeatedly; overwrites its input."""
    while numbers.shape[-1] > 1:
        first, second = numbers.chunk(2, -1)
        numbers = first.add_(second)
    return numbers.squeeze(-1)


def _choices(low: Tensor, high: Tensor) -> list[tuple[Tensor, Tensor | None]]:
    """(scales, None) for each clip factor, for groups with these extremes."""
    # -8 has no positive counterpart: it represents the larger extreme, whatever its sign.
    extreme = torch.copysign(torch.maximum(-low, high), low + high)
    return [(extreme * (-clip / _MIDDLE), None) for clip in _CLIPS]


def _choices_with_zeros(low: Tensor, high: Tensor) -> list[tuple[Tensor, Tensor | None]]:
    """(scales, zeros) for each clip factor, for groups that need not be centred."""
    low, high = low.clamp_max(0), high.clamp_min(0)
    choices: list[tuple[Tensor, Tensor | None]] = []
    for clip in _CLIPS:
        half = (high - low).mul_(clip / 2)
        scales = half * (2 / _LARGEST)
        zeros = half.sub_((low + high) / 2).mul_(_inverse(scales))
        choices.append((scales, to_nearest(zeros, out=zeros).clamp_(0, _LARGEST)))
    return choices


def _inverse(scales: Tensor) -> Tensor:
    """1 / scales; large and finite for a scale of 0, whose group is all zeros."""
    return scales.reciprocal().clamp_(-_FINITE, _FINITE)


def _divided(groups: Tensor, inverse: Tensor, zeros: Tensor | None, out: Tensor) -> int:
    """Compute groups / scales + zeros; returns the smallest of the 16 integers to round to."""
    torch.mul(groups, inverse.unsqueeze(-1), out=out)
    if zeros is None:
        return -_MIDDLE
    out.add_(zeros.unsqueeze(-1))
    return 0


def packed(values: Tensor) -> Tensor:
    """[N, K], a four-bit integer per byte -> [N, K / 2] uint8, even columns in the lower halves."""
    pairs = values.view(torch.int16)
    return torch.bitwise_or(pairs, pairs >> 4).to(torch.int8).view(torch.uint8)


def half_scales(scales: Tensor) -> Tensor:
    """Round scales [N, G] float32 so that each row is float16 numbers times one power of two.

    Float16 or bfloat16 scales are unchanged, unless the scales of a row differ by a factor of more
    than 2 ** 30.
    """
    largest = scales.abs().amax(-1, keepdim=True)
    exponent = (_HALF_EXPONENT - torch.frexp(largest).exponent).clamp_(-_EXPONENTS, _EXPONENTS)
    power = torch.ldexp(torch.ones_like(largest), exponent)
    return (scales * power).clamp_(-_HALF_MAX, _HALF_MAX).half().float().div_(power)


def unpacked(values: Tensor) -> Tensor:
    """[N, K / 2] uint8, two integers per byte -> [N, K] uint8, lower halves first."""
    return torch.stack((values & 15, values >> 4), -1).flatten(-2)
