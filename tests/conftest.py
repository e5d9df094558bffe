"""Shared by all tests."""

import atexit
import functools
import gc
import os
import ssl
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

# Set before torch starts its pool: tiny tensors gain nothing from threads, and a pool that shares
# its cores with other processes can be fifty times slower than none.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from slipstream.core.request import Request
from slipstream.engine.drafting.kept_costs import CACHE
from slipstream.engine.isolation import Isolation
from slipstream.kernels import registry
from slipstream.kernels.registry import kernels_for
from tests import pairwise

# Triton reads this when it is first imported, which some test modules do through transformers:
# without a GPU its kernels are tested under its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if TYPE_CHECKING:  # transformers, which the process that hands out tests does not need
    from tests.tiny_models import TinyModels

NOT_FULL = "not full"  # as scripts/test selects an ordinary run

torch.set_num_threads(1)
try:  # GPU machines run the tests that need nothing but what the engine needs
    from hypothesis import settings
except ImportError:
    pass
else:
    settings.register_profile("ci", derandomize=True, deadline=None)
    settings.load_profile("ci")


def pytest_report_header() -> str:
    """The kernels that are tested."""
    return f"kernels: {kernels_for(torch.device('cpu')).network.backend}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give tests of a matrix their cases: so that pytest makes none of the rest for nothing."""
    for mark in metafunc.definition.iter_markers("matrix"):
        (axes,) = mark.args
        cases = pairwise.pairwise_cases({**axes, **mark.kwargs.get("ordinary", {})})
        others = []
        if metafunc.config.option.markexpr != NOT_FULL:
            more = pairwise.every_case if mark.kwargs.get("whole") else pairwise.pairwise_cases
            others = [case for case in more(axes) if case not in cases]
        full = [pytest.param(case, marks=pytest.mark.full) for case in others]
        metafunc.parametrize("case", [*cases, *full], ids=pairwise.case_name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    pairwise.thin_out(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave modules and tests out of garbage collection, which takes half a second with them."""
    gc.disable()  # nearly all that is made now stays
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # else libraries complain that theirs were never freed
        gc.set_threshold(20_000, 20, 20)  # steps make many objects, and few circles


@pytest.fixture(scope="session")
def hidden_failures() -> Iterator[list[BaseException | None]]:
    """Errors of steps whose requests were then run one by one, which hides them from users."""
    raised: list[BaseException | None] = []
    failed = Isolation.failed

    def watched(isolation: Isolation, *requests: Any) -> Request | None:
        blamed = failed(isolation, *requests)
        if blamed is None:
            raised.append(sys.exception())
        return blamed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Isolation, "failed", watched)
        yield raised


@pytest.fixture(autouse=True)
def _no_step_fails(
    request: pytest.FixtureRequest, hidden_failures: list[BaseException | None]
) -> Iterator[None]:
    """Steps fail only in tests that break them, which are marked `breaks_steps`."""
    hidden_failures.clear()
    yield
    if hidden_failures and request.node.get_closest_marker("breaks_steps") is None:
        raise AssertionError("a step failed, and was run again") from hidden_failures[0]


@pytest.fixture(scope="session", autouse=True)
def _fixed_numbers() -> Iterator[None]:
    """Engines draft a fixed number of tokens unless a test says otherwise, so that they measure
    nothing when they start, and tests can count their steps."""
    from slipstream.speculative import loading

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_usual_number", lambda options: None)
        yield


@pytest.fixture
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Networks are served by the reference column, whose weights can be looked at."""
    monkeypatch.setattr(registry, "runs_cpp", lambda device: False)
    kernels_for.cache_clear()
    yield
    kernels_for.cache_clear()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> "TinyModels":
    from tests.tiny_models import TinyModels

    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session", autouse=True)
def _own_cost_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the measured costs of tests apart from the user's."""
    os.environ[CACHE] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    """Every HTTP client would read all certificates (40 ms), but the test servers have no TLS."""
    create = ssl.create_default_context
    usual = functools.cache(create)

    def of_clients(*args: Any, **kwargs: Any) -> ssl.SSLContext:
        return create(*args, **kwargs) if args else usual(**kwargs)  # servers change theirs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", of_clients)
        yield


@pytest.fixture(scope="session")
def tiny_target(tiny_models: "TinyModels") -> str:
    return tiny_models.target


@pytest.fixture(scope="session")
def tiny_draft(tiny_models: "TinyModels") -> str:
    return tiny_models.draft


@pytest.fixture(scope="session")
def tiny_heads(tiny_models: "TinyModels") -> dict[str, str]:
    return tiny_models.heads
