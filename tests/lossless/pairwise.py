"""A small set of combinations in which every pair of values occurs."""

from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def every_case(axes: dict[str, list[Any]]) -> list[Case]:
    """The whole matrix."""
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def pairwise_cases(axes: dict[str, list[Any]]) -> list[Case]:
    """Greedily pick the case with the most pairs that are still missing. Deterministic."""
    candidates = every_case(axes)
    missing = {pair for case in candidates for pair in _pairs(case)}
    chosen: list[Case] = []
    while missing:
        best = max(candidates, key=lambda case: len(missing & _pairs(case)))
        missing -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(case: Case) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    items = [(name, repr(value)) for name, value in case.items()]
    return set(combinations(items, 2))
