"""Rounding matrices to fewer bits, each number to the nearest that its scale allows.

Columns that round in their own way give the same numbers, bit for bit: whatever is summed has one
order.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from slipstream.kernels.forms import Rounding, ToFloat8, ToInt8
from slipstream.kernels.reference import dense, integers
from slipstream.kernels.reference.integers import to_nearest
from slipstream.kernels.table import Float8Matrix, Int4Matrix, Int8Matrix, Weight

_SLICE = 1 << 24  # numbers that are in float32 at once while they are rounded
# The same for what passes over them many times. Torch does not share so few among threads, which
# would wait for each other far longer than they work where others keep the machine busy.
_CACHED_SLICE = (1 << 15) - 1
_GROUPS_AT_ONCE = (1 << 15) - 1  # of which the same holds
_LARGEST = 15  # of four bits
_MIDDLE = 8
# A group's scale makes its largest number representable, or is this much smaller: the others then
# gain by finer steps what the largest loses. Chosen by the squared error.
_CLIPS = (1.0, 0.9)
_HALF_EXPONENT, _HALF_MAX = 16, 65504.0  # where float16 ends
_EXPONENTS = 126  # of float32, up and down
_FINITE = 1e38


def rounded(matrix: Tensor, form: Rounding) -> Weight:
    """[N, K] in this form; see `Ops.round`."""
    if isinstance(form, ToFloat8):
        return to_float8(matrix)
    if isinstance(form, ToInt8):
        return to_int8(matrix, form.rounds_input)
    return to_int4(matrix, form.group, form.zeros)


def to_float8(matrix: Tensor) -> Float8Matrix:
    """[N, K] in e4m3, each row scaled so that its largest number becomes the largest of e4m3."""
    values = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn, device=matrix.device)
    scales = torch.empty(len(matrix), dtype=torch.float32, device=matrix.device)
    for part in _slices(matrix, _SLICE):
        values[part], scales[part] = dense.round_rows(matrix[part])
    return Float8Matrix(values, scales)


def to_int8(matrix: Tensor, rounds_input: bool = False) -> Int8Matrix:
    """[N, K] in integers from -127 to 127, a scale a row."""
    values = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
    scales = torch.empty(len(matrix), dtype=torch.float32, device=matrix.device)
    for part in _slices(matrix, _CACHED_SLICE):
        values[part], scales[part] = integers.round_rows(matrix[part])
    return Int8Matrix(values, scales, rounds_input)


def to_int4(matrix: Tensor, group: int, asymmetric: bool = False) -> Int4Matrix:
    """[N, K] in four bits; K must be a multiple of `group`.

    Args:
        asymmetric: groups have zeros of their own, so that all 16 numbers are used where a group
            is not centred.
    """
    rows, columns = matrix.shape
    shape = (rows, columns // group)
    values = torch.empty((rows, columns // 2), dtype=torch.uint8, device=matrix.device)
    scales = torch.empty(shape, dtype=torch.float32, device=matrix.device)
    zeros = torch.empty(shape, dtype=torch.uint8, device=matrix.device) if asymmetric else None
    for part in _slices(matrix, _GROUPS_AT_ONCE * group):
        values[part], scales[part], own = _some_rows_to_int4(matrix[part], group, asymmetric)
        if zeros is not None and own is not None:
            zeros[part] = own
    return Int4Matrix(values, scales, zeros, group)


def _some_rows_to_int4(
    matrix: Tensor, group: int, asymmetric: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """[N, K] -> values, scales and zeros as an `Int4Matrix` has them."""
    rounding = _Groups(matrix, group)
    low, high = rounding.extremes()
    choices = _choices_with_zeros(low, high) if asymmetric else _choices(low, high)
    errors = rounding.errors(choices)
    better = torch.lt(errors[1], errors[0]).float()  # 0 or 1, where lerp is exact
    (first, first_zeros), (second, second_zeros) = choices
    scales, zeros = half_scales(torch.lerp(first, second, better)), None
    if first_zeros is not None and second_zeros is not None:
        zeros = torch.lerp(first_zeros, second_zeros, better)
    return rounding.values(scales, zeros), scales, zeros


class _Groups:
    """The groups of a matrix, some rows at a time in float32 and in one place to work in.

    Args:
        matrix: [N, K].
        group: columns of each of the G groups of a row.
    """

    def __init__(self, matrix: Tensor, group: int) -> None:
        rows, columns = matrix.shape
        self._shape = (rows, columns // group)
        self._matrix = matrix.view(*self._shape, group)
        self._slices = _slices(matrix, _CACHED_SLICE)
        # Fresh memory for each slice would cost as much as what is done in it.
        space = (3, self._slices[0].stop, columns // group, group)
        self._space = torch.empty(space, dtype=torch.float32, device=matrix.device)

    def extremes(self) -> tuple[Tensor, Tensor]:
        """The lowest and the highest number of each group, [N, G]."""
        low, high = self._per_group(2)
        for part, groups, _, _ in self._pieces():
            torch.amin(groups, -1, out=low[part])
            torch.amax(groups, -1, out=high[part])
        return low, high

    def errors(self, choices: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
        """[choices, N, G]: the norms of what is lost by scales and zeros."""
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
        """[N, K / 2] uint8, of an `Int4Matrix`."""
        rows, count = self._shape
        shape = (rows, count * self._matrix.shape[-1] // 2)
        values = torch.empty(shape, dtype=torch.uint8, device=self._matrix.device)
        inverse = _inverse(scales)
        for part, groups, scaled, _ in self._pieces():
            own = None if zeros is None else zeros[part]
            least = _divided(groups, inverse[part], own, scaled)
            # Bytes by way of int8, which torch converts to several times as fast as to uint8.
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
        """Rows, their numbers [rows, G, group] float32, and two places like them."""
        for part in self._slices:
            stored = self._matrix[part]
            groups, scaled, error = self._space[:, : len(stored)]
            yield part, groups.copy_(stored), scaled, error


def _sums(numbers: Tensor) -> Tensor:
    """[..., a power of two] -> [...]: halves are added until one number is left. Works in place."""
    while numbers.shape[-1] > 1:
        first, second = numbers.chunk(2, -1)
        numbers = first.add_(second)
    return numbers.squeeze(-1)


def _choices(low: Tensor, high: Tensor) -> list[tuple[Tensor, Tensor | None]]:
    """(scales, no zeros) for each clip of groups with these extremes."""
    # -8 has no counterpart: it stands for the larger extreme, whichever its sign is.
    extreme = torch.copysign(torch.maximum(-low, high), low + high)
    return [(extreme * (-clip / _MIDDLE), None) for clip in _CLIPS]


def _choices_with_zeros(low: Tensor, high: Tensor) -> list[tuple[Tensor, Tensor | None]]:
    """(scales, zeros) for each clip, of groups that lie anywhere around 0."""
    low, high = low.clamp_max(0), high.clamp_min(0)
    choices: list[tuple[Tensor, Tensor | None]] = []
    for clip in _CLIPS:
        half = (high - low).mul_(clip / 2)
        scales = half * (2 / _LARGEST)
        zeros = half.sub_((low + high) / 2).mul_(_inverse(scales))
        choices.append((scales, to_nearest(zeros, out=zeros).clamp_(0, _LARGEST)))
    return choices


def _inverse(scales: Tensor) -> Tensor:
    """Large and finite where a scale is 0, whose group has nothing but zeros."""
    return scales.reciprocal().clamp_(-_FINITE, _FINITE)


def _divided(groups: Tensor, inverse: Tensor, zeros: Tensor | None, out: Tensor) -> int:
    """groups / scales + zeros; returns the least of the 16 integers that are rounded to."""
    torch.mul(groups, inverse.unsqueeze(-1), out=out)
    if zeros is None:
        return -_MIDDLE
    out.add_(zeros.unsqueeze(-1))
    return 0


def packed(values: Tensor) -> Tensor:
    """[N, K], one integer of four bits a byte -> [N, K / 2] uint8, the even column below."""
    pairs = values.view(torch.int16)
    return torch.bitwise_or(pairs, pairs >> 4).to(torch.int8).view(torch.uint8)


def half_scales(scales: Tensor) -> Tensor:
    """[N, G] float32, each rounded so that a row is float16 numbers times one power of two.

    Scales that are float16 or bfloat16 already stay as they are, unless a row has some that are
    more than 2 ** 30 times as large as others.
    """
    largest = scales.abs().amax(-1, keepdim=True)
    exponent = (_HALF_EXPONENT - torch.frexp(largest).exponent).clamp_(-_EXPONENTS, _EXPONENTS)
    power = torch.ldexp(torch.ones_like(largest), exponent)
    return (scales * power).clamp_(-_HALF_MAX, _HALF_MAX).half().float().div_(power)


def _slices(matrix: Tensor, size: int) -> list[slice]:
    """Of rows, so that each has about `size` numbers."""
    step = max(1, size // matrix.shape[1])
    return [slice(start, start + step) for start in range(0, len(matrix), step)]
