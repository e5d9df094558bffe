"""Models for samples that are counted."""

from pathlib import Path

import pytest

from tests.lossless.counted_pair import Heads, write_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def heads(pair: tuple[str, str]) -> Heads:
    return Heads(Path(pair[0]).parent / "heads", pair[0])
