"""Files that drafters are trained on: texts, conversations and prompts.

*.txt, *.md, *.py and other files   one text each
*.jsonl                             one object a line:
    {"text": ...}                   a text
    {"messages": [...]}             a conversation; the assistant's messages are learned
    {"prompt": ...}                 a beginning for the target to continue (`--generate`)
a directory                         every such file in it, in the order of their names
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.errors import UsageError

_LINES = ".jsonl"
_FORMS = '{"text": ...}, {"messages": [...]} or {"prompt": ...}'


@dataclass(frozen=True)
class TextEntry:
    """One document.

    Attributes:
        text: the text or the prompt; None for a conversation.
        messages: the conversation.
        is_prompt: the text is to be continued.
    """

    text: str | None
    messages: tuple[Mapping[str, Any], ...] = ()
    is_prompt: bool = False

    @property
    def wants_answer(self) -> bool:
        """Whether the target still has to write the answer."""
        if self.messages:
            return self.messages[-1].get("role") != "assistant"
        return self.is_prompt


def read_entries(paths: Sequence[Path]) -> list[TextEntry]:
    """All documents of these files and directories.

    Raises UsageError for missing or empty files, and for lines of another form.
    """
    entries = [entry for path in paths for file in _files(path) for entry in _entries(file)]
    if not entries:
        raise UsageError(
            f"there is no text in {', '.join(map(str, paths))}; give text files, or .jsonl files "
            f"whose lines are {_FORMS}"
        )
    return entries


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(file for file in path.rglob("*") if file.is_file())
    elif path.is_file():
        yield path
    else:
        raise UsageError(f"there is no file or directory {path} to train on; check --data")


def _entries(file: Path) -> Iterator[TextEntry]:
    try:
        content = file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file} is not text in UTF-8 ({error.reason} at byte {error.start}); convert it, or "
            "leave it out of --data"
        ) from error
    if file.suffix == _LINES:
        # Not splitlines: JSON may hold U+2028 and other line ends of Unicode as they are.
        for number, line in enumerate(content.split("\n"), 1):
            if line.strip():
                yield _from_line(line, f"{file}, line {number}")
    elif content.strip():
        yield TextEntry(content)


def _from_line(line: str, where: str) -> TextEntry:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not valid JSON ({error}); correct it") from error
    if isinstance(value, dict):
        messages, text, prompt = (value.get(key) for key in ("messages", "text", "prompt"))
        if isinstance(messages, list) and messages and all(map(_is_message, messages)):
            return TextEntry(None, tuple(messages))
        if isinstance(text, str) and text:
            return TextEntry(text)
        if isinstance(prompt, str) and prompt:
            return TextEntry(prompt, is_prompt=True)
    raise UsageError(f"{where} must be one of {_FORMS}")


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )
