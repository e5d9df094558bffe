"""The events of answer parsers, and the search for marks in a text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is not a tool call."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of this function begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More text of the current call's arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The current call is complete."""


ToolEvent = Content | CallBegun | Arguments | CallEnded
AnswerEvent = ToolEvent | Reasoning


class ToolParser(Protocol):
    """Parses one answer incrementally.

    The joined events do not depend on how the text is split. Text that is not a call in the model's
    format is returned as content, so nothing is lost.
    """

    def feed(self, text: str) -> Sequence[ToolEvent]:
        """The events for new text."""

    def finish(self) -> Sequence[ToolEvent]:
        """The remaining events, at the end of the answer."""


class StatefulParser:
    """The part of a `ToolParser` that goes through an answer.

    Attributes:
        _read: reads the beginning of a text, and returns the rest; the parser's state.
        _held: text that is not classified yet.
    """

    _read: Callable[[str], str]

    def __init__(self) -> None:
        self._events: list[ToolEvent] = []
        self._held = ""

    def feed(self, text: str) -> Sequence[ToolEvent]:
        while text:
            text = self._read(text)
        events, self._events = self._events, []
        return events

    def _to_text(self) -> str:
        """Treat all that follows as content; returns the text that was held."""
        text, self._held, self._read = self._held, "", self._read_text
        return text

    def _read_text(self, text: str) -> str:
        self._events.append(Content(text))
        return ""


class ArgumentsParser(StatefulParser):
    """Writes the arguments of calls one by one."""

    def __init__(self) -> None:
        super().__init__()
        self._num_arguments = 0

    def _add_call(self, name: str) -> None:
        self._num_arguments = 0
        self._events.append(CallBegun(name))

    def _add_argument(self, key: str, value: str) -> None:
        """Add an argument, both parts in JSON."""
        self._events.append(Arguments(f"{', ' if self._num_arguments else '{'}{key}: {value}"))
        self._num_arguments += 1

    def _end_call(self) -> None:
        self._events += [Arguments("}" if self._num_arguments else "{}"), CallEnded()]


class MarkFinder:
    """Finds marks in streamed text; holds back an end that may begin a mark. No mark may be a
    prefix of another."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(marks)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None, str]:
        """Split new text: the text before the first mark, the mark, and the rest, to be fed again.

        Without a mark: the text that cannot begin a mark, None and "".
        """
        text, self._held = self._held + text, ""
        found = [(place, mark) for mark in self._marks if (place := text.find(mark)) >= 0]
        if found:
            place, mark = min(found)
            return text[:place], mark, text[place + len(mark) :]
        keep = self._beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None, ""

    def finish(self) -> str:
        text, self._held = self._held, ""
        return text

    def _beginning(self, text: str) -> int:
        """Number of characters at the end of the text that may begin a mark."""
        longest = max((len(mark) for mark in self._marks), default=1)
        for size in range(min(longest - 1, len(text)), 0, -1):
            if any(mark.startswith(text[-size:]) for mark in self._marks):
                return size
        return 0


class ContentWriter:
    """Writes content without the white space that separates calls."""

    def __init__(self) -> None:
        self._space = ""
        self._after_call = False

    def write(self, text: str) -> list[Content]:
        """Return new text; white space at its end is held back."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if not kept:
            return []
        self._after_call = False
        return [Content(kept)]

    def break_off(self) -> None:
        """Drop held-back white space, since a call follows."""
        self._space, self._after_call = "", True

    def flush(self) -> list[Content]:
        """Return the rest, at the end of the answer."""
        space, self._space = self._space, ""
        return [Content(space)] if space and not self._after_call else []
