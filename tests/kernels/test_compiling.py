"""Kernels that are compiled together."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from triton.runtime.jit import JITFunction

from slipstream.kernels.triton import compiling
from slipstream.kernels.triton.compiling import compiling_together


@pytest.fixture
def launchers() -> list[str]:
    """The kernels whose launchers were built."""
    return []


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, launchers: list[str]) -> list[tuple[Any, ...]]:
    """What is compiled, and whether in another thread."""
    calls: list[tuple[Any, ...]] = []
    here = threading.get_ident()

    def compile_one(kernel: Any, key: str, *arguments: Any) -> Any:
        if key == "broken":
            raise ValueError("on purpose")
        calls.append((kernel, key, arguments, threading.get_ident() != here))
        return SimpleNamespace(src=key, metadata=arguments)

    def launcher(source: str, metadata: tuple[Any, ...]) -> None:
        launchers.append(source)

    monkeypatch.setattr(JITFunction, "_do_compile", compile_one)
    active = SimpleNamespace(launcher_cls=launcher)
    monkeypatch.setattr(compiling, "driver", SimpleNamespace(active=active))
    return calls


def kernel() -> Any:
    return JITFunction.__new__(JITFunction)


def test_each_kernel_is_compiled_once_and_at_the_end(
    compiled: list[tuple[Any, ...]], launchers: list[str]
) -> None:
    one, other = kernel(), kernel()
    with compiling_together():
        for key in ("16 rows", "32 rows", "16 rows"):
            assert one._do_compile(key, "float32", 0) is None, "so it is not launched"
        assert other._do_compile("16 rows", "bfloat16", 0) is None
        assert not compiled
    found = [(id(it), key, arguments[0]) for it, key, arguments, _ in compiled]
    assert sorted(found) == sorted(
        [
            (id(one), "16 rows", "float32"),
            (id(one), "32 rows", "float32"),
            (id(other), "16 rows", "bfloat16"),
        ]
    )
    assert all(apart for *_, apart in compiled)
    assert sorted(launchers) == ["16 rows", "16 rows", "32 rows"]
    assert one._do_compile("64 rows", "float32", 0) is not None, "as before"


def test_errors_are_those_of_the_call_or_of_the_compiler(compiled: list[tuple[Any, ...]]) -> None:
    own = kernel()
    with pytest.raises(KeyError):
        _compile_and_fail(own)
    assert not compiled
    assert own._do_compile("16 rows", "float32", 0) is not None
    with pytest.raises(ValueError, match="on purpose"), compiling_together():
        own._do_compile("broken", "float32", 0)


def _compile_and_fail(kernel: Any) -> None:
    with compiling_together():
        kernel._do_compile("16 rows", "float32", 0)
        raise KeyError
