"""The terminal: consoles for stdout and stderr, and Ctrl-C."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

ACCEPTED_STYLE = "bold green"  # draft tokens that were accepted
QUIET_STYLE = "dim"


def stdout_console() -> Console:
    """For results; markup and emoji codes are off, so that a model's text is shown verbatim."""
    return Console(highlight=False, markup=False, emoji=False)


def stderr_console() -> Console:
    """For progress, summaries and warnings."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


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
