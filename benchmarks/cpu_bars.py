"""The bars that decoding on a CPU has to reach, and whether a figure does."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """One bar and the measured value.

    Attributes:
        value: measured; None where it was not.
        limit: the worst value that reaches the bar.
        at_least: larger values are better.
    """

    title: str
    value: float | None
    limit: float | None
    unit: str = ""
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None if that is unknown."""
        if self.value is None or self.limit is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def line(self) -> str:
        """The bar as a line of text."""
        word = {True: "met", False: "MISSED", None: "not measured"}[self.met]
        unit = f" {self.unit}" if self.unit else ""
        value = "-" if self.value is None else f"{self.value:.3g}{unit}"
        sign = ">=" if self.at_least else "<="
        limit = "-" if self.limit is None else f"{sign} {self.limit:.3g}{unit}"
        return f"{word:12}  {value:>14}  {limit:>14}  {self.title}"

    def document(self) -> dict[str, object]:
        """The bar as JSON data."""
        return {
            "bar": self.title,
            "value": self.value,
            "limit": self.limit,
            "at_least": self.at_least,
            "unit": self.unit,
            "met": self.met,
        }


def ratio(value: float | None, other: float | None) -> float | None:
    """value / other, where both were measured."""
    return value / other if value is not None and other else None


def best(values: Iterable[float | None]) -> float | None:
    """The least of those that were measured."""
    return min((value for value in values if value is not None), default=None)


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns as wide as their widest entry; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            text.ljust(width) if place == 0 else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
