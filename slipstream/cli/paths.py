"""Files and folders that flags name: checked before anything is loaded or measured."""

import os
from pathlib import Path

from slipstream.core.errors import UsageError


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


def read_text(flag: str, file: str) -> str:
    """The UTF-8 text of a file; raises UsageError where it cannot be read."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {file} cannot be read: {error}") from None


def read_template(given: str) -> str:
    """The chat template that --chat-template names, or is; UsageError if it is not valid."""
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
