"""Which column serves a CPU."""

import importlib
import logging
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream.core.errors import UsageError
from slipstream.kernels import registry
from slipstream.kernels.registry import CPU_KERNELS, runs_cpp

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(CPU_KERNELS, raising=False)
    runs_cpp.cache_clear()
    yield
    runs_cpp.cache_clear()


def provide(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    def import_module(name: str) -> Any:
        assert name == "_slipstream_cpu"
        if module is None:
            raise ImportError("not built")
        return module

    monkeypatch.setattr(registry, "importlib", types.SimpleNamespace(import_module=import_module))
    assert importlib.import_module("types") is types  # of this module alone


def fake(chosen: list[str]) -> Any:
    return types.SimpleNamespace(levels=lambda: ["scalar", "avx2"], set_level=chosen.append)


def test_the_best_level_serves_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    provide(monkeypatch, fake(chosen))
    assert runs_cpp(CPU)
    assert not runs_cpp(torch.device("cuda"))
    assert chosen == []


def test_a_level_may_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    provide(monkeypatch, fake(chosen))
    monkeypatch.setenv(CPU_KERNELS, "avx2")
    assert runs_cpp(CPU)
    assert chosen == ["avx2"]


def test_plain_torch_may_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    provide(monkeypatch, None)
    monkeypatch.setenv(CPU_KERNELS, "reference")
    assert not runs_cpp(CPU)
    assert not caplog.records


def test_an_unknown_level_is_refused_with_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    provide(monkeypatch, fake([]))
    monkeypatch.setenv(CPU_KERNELS, "avx9")
    with pytest.raises(UsageError, match=r"avx9.*scalar, avx2 \(and reference\)"):
        runs_cpp(CPU)


def test_one_warning_where_the_kernels_are_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    provide(monkeypatch, None)
    with caplog.at_level(logging.WARNING, "slipstream"):
        assert not runs_cpp(CPU)
        assert not runs_cpp(CPU)
    assert len(caplog.records) == 1
    assert "compiler" in caplog.text


def test_a_forced_level_needs_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    provide(monkeypatch, None)
    monkeypatch.setenv(CPU_KERNELS, "avx2")
    with pytest.raises(UsageError, match="compiler"):
        runs_cpp(CPU)
