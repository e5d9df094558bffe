"""The terminal: the streams that a command writes to, and Ctrl-C."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

ACCEPTED_STYLE = "bold green"  # tokens that a drafter guessed right
QUIET_STYLE = "dim"


def stdout_console() -> Console:
    """For results. Markup and emoji codes are off: a model's text is shown as it is."""
    return Console(highlight=False, markup=False, emoji=False)


def stderr_console() -> Console:
    """For everything about the results."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def shows_live(console: Console) -> bool:
    """Whether a person watches and lines can be rewritten.

    Rich takes a pipe for a terminal when FORCE_COLOR is set, so the stream itself is asked too.
    """
    return (
        sys.stdout is not None
        and sys.stdout.isatty()
        and console.is_terminal
        and not console.is_dumb_terminal
    )


@contextmanager
def interrupt_noted() -> Iterator[Callable[[], bool]]:
    """Within, Ctrl-C is only noted, so that the engine ends its step; pressed twice it interrupts.

    Gives a function that tells whether it was pressed.
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
