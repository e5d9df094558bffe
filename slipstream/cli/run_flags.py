"""Flags that every command takes, about the run and not the model."""

from dataclasses import dataclass
from typing import Annotated

import typer

from slipstream.cli.errors import Run


def _note_debug(context: typer.Context, debug: bool) -> bool:
    """The error policy learns of it before any other flag is read."""
    if debug:
        context.ensure_object(Run).debug = True
    return debug


DebugFlag = Annotated[
    bool,
    typer.Option(
        "--debug", callback=_note_debug, is_eager=True, help="Show the traceback of an error."
    ),
]


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """How much to tell."""

    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Show what the engine derived, with the reasons, and its log."
        ),
    ] = False
    debug: DebugFlag = False
