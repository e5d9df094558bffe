"""The terminal: consoles for stdout and stderr, and Ctrl-C."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from io import BufferedWriter, FileIO, TextIOWrapper
from threading import current_thread, main_thread
from types import FrameType, ModuleType
from typing import Any

from rich.console import Console

ACCEPTED_STYLE = "bold green"  # draft tokens that were accepted
QUIET_STYLE = "dim"


def stdout_console() -> Console:
    """For results; markup and emoji codes are off, so that a model's text is shown verbatim."""
    return Console(highlight=False, markup=False, emoji=False)


def stderr_console() -> Console:
    """For progress, summaries and warnings."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def fill_closed_stdin() -> None:
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))


class _DroppingFile(FileIO):
    """A file that drops what cannot be written, to a full disk or a closed pipe."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def drop_what_stderr_does_not_take() -> None:
    """Ignore errors of all writes to `sys.stderr`: notes, progress bars, warnings and log lines."""
    if sys.stderr is None:  # file descriptor 2 is closed: the next file that is opened would get it
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        if nowhere != 2:
            os.close(nowhere)
    sys.stderr = TextIOWrapper(
        BufferedWriter(_DroppingFile(2, "w", closefd=False)),
        encoding=getattr(sys.stderr, "encoding", None),
        errors="backslashreplace",
        line_buffering=True,
    )


def shows_live(console: Console) -> bool:
    """Whether stdout is a terminal on which lines can be rewritten.

    With FORCE_COLOR rich treats a pipe as a terminal, so the stream is asked as well.
    """
    return (
        sys.stdout is not None
        and sys.stdout.isatty()
        and console.is_terminal
        and not console.is_dumb_terminal
    )


@contextmanager
def interrupt_noted() -> Iterator[Callable[[], bool]]:
    """Defer Ctrl-C, so that the engine can end its step; a second Ctrl-C interrupts at once.

    Yields a function that returns whether Ctrl-C was pressed.
    """
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            signal.default_int_handler(number, frame)
        pressed = True

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, previous)


class TorchFinder(MetaPathFinder):
    """Handles Ctrl-C while torch is imported, since its C++ code aborts at a KeyboardInterrupt."""

    def __init__(self, handler: Callable[[int, FrameType | None], None]) -> None:
        self._handler = handler

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name) if name == "torch" else None
        if spec is not None and spec.loader is not None and current_thread() is main_thread():
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                before = signal.signal(signal.SIGINT, self._handler)
                execute(module)
                signal.signal(signal.SIGINT, before)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
