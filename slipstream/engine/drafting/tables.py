"""Piecewise linear functions that are learnt online from noisy values."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from math import inf

_MOST = 1e6  # of what files hold, in seconds and in rows
LEAST = 1e-7  # seconds, so that relative errors exist
_NEAR = 1 / 24  # relative distance within which a knot stands for other places
_RECENT = 11  # a knot follows the median of this many values
_OLD, _KEPT = 128, 2  # a knot without an update in so many steps keeps so many values
GAIN, _FAR_GAIN = 0.1, 0.5  # step sizes: close to the median, and farther off than `_FAR`
_FAR = 0.08
_SLOPE_GAIN = 0.03
_MEMORY = 0.02  # weight of the latest value in a slope's moving averages


class Knot:
    """A number that follows the median of noisy observations."""

    def __init__(self, value: float) -> None:
        self.value = value
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._updated = self._num_updates = 0

    def set(self, value: float) -> None:
        """Set it to a value that was measured carefully."""
        self.value = value
        self._recent.clear()
        self._recent.extend([value] * (_RECENT // 2))

    @property
    def is_settled(self) -> bool:
        """Whether it has had many values lately."""
        return self._num_updates > _RECENT

    def visit(self, step: int) -> None:
        """Called before each update, with the number of the step."""
        if step - self._updated > _OLD:  # what it knows may be wrong: learn fast
            while len(self._recent) > _KEPT:
                self._recent.popleft()
            self._num_updates = 0
        self._updated = step
        self._num_updates += 1

    def update(self, value: float, most_gain: float = _FAR_GAIN) -> float:
        """Add an observation; returns by how much the knot changed, relative to its old value."""
        self._recent.append(value)
        values = sorted(self._recent)
        off = values[(len(values) - 1) // 2] - self.value  # of two the lower: disturbances add
        before = max(abs(self.value), LEAST)
        if len(values) == 1:  # the first observation
            self.value += off
            return abs(off) / before
        gain = GAIN if abs(off) <= _FAR * before else min(_FAR_GAIN, most_gain)
        self.value += gain * off
        return abs(gain * off) / before


def finite(value: object, least: float = -_MOST, most: float = _MOST) -> float:
    """A number from a file; raises ValueError if predictions would never recover from it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ValueError(f"{value!r} is not a cost")
    return float(value)


def _place(value: object) -> int:
    return int(finite(value, least=0.0))


def _around(places: Sequence[int], place: int) -> Sequence[tuple[int, float]]:
    """The indices of the rising `places` on both sides of a place, with the weights of linear
    interpolation. Behind the last one it extrapolates by the line through the last and the one at
    half its place, so that noise is not magnified."""
    index = bisect_left(places, place)
    if index < len(places) and (places[index] == place or index == 0):
        return ((index, 1.0),)
    low = index - 1
    if index == len(places):
        if low < 1:
            return ((low, 1.0),) if places else ()
        index, low = low, min(low - 1, bisect_left(places, places[low] // 2))
    share = (place - places[low]) / (places[index] - places[low])
    return ((low, 1 - share), (index, share))


def _is_near(knot: int, place: int) -> bool:
    return abs(knot - place) <= place * _NEAR


class Table:
    """A function of a whole number, linear between its knots and beyond the last.

    Args:
        rises: the function is 0 at 0 and never falls. If a knot is above a later one, the later one
            counts: the first was probably measured under other load, and a choice that seems too
            expensive is not tried again and so not corrected.
    """

    def __init__(self, rises: bool = False) -> None:
        self.places = [0] if rises else []
        self._knots = [Knot(0.0)] if rises else []
        self._rises = rises

    def __call__(self, place: int) -> float:
        total = 0.0
        for index, weight in _around(self.places, place):
            total += weight * self._knots[index].value
        if self._rises:
            for knot in self._knots[bisect_left(self.places, place) :]:
                if knot.value < total:
                    total = knot.value
        return total

    def items(self) -> list[tuple[int, float]]:
        """The places of its knots and the values there."""
        return [(place, self(place)) for place in self.places]

    def restore(self, items: Iterable[tuple[object, object]]) -> None:
        """Add what `items` returned; raises TypeError or ValueError for other data."""
        for place, value in items:
            self.knot(_place(place)).set(finite(value))

    def knot(self, place: int) -> Knot:
        """The knot for a place; a new one if none is near."""
        index = bisect_left(self.places, place)
        for near in (index, index - 1):
            if 0 <= near < len(self.places) and _is_near(self.places[near], place):
                return self._knots[near]
        self._knots.insert(index, Knot(self(place)))
        self.places.insert(index, place)
        return self._knots[index]


class Grid:
    """A function of requests and width: tables over widths for some numbers of requests."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.tables: list[Table] = []

    def __call__(self, requests: int, width: int) -> float:
        total = 0.0
        for index, weight in _around(self.counts, requests):
            total += weight * self.tables[index](width)
        return total

    def between(self, column: Sequence[float], requests: int) -> float:
        """The value for a number of requests, by those of all tables at a width."""
        return sum([weight * column[index] for index, weight in _around(self.counts, requests)])

    def items(self) -> list[tuple[int, list[tuple[int, float]]]]:
        """The numbers of requests and the items of their tables."""
        tables = zip(self.counts, self.tables, strict=True)
        return [(count, table.items()) for count, table in tables]

    def restore(self, items: Iterable[tuple[object, Iterable[tuple[object, object]]]]) -> None:
        """Add what `items` returned; raises TypeError or ValueError for other data."""
        for count, table in items:
            for width, value in table:
                self.knot(_place(count), _place(width)).set(finite(value))

    def knot(self, requests: int, width: int) -> Knot:
        """The knot for these; a new one if none is near."""
        index = bisect_left(self.counts, requests)
        for near in (index, index - 1):
            if 0 <= near < len(self.counts) and _is_near(self.counts[near], requests):
                return self.tables[near].knot(width)
        table = Table(rises=True)
        for place in {place for other in self.tables for place in other.places if place}:
            table.knot(place).set(self(requests, place))
        self.counts.insert(index, requests)
        self.tables.insert(index, table)
        return table.knot(width)


class Slope:
    """Seconds per unit of an amount, learnt from prediction errors by how they vary with it.

    Args:
        least_spread: amounts that differ by less than this have little effect.
    """

    def __init__(self, least_spread: float) -> None:
        self.value, self._least_spread = 0.0, least_spread
        # Whether it was measured. If not it may be anything: tables take in what steps share.
        self.is_measured = False
        self._least, self._most = 0.0, inf
        self._mean = self._variance = 0.0
        self._count = 0

    def set(self, value: float) -> None:
        """Set it to a value that was measured in pairs of steps. It stays within a factor of four,
        since a machine that becomes slower while contexts grow seems to have a larger one."""
        self.value, self.is_measured = value, True
        if value > 0:
            self._least, self._most = value / 4, 4 * value

    def learn(self, amount: float, error: float) -> None:
        """Learn from a step with this amount, which took `error` longer than predicted."""
        self._count += 1
        memory = max(_MEMORY, 1 / self._count)
        off = amount - self._mean
        self._mean += memory * off
        self._variance += memory * (off * off - self._variance)
        spread = max(self._least_spread, self._mean / 8)
        step = _SLOPE_GAIN * error * off / (self._variance + spread * spread + off * off)
        self.value = min(self._most, max(self._least, self.value + step))
