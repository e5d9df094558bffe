"""Incremental readers of JSON objects and of tool calls, which have a name and arguments."""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

from slipstream.serve.tools.events import Arguments, CallBegun, CallEnded, ToolEvent

JSON_SPACE = " \t\r\n"


class ValueScanner:
    """Finds the end of one JSON value, without validating what is inside.

    Attributes:
        in_string: whether the text so far ends within a string.
    """

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self.in_string = self._escaped = self._begun = self._scalar = False

    def scan(self, text: str, start: int) -> int:
        """The index after the value's text, which begins at `start`."""
        for place in range(start, len(text)):
            letter = text[place]
            if self._scalar and letter in ",]}" + JSON_SPACE:
                self.done = True
                return place
            self._take(letter)
            if self.done:
                return place + 1
        return len(text)

    def _take(self, letter: str) -> None:
        if self.in_string:
            self._take_in_string(letter)
        elif letter == '"':
            self.in_string = self._begun = True
        elif letter in "{[":
            self._depth += 1
            self._begun = True
        elif letter in "}]":
            self._depth -= 1
            self.done = self._depth <= 0
        elif not self._begun and letter not in JSON_SPACE:
            self._begun = self._scalar = True

    def _take_in_string(self, letter: str) -> None:
        if self._escaped:
            self._escaped = False
        elif letter == "\\":
            self._escaped = True
        elif letter == '"':
            self.in_string = False
            self.done = self._depth == 0


def ends_in_string(text: str) -> bool:
    """Whether an array or an object ends within one of its strings."""
    scanner = ValueScanner()
    scanner.scan(text, 0)
    return text.lstrip()[:1] in ("[", "{") and scanner.in_string


# For each structural character: the next state, by the current state.
_TRANSITIONS: Final[dict[str, dict[str, str]]] = {
    "start": {"{": "key"},
    "key": {'"': "key text", "}": "done"},
    "colon": {":": "value"},
    "after value": {",": "key", "}": "done"},
}


@dataclass(frozen=True, slots=True)
class MemberPiece:
    """More text of the value of a member."""

    key: str
    text: str
    ended: bool


class ObjectScanner:
    """Splits a JSON object into its members.

    Attributes:
        rest: the text after the object, or from the first invalid character.
    """

    def __init__(self) -> None:
        self.rest = ""
        self._state = "start"
        self._key = ""
        self._value = ValueScanner()

    @property
    def done(self) -> bool:
        return self._state == "done"

    @property
    def broken(self) -> bool:
        return self._state == "broken"

    def feed(self, text: str) -> Iterator[MemberPiece]:
        place = 0
        while place < len(text) and not (self.done or self.broken):
            if self._state == "key text":
                place = self._read_key(text, place)
            elif self._state == "value":
                end = self._value.scan(text, place)
                if self._value.done:
                    self._state = "after value"
                yield MemberPiece(self._key, text[place:end], self._value.done)
                place = end
            else:
                place = self._step(text, place)
        if self.done or self.broken:
            self.rest = text[place:]

    def _read_key(self, text: str, place: int) -> int:
        end = self._value.scan(text, place)
        self._key += text[place:end]
        if self._value.done:
            self._key, self._state = self._key[1:-1], "colon"
        return end

    def _step(self, text: str, place: int) -> int:
        letter = text[place]
        if letter in JSON_SPACE:
            return place + 1
        self._state = _TRANSITIONS[self._state].get(letter, "broken")
        if self._state == "value":
            self._value = ValueScanner()
        elif self._state == "key text":
            self._value, self._key = ValueScanner(), ""
            return place  # the quote is part of the key's text
        return place if self.broken else place + 1


_ARGUMENTS = ("arguments", "parameters")


class CallReader:
    """Reads {"name": ..., "arguments": {...}}, in either order, as the text arrives.

    Args:
        names: of the known functions; None accepts any name.

    Attributes:
        raw: the text so far.
        begun: whether `CallBegun` was returned.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.raw = ""
        self._names = names
        self._scanner = ObjectScanner()
        self._name = ""
        self._held = ""  # arguments before the name, or a string that holds the arguments
        self.begun = self._refused = self._quoted = self._has_arguments = False

    @property
    def done(self) -> bool:
        return self._scanner.done

    @property
    def failed(self) -> bool:
        return self._refused or self._scanner.broken or (self.done and not self.begun)

    @property
    def rest(self) -> str:
        """The text after the object, or after the valid part of it."""
        return self._scanner.rest

    def feed(self, text: str) -> Iterator[ToolEvent]:
        self.raw += text
        for piece in self._scanner.feed(text):
            if piece.key == "name" and not self.begun:
                yield from self._take_name(piece)
            elif piece.key in _ARGUMENTS:
                yield from self._take_arguments(piece)
        if self.done and self.begun:
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
            self.begun = True
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
        if self.begun:
            if text:
                yield Arguments(text)
        else:
            self._held += text


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
