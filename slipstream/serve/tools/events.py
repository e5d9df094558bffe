"""Events of the parsers of answers, and how they find marks in a text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is not a tool call."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of this function begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """Further text of the arguments of the current call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The current call is complete."""


ToolEvent = Content | CallBegun | Arguments | CallEnded
AnswerEvent = ToolEvent | Reasoning


class ToolParser(Protocol):
    """Parses one answer incrementally.

    The events do not depend on how the text is split. Text that is not a call in the model's format
    is returned as content: nothing is lost.
    """

    def feed(self, text: str) -> Sequence[ToolEvent]:
        """The events that follow from further text."""

    def finish(self) -> Sequence[ToolEvent]:
        """The remaining events; the answer is complete."""


class MarkFinder:
    """Finds marks in a text that arrives in pieces; holds back its end while it may begin a mark.

    Args:
        marks: none may be the beginning of another.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(marks)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None, str]:
        """The text before the first mark, the mark, and the text after it, to be fed again.

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
        """The text that was held back."""
        text, self._held = self._held, ""
        return text

    def _beginning(self, text: str) -> int:
        """Number of characters at the end that may begin a mark."""
        longest = max((len(mark) for mark in self._marks), default=1)
        for size in range(min(longest - 1, len(text)), 0, -1):
            if any(mark.startswith(text[-size:]) for mark in self._marks):
                return size
        return 0


class ContentWriter:
    """Removes white space that only separates calls."""

    def __init__(self) -> None:
        self._space = ""
        self._after_call = False

    def write(self, text: str) -> list[Content]:
        """Further text; white space at its end is held back."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if not kept:
            return []
        self._after_call = False
        return [Content(kept)]

    def break_off(self) -> None:
        """A call follows."""
        self._space, self._after_call = "", True

    def flush(self) -> list[Content]:
        """The rest; the answer is complete."""
        space, self._space = self._space, ""
        return [Content(space)] if space and not self._after_call else []
