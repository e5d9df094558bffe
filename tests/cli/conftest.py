"""Running command lines in this process."""

import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import typer.main

from slipstream.cli.errors import run
from slipstream.cli.main import app
from tests.cli.fake_llm import FakeLLM
from tests.cli.started import Started


@dataclass
class Ran:
    """The result of a command line."""

    code: int
    out: str
    err: str


class _Input(io.TextIOWrapper):
    """Replaces stdin, without a file."""


CommandLine = Callable[..., Ran]


@pytest.fixture(scope="package", autouse=True)
def _commands_are_built_once() -> Iterator[None]:
    """Typer would build all commands for each command line, which takes most of its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture
def slipstream(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> CommandLine:
    """Runs `slipstream ARGUMENTS` with `stdin` piped in (None: a terminal, or none at all)."""

    def call(*arguments: str, stdin: bytes | None = None) -> Ran:
        piped = None if stdin is None else _Input(io.BytesIO(stdin), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", piped)
        capfd.readouterr()
        code = run(app, arguments)
        sys.stdout.flush()
        captured = capfd.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """Commands get a `FakeLLM`; `fake_llm.made` has those of this test."""
    monkeypatch.setattr("slipstream.engine.llm.LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "made", [])
    return FakeLLM


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, fake_llm: type[FakeLLM]) -> Started:
    """No server is started; this has what it would have been started with."""
    started = Started()
    monkeypatch.setattr("slipstream.serve.run.start_server", started.start)
    monkeypatch.delenv("SLIPSTREAM_API_KEY", raising=False)
    return started
