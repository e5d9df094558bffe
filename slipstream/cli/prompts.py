"""Where the prompts of a command line come from."""

import io
import json
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from slipstream.cli.drafter_flags import DEMO
from slipstream.core.errors import UsageError

_STDIN = "-"
_BUILT_IN = Path(__file__).parents[1] / "demo" / "prompts" / "held_out.jsonl"


def gather_prompts(texts: Sequence[str], files: Sequence[str], model: str) -> list[str]:
    """Prompts as given; else what is piped in; else, for the demo, a built-in one.

    Raises:
        UsageError: nothing was given, or it cannot be read.
    """
    prompts = [*map(_argument, texts), *map(read_prompt, files)]
    if prompts:
        return prompts
    if stdin_is_piped():
        return [read_prompt(_STDIN)]
    built_in = _built_in_prompt() if model == DEMO else None
    if built_in is None:
        raise UsageError("there is no prompt; give --prompt TEXT or --prompt-file FILE, or pipe it")
    return [built_in]


def _argument(text: str) -> str:
    """A text of the command line as UTF-8, whatever the locale took its bytes for."""
    return decode(os.fsencode(text), "--prompt")


def read_prompt(file: str) -> str:
    """The text of a file (`-` is stdin) less one final newline, which text tools add."""
    name = "stdin" if file == _STDIN else file
    try:
        data = sys.stdin.buffer.read() if file == _STDIN else Path(file).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the prompt file {name}: {error.strerror}") from None
    text = decode(data, name).removesuffix("\n").removesuffix("\r")
    if not text:
        raise UsageError(f"the prompt from {name} is empty")
    return text


def decode(data: bytes, name: str, start: int = 0) -> str:
    """UTF-8, strictly; `start` is where the data begins in what is called `name`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not valid UTF-8 at byte {start + error.start} "
            f"(0x{data[error.start]:02x}); convert it to UTF-8"
        ) from None


def stdin_is_piped() -> bool:
    """A pipe, a file or a socket: something that was meant to be read (/dev/null is not)."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError, io.UnsupportedOperation):
        return isinstance(sys.stdin, io.TextIOBase)  # another program's stand-in; None is closed
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _built_in_prompt() -> str | None:
    """The first text prompt that the demo was not trained on."""
    if not _BUILT_IN.is_file():
        return None
    with _BUILT_IN.open(encoding="utf-8") as lines:
        for line in lines:
            prompt = json.loads(line).get("prompt")
            if isinstance(prompt, str):
                return prompt
    return None
