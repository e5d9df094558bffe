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
    bits: dict[Any, int] = {}  # of each pair of values
    pairs = [_pairs(case, bits) for case in candidates]
    missing = (1 << len(bits)) - 1
    chosen: list[Case] = []
    while missing:
        best = max(range(len(candidates)), key=lambda index: (missing & pairs[index]).bit_count())
        missing &= ~pairs[best]
        chosen.append(candidates[best])
    return chosen


def _pairs(case: Case, bits: dict[Any, int]) -> int:
    items = combinations([(name, repr(value)) for name, value in case.items()], 2)
    return sum(bits.setdefault(pair, 1 << len(bits)) for pair in items)
