"""Ctrl-C while an answer is written."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


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
