"""What a parser finds in an answer, in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is no tool call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls a function."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments of the call that began last."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call is whole."""


ToolEvent = Content | CallBegun | Arguments | CallEnded


class ToolParser(Protocol):
    """Reads one answer as it comes.

    However the text is cut into pieces, the events say the same. What is no call in the model's
    format comes out as content: nothing is lost.
    """

    def feed(self, text: str) -> Sequence[ToolEvent]:
        """What is certain with this further text."""

    def finish(self) -> Sequence[ToolEvent]:
        """What was held back; the answer is over."""
