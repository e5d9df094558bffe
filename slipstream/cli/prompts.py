"""Reads the inputs that flags name: prompts (from flags, files, stdin or the demo), files and
folders. All are checked before anything is loaded or measured."""

import io
import os
import stat
import sys
from codecs import BOM_UTF8
from collections.abc import Sequence
from pathlib import Path

from slipstream.bench.datasets import read_dataset
from slipstream.cli.drafter_flags import DEMO
from slipstream.core.errors import UsageError
from slipstream.core.flags import read_text


def require_writable(flag: str, file: Path | None) -> None:
    """Raise UsageError for a file that cannot be written; None is fine."""
    if file is None:
        return
    if file.is_dir():
        raise UsageError(f"{flag} {file} is a directory; name a file")
    if not file.parent.is_dir():
        raise UsageError(f"{flag} {file}: there is no directory {file.parent}; make it first")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UsageError(f"{flag} {file} cannot be written; name another file")


def make_folder(flag: str, folder: Path) -> None:
    """Make it and its parents; raises UsageError where that is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{flag} {folder} cannot be made a folder ({error.strerror}); name another"
        ) from None


def read_template(given: str) -> str:
    """The chat template of --chat-template, a file or a text; UsageError if it is not valid."""
    from jinja2 import TemplateSyntaxError

    from slipstream.models.chat_environment import make_environment

    text = given if "{" in given else read_text("--chat-template", given)
    try:
        make_environment().parse(text)
    except TemplateSyntaxError as error:
        raise UsageError(
            f"--chat-template is not valid: line {error.lineno}: {error.message}"
        ) from None
    return text


_STDIN = "-"


def gather_prompts(texts: Sequence[str], files: Sequence[str], model: str) -> list[str]:
    """The given prompts; else the piped one; else, for the demo, a held-out one. UsageError if
    there is none, or it cannot be read."""
    # Arguments are UTF-8, whatever the locale is.
    given = [decode(os.fsencode(text), "--prompt") for text in texts]
    prompts = [*given, *map(read_prompt, files)]
    if prompts:
        return prompts
    if stdin_is_piped():
        return [read_prompt(_STDIN)]
    if model != DEMO:
        raise UsageError("there is no prompt; give --prompt TEXT or --prompt-file FILE, or pipe it")
    held_out = read_dataset(DEMO, file=None)
    return [next(prompt.text for prompt in held_out if prompt.text is not None)]


def read_prompt(file: str) -> str:
    """The text of a file (`-` is stdin) without one final newline, which text tools add."""
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
    """Decode UTF-8 strictly, without the byte order mark that some editors write in front. The data
    begin at byte `start` of the file `name`."""
    text = data.removeprefix(BOM_UTF8)
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        at = len(data) - len(text) + error.start
        raise UsageError(
            f"{name} is not valid UTF-8 at byte {start + at} (0x{data[at]:02x}); convert it to "
            "UTF-8"
        ) from None


def stdin_is_piped() -> bool:
    """Whether stdin is a pipe, a file or a socket (/dev/null is none of them)."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError, io.UnsupportedOperation):
        return isinstance(sys.stdin, io.TextIOBase)  # an object of another program; None is closed
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)
