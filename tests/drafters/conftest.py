"""What of the drafters' many cases an ordinary run tries: the rest is for `scripts/test --all`."""

from collections import Counter

import pytest

# Each case of these runs engines; of tests with so many cases every second one is tried.
ENGINES = ("test_dflash", "test_eagle", "test_gemma4_assistant", "test_mtp", "test_p_eagle")
MANY = 5


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [
        item
        for item in items
        if isinstance(item, pytest.Function) and item.module.__name__.endswith(ENGINES)
    ]
    cases = Counter((item.module.__name__, item.originalname) for item in ours)
    tried: Counter[tuple[str, str]] = Counter()
    for item in ours:
        test = (item.module.__name__, item.originalname)
        if cases[test] >= MANY and tried[test] % 2:
            item.add_marker(pytest.mark.full)
        tried[test] += 1
