"""Incremental reader of a tool call: a JSON object with a name and arguments."""

import json
from collections.abc import Collection, Iterator

from slipstream.serve.tools.events import Arguments, CallBegun, CallEnded, ToolEvent
from slipstream.serve.tools.partial_json import MemberPiece, ObjectScanner

_ARGUMENTS = ("arguments", "parameters")


class CallReader:
    """Reads {"name": ..., "arguments": {...}}, in either order, as the text arrives.

    Args:
        names: of the known functions; None accepts any name.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.raw = ""  # the text so far
        self._names = names
        self._scanner = ObjectScanner()
        self._name = ""
        self._held = ""  # arguments before the name, or a string that holds the arguments
        self._begun = self._refused = self._quoted = self._has_arguments = False

    @property
    def begun(self) -> bool:
        """Whether `CallBegun` was returned."""
        return self._begun

    @property
    def done(self) -> bool:
        """Whether the object is complete."""
        return self._scanner.done

    @property
    def failed(self) -> bool:
        """Whether the text is not a call."""
        return self._refused or self._scanner.broken or (self.done and not self._begun)

    @property
    def rest(self) -> str:
        """The text after the object, or after the valid part of it."""
        return self._scanner.rest

    def feed(self, text: str) -> Iterator[ToolEvent]:
        """The events that follow from further text."""
        self.raw += text
        for piece in self._scanner.feed(text):
            if piece.key == "name" and not self._begun:
                yield from self._take_name(piece)
            elif piece.key in _ARGUMENTS:
                yield from self._take_arguments(piece)
        if self.done and self._begun:
            if not self._has_arguments:
                yield Arguments("{}")
            yield CallEnded()

    def _take_name(self, piece: MemberPiece) -> Iterator[ToolEvent]:
        self._name += piece.text
        if not piece.ended:
            return
        name = _loaded(self._name)
        self._refused = not isinstance(name, str) or not (
            self._names is None or name in self._names
        )
        if isinstance(name, str) and not self._refused:
            self._begun = True
            yield CallBegun(name)
            if self._held and not self._quoted:
                yield Arguments(self._held)
                self._held = ""

    def _take_arguments(self, piece: MemberPiece) -> Iterator[ToolEvent]:
        text = piece.text if self._has_arguments else piece.text.lstrip()
        if text and not self._has_arguments:
            self._has_arguments = True
            self._quoted = text.startswith('"')
        if self._quoted:  # some models write the arguments as a string that holds JSON
            self._held += text
            if not piece.ended:
                return
            inner = _loaded(self._held)
            text, self._held, self._quoted = str(inner), "", False
        if self._begun:
            if text:
                yield Arguments(text)
        else:
            self._held += text


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
