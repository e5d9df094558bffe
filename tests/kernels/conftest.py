"""Interpreted kernels are watched: see `checked_memory.py`."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch


@pytest.fixture(autouse=True)
def kernels_keep_to_their_arguments() -> Iterator[None]:
    """Of tests whose modules have imported Triton."""
    with ExitStack() as stack:
        if "triton" in sys.modules and not torch.cuda.is_available():
            from tests.kernels.checked_memory import memory_is_checked

            stack.enter_context(memory_is_checked())
        yield
