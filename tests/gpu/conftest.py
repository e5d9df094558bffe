"""Tests of what only a GPU has: steps that are captured, and launched ahead of the host."""

from collections.abc import Iterator

import pytest

from slipstream.speculative.catalogue import METHODS
from tests import fake_drafters
from tests.gpu.engines import Engines


@pytest.fixture(scope="module")
def engines(tiny_target: str, tiny_draft: str, tiny_heads: dict[str, str]) -> Iterator[Engines]:
    """Engines over the tiny pair, with the fake drafters in the catalogue."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, "fake", fake_drafters.METHOD)
        yield Engines(tiny_target, tiny_draft, tiny_heads)
