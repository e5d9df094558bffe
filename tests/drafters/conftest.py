"""What of the drafters' many cases an ordinary run tries: the rest is for `scripts/test --all`."""

import pytest

EVERY_KIND = "test_every_kind"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    functions = [item for item in items if isinstance(item, pytest.Function)]
    _share_out([item for item in functions if item.module.__name__.endswith(EVERY_KIND)])


def _share_out(items: list[pytest.Function]) -> None:
    """A test's cases among the kinds: each kind tries a fifth, the next kind the next ones."""
    kinds: list[str] = []
    tests: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        kind = str(item.callspec.params["kind"])
        kinds += [kind] if kind not in kinds else []
        tests.setdefault((item.originalname, kind), []).append(item)
    for (_, kind), cases in tests.items():
        share = min(5, len(cases))
        for number, item in enumerate(cases):
            if (number + kinds.index(kind)) % share:
                item.add_marker(pytest.mark.full)
