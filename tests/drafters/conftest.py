"""What of the drafters' many cases an ordinary run tries: the rest is for `scripts/test --all`."""

from collections import Counter

import pytest

# Each case of these runs engines; of tests with so many cases every second one is tried.
ENGINES = ("test_dflash", "test_eagle", "test_gemma4_assistant", "test_mtp", "test_p_eagle")
MANY = 5
EVERY_KIND = "test_every_kind"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    functions = [item for item in items if isinstance(item, pytest.Function)]
    _thin_out([item for item in functions if item.module.__name__.endswith(ENGINES)])
    _share_out([item for item in functions if item.module.__name__.endswith(EVERY_KIND)])


def _thin_out(items: list[pytest.Function]) -> None:
    cases = Counter((item.module.__name__, item.originalname) for item in items)
    tried: Counter[tuple[str, str]] = Counter()
    for item in items:
        test = (item.module.__name__, item.originalname)
        if cases[test] >= MANY and tried[test] % 2:
            item.add_marker(pytest.mark.full)
        tried[test] += 1


def _share_out(items: list[pytest.Function]) -> None:
    """A test's cases among the kinds: each kind tries a quarter, the next kind the next ones."""
    kinds: list[str] = []
    tests: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        kind = str(item.callspec.params["kind"])
        kinds += [kind] if kind not in kinds else []
        tests.setdefault((item.originalname, kind), []).append(item)
    for (_, kind), cases in tests.items():
        share = min(4, len(cases))
        for number, item in enumerate(cases):
            if (number + kinds.index(kind)) % share:
                item.add_marker(pytest.mark.full)
