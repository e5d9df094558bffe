"""How kernels run here: interpreted ones are watched, those in C++ take every level."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

LEVELS = (
    importlib.import_module("_slipstream_cpu").levels()
    if importlib.util.find_spec("_slipstream_cpu")
    else []
)


@pytest.fixture(autouse=True)
def interpreted_kernels_are_checked() -> Iterator[None]:
    """Check the memory accesses of interpreted kernels, if the test's module imported Triton."""
    with ExitStack() as stack:
        if "triton" in sys.modules and not torch.cuda.is_available():
            from tests.kernels.checked_memory import memory_is_checked
            from tests.kernels.interpreter import (
                floats_are_rounded_to_nearest,
                products_are_wide,
                quicken,
            )

            quicken()
            stack.enter_context(memory_is_checked())
            stack.enter_context(floats_are_rounded_to_nearest())
            stack.enter_context(products_are_wide())
        yield


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The C++ kernels use these instructions, of those that run here."""
    import _slipstream_cpu as cpp

    before = cpp.level()
    cpp.set_level(request.param)
    yield request.param
    cpp.set_level(before)


@pytest.fixture
def two_threads() -> Iterator[None]:
    import _slipstream_cpu as cpp

    before = cpp.num_threads()
    cpp.set_num_threads(2)
    yield
    cpp.set_num_threads(before)
