"""Events of the parsers of answers."""

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
