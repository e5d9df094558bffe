"""Shared by the tests of training."""

from pathlib import Path

import pytest

from tests.checkpoints import write_qwen3
from tests.train.lessons import write_own_words


@pytest.fixture(scope="session")
def taught_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random three-layer Qwen3 of 96 tokens."""
    return str(write_qwen3(tmp_path_factory.mktemp("taught"), num_hidden_layers=3))


@pytest.fixture(scope="session")
def own_words(taught_target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sequences that it wrote."""
    return write_own_words(taught_target, tmp_path_factory.mktemp("words") / "own.safetensors")
