"""Averages over many requests, from which new requests start: of each adapter, and of requests
without one.

An adapter may change the model so much that few of its tokens are accepted, and others of the same
engine may not. So each has its own averages. They belong to the adapter, not to its name: if it is
unloaded, they are dropped with its last request.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from slipstream.core.adapters import NamedAdapter
from slipstream.core.batch import NUM_BINS
from slipstream.core.request import Request

UNKNOWN = 0.75  # initial chance: optimistic, so that drafting is tried
# Number of results that the initial value counts as, and once the traffic has given MANY results.
PRIOR_TRIALS, KNOWN_TRIALS, MANY = 2, 6, 64
_BORROWED = KNOWN_TRIALS - PRIOR_TRIALS


def _confidences() -> list[float]:
    return [(place + 0.5) / NUM_BINS for place in range(NUM_BINS)]


@dataclass(slots=True, eq=False)
class Traffic:
    """The averages of requests with one adapter, or without.

    Attributes:
        chances: by position, from the first.
        num_results: number of results by position; beyond MANY it does not grow.
        rates: chance by confidence: entry i of n is for confidences of at least i / n. At first a
            confidence is taken for the chance itself.
        results_by_bin: number of results in each bin, up to a limit as well.
    """

    chances: list[float]
    num_results: list[int]
    rates: list[float] = field(default_factory=_confidences)
    results_by_bin: list[int] = field(default_factory=lambda: [0] * NUM_BINS)

    def scaled(self, factor: float) -> tuple[float, ...]:
        """The rates for a request with this factor."""
        if factor == 1.0:
            return tuple(self.rates)
        rates = [rate * factor for rate in self.rates]
        return tuple([rate if rate < 1.0 else 1.0 for rate in rates])

    def level(self, usual: "Traffic") -> float:
        """How many of its tokens are accepted for one that the rates of `usual` predict."""
        bins = [*zip(self.results_by_bin, self.rates, usual.rates, strict=True)]
        predicted = sum([count * rate for count, _, rate in bins])
        return sum([count * rate for count, rate, _ in bins]) / predicted if predicted else 1.0


class Traffics:
    """The averages of all adapters, and of requests without one (`plain`).

    Args:
        unknown: the first chances by position.
    """

    def __init__(self, unknown: Sequence[float]) -> None:
        self.plain = Traffic(list(unknown), [0] * len(unknown))
        self._adapted = WeakKeyDictionary[NamedAdapter, Traffic]()

    @property
    def have_adapters(self) -> bool:
        """Whether a request with an adapter has been seen."""
        return bool(self._adapted)

    def of(self, request: Request) -> Traffic:
        """The averages from which a request starts."""
        adapter = request.adapter
        if adapter is None:
            return self.plain
        found = self._adapted.get(adapter)
        if found is None:
            found = self._adapted[adapter] = self._whole()
        return found

    def most_accepted(self, among: Iterable[Traffic]) -> Traffic:
        """The one of these whose tokens are accepted most often, confidence by confidence."""
        return max(dict.fromkeys(among), key=lambda it: it.level(self.plain))

    def _whole(self) -> Traffic:
        """The averages of all traffic, for an adapter of which nothing is known. They count as few
        results."""
        parts = [self.plain, *self._adapted.values()]
        chances, counts = _mean(
            [it.chances for it in parts], [it.num_results for it in parts], self.plain.chances
        )
        rates, by_bin = _mean(
            [it.rates for it in parts], [it.results_by_bin for it in parts], self.plain.rates
        )
        return Traffic(chances, counts, rates, by_bin)


def _mean(
    values: Sequence[Sequence[float]], weights: Sequence[Sequence[int]], unknown: Sequence[float]
) -> tuple[list[float], list[int]]:
    """The weighted mean of each column, and the number of results that it counts as."""
    means, counts = [], []
    columns = zip(zip(*values, strict=True), zip(*weights, strict=True), unknown, strict=True)
    for column, known, default in columns:
        total = sum(known)
        pairs = zip(column, known, strict=True)
        means.append(sum([it * count for it, count in pairs]) / total if total else default)
        counts.append(min(total, _BORROWED))
    return means, counts
