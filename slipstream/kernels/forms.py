"""What matrices are rounded to. The matrices themselves: `kernels/table.py`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ToFloat8:
    """Rounding to a `Float8Matrix`."""


@dataclass(frozen=True)
class ToInt8:
    """Rounding to an `Int8Matrix`.

    Attributes:
        rounds_input: of that matrix.
    """

    rounds_input: bool = False


@dataclass(frozen=True)
class ToInt4:
    """Rounding to an `Int4Matrix`.

    Attributes:
        group: columns that share a scale, 32 or 128; it must divide those of the matrix.
        zeros: whether groups have zeros of their own, so that all 16 numbers are used where a group
            is not centred.
    """

    group: int
    zeros: bool = False


Rounding = ToFloat8 | ToInt8 | ToInt4
