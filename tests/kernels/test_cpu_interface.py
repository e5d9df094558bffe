"""A C++ module that was built before its functions changed is told as such."""

import types
from typing import Any

import pytest

from slipstream.core.errors import UsageError

cpp = pytest.importorskip("_slipstream_cpu", reason="the C++ kernels are not built")

from slipstream.kernels.cpu.interface import require_current  # noqa: E402


def changed(**functions: Any) -> Any:
    """The module, with other functions in it."""
    module = types.ModuleType("_slipstream_cpu")
    vars(module).update({**vars(cpp), **functions})
    return module


def function(signature: str) -> Any:
    return types.SimpleNamespace(__nb_signature__=((signature, None),))


NORM = "def norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None"


def test_the_module_here_is_current() -> None:
    require_current(cpp)
    require_current(changed(norm=function(NORM)))


def test_another_spelling_of_types_is_no_change() -> None:
    optional = NORM.replace("weight: Tensor", "weight: Optional[Tensor]")
    require_current(changed(norm=function(optional), note="not a function"))


@pytest.mark.parametrize(
    "functions",
    [
        {"norm": function(NORM.replace(", eps: float", ""))},
        {"norm": function(NORM.replace("eps", "epsilon"))},
        {"new": function("def new() -> None")},
        {"norm": None},
        {"Matrix": type("Matrix", (), {})},
    ],
)
def test_a_module_of_other_sources_is_refused(functions: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"built from other sources .* scripts/build_cpu"):
        require_current(changed(**functions))


def test_a_stale_build_is_told_before_an_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream import LLM
    from slipstream.kernels.registry import kernels_for

    monkeypatch.setattr("slipstream.kernels.cpu.interface.INTERFACE", "of another day")
    kernels_for.cache_clear()
    try:
        with pytest.raises(UsageError, match="not of another day"):
            LLM("demo", num_kv_blocks=8)
    finally:
        kernels_for.cache_clear()
