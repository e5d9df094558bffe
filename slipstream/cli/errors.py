"""Error messages and exit codes.

0: success. 1: a checkpoint or the engine failed, or the output was closed (a closed pipe).
2: the command line is wrong. 130: interrupted.
"""

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from typing import Any, cast

import typer

from slipstream.core.errors import SlipstreamError, UsageError

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130

_NO_MEMORY = (
    "the system has too little memory: use a smaller cache (--kv-cache-memory), fewer or shorter "
    "requests (--max-num-seqs, --max-model-len), or fewer bits (--quantization)"
)

# The parser's errors. Some versions of Typer bundle click, so the class is found through a name
# that all versions export.
_ParserError = cast("type[Exception]", typer.BadParameter.__bases__[0])


@dataclass
class DebugState:
    """Settings of a run that error messages depend on."""

    debug: bool = False


def run(app: typer.Typer, arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code; only SystemExit may escape."""
    _survive_narrow_encodings()
    state = DebugState()
    try:
        result = app(list(arguments), prog_name="slipstream", standalone_mode=False, obj=state)
        code = result if isinstance(result, int) else 0
        if not code:  # a help page, too, is nowhere
            require_stdout()
    except Exception as error:
        code = _report(error, state)
    except KeyboardInterrupt:
        code = INTERRUPTED
    return _flushed(code, state)


def require_stdout() -> None:
    """Raise SlipstreamError if stdout is closed."""
    if sys.stdout is None:
        raise SlipstreamError(
            "stdout is closed, so there is nowhere to write; leave it open or redirect it"
        )


def _flushed(code: int, state: DebugState) -> int:
    """The exit code, after all output: where Python itself cannot write it, it leaves with 120."""
    if sys.stdout is None:
        return code
    try:
        sys.stdout.flush()
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        code = code or _report(error, state)
    return code


def say(message: str) -> None:
    print(f"slipstream: {message}", file=sys.stderr)


def _report(error: Exception, state: DebugState) -> int:
    if isinstance(error, typer.Abort):  # Ctrl-C, in older versions of Typer
        return INTERRUPTED
    if state.debug:
        traceback.print_exception(error)
    if type(error).__name__ == "NoArgsIsHelpError":  # of click, which Typer does not pass on
        print(str(error), file=sys.stderr)
        return WRONG_USAGE
    if isinstance(error, _ParserError):
        say(_parser_message(error))
        return WRONG_USAGE
    if isinstance(error, SlipstreamError):
        say(str(error))
        return WRONG_USAGE if isinstance(error, UsageError) else FAILED
    if isinstance(error, OSError):
        full = error.errno == errno.ENOSPC and error.filename is None
        remedy = "; free space where stdout is redirected to" if full else ""
        say(f"cannot read or write: {error}{remedy}")
        return FAILED
    if _lacks_memory(error):
        say(f"{_NO_MEMORY} ({str(error).splitlines()[0]})" if str(error) else _NO_MEMORY)
        return FAILED
    hint = "" if state.debug else "; run again with --debug for the traceback"
    say(f"internal error: {type(error).__name__}: {error}{hint}")
    return FAILED


def _lacks_memory(error: Exception) -> bool:
    """Whether memory ran out; torch's host allocator raises a RuntimeError."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate" in str(error)
    )


def _parser_message(error: Any) -> str:
    message = error.format_message().rstrip(".")
    if error.ctx is None:
        return str(message)
    return f"{message}; see {error.ctx.command_path} --help"


def _survive_narrow_encodings() -> None:
    """Escape characters of a model's text that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
