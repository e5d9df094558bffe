"""The two streams that a command writes to."""

import sys

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
