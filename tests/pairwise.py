"""Small sets of combinations in which every pair of values occurs."""

from collections.abc import Hashable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Case = dict[str, Any]


def every_case(axes: dict[str, list[Any]]) -> list[Case]:
    """The whole matrix."""
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def pairwise_cases(axes: dict[str, list[Any]]) -> list[Case]:
    """Those of `every_case` that `pairwise_cover` picks."""
    cases = every_case(axes)
    cover = pairwise_cover([tuple(map(repr, case.values())) for case in cases])
    return [cases[index] for index in cover]


def case_name(case: Case) -> str:
    return "-".join(f"{name}={value}" for name, value in case.items())


def pairwise_cover(candidates: Sequence[tuple[Hashable, ...]]) -> list[int]:
    """Greedily pick the candidate with the most pairs that are still missing. Deterministic.

    Args:
        candidates: the values of each, at the same places.
    Returns:
        Their indices, as they were picked.
    """
    bits: dict[Any, int] = {}  # of each pair of values
    pairs = [
        sum(bits.setdefault(pair, 1 << len(bits)) for pair in combinations(enumerate(candidate), 2))
        for candidate in candidates
    ]
    missing = (1 << len(bits)) - 1
    chosen: list[int] = []
    while missing:
        best = max(range(len(pairs)), key=lambda index: (missing & pairs[index]).bit_count())
        missing &= ~pairs[best]
        chosen.append(best)
    return chosen


def thin_out(items: Sequence[pytest.Item]) -> None:
    """Keep a pairwise cover of each test with three parameters or more, in an ordinary run."""
    tests: dict[str, dict[pytest.Item, tuple[Hashable, ...]]] = {}
    for item in items:
        values = parameters(item)
        if len(values) > 2:
            tests.setdefault(item.nodeid.partition("[")[0], {})[item] = values
    for cases in tests.values():
        tried = set(pairwise_cover(list(cases.values())))
        for index, item in enumerate(cases):
            if index not in tried:
                item.add_marker(pytest.mark.full)


def parameters(item: pytest.Item) -> tuple[Hashable, ...]:
    """The parameters of a test's case; those that one decorator names together count as one."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return ()
    values = {name: repr(value) for name, value in item.callspec.params.items()}
    together = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        together.append(tuple(values.pop(name.strip()) for name in names))
    return (*together, *values.values())
