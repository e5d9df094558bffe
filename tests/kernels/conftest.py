"""How interpreted kernels run: `checked_memory.py`, `wide_products.py`."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch


@pytest.fixture(autouse=True)
def interpreted_kernels_are_checked() -> Iterator[None]:
    """In tests whose modules have imported Triton."""
    with ExitStack() as stack:
        if "triton" in sys.modules and not torch.cuda.is_available():
            from tests.kernels.checked_memory import memory_is_checked
            from tests.kernels.wide_products import products_are_wide

            stack.enter_context(memory_is_checked())
            stack.enter_context(products_are_wide())
        yield
