"""Small sets of combinations in which every pair of values occurs."""

from collections.abc import Hashable, Sequence
from heapq import heapify, heapreplace
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
    total = 0  # of pairs of values, each of which has a bit
    columns: list[list[int]] = []
    for values in combinations(zip(*candidates, strict=True), 2):
        together = list(zip(*values, strict=True))
        bits = {pair: 1 << total + place for place, pair in enumerate(dict.fromkeys(together))}
        columns.append([bits[pair] for pair in together])
        total += len(bits)
    pairs = [sum(row) for row in zip(*columns, strict=True)]
    missing = (1 << total) - 1
    # Numbers of missing pairs only fall: who has the most as of now needs no look at those behind.
    waiting = [(-pair.bit_count(), index) for index, pair in enumerate(pairs)]
    heapify(waiting)
    chosen: list[int] = []
    while missing:
        most, index = waiting[0]
        left = -(missing & pairs[index]).bit_count()
        if left == most:
            missing &= ~pairs[index]
            chosen.append(index)
            left = 0
        heapreplace(waiting, (left, index))
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
