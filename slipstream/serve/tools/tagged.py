"""Formats with tags around the name of a call and around each argument, which is plain text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.serve.tools.call_format import Schemas
from slipstream.serve.tools.call_reader import ends_in_string
from slipstream.serve.tools.events import (
    ArgumentsParser,
    ContentWriter,
    MarkFinder,
    ToolEvent,
)
from slipstream.serve.tools.typed_arguments import as_json, types_of

BEGIN, END = "<tool_call>", "</tool_call>"
_STRING = frozenset({"string"})
_MOST_WITHIN = 32  # tags in an argument's JSON, which is read again after each
_NAME = re.compile(r"([a-zA-Z0-9_.-]{0,64})\s*")


@dataclass(frozen=True)
class Tags:
    """The tags within a call.

    Attributes:
        name: before the name; may be empty.
        name_end: after the name; may be empty, since the first argument or the end follows.
        key, key_end: around the name of an argument.
        value, value_end: around the text of an argument; `value` may be empty.
        end: end of the call; `END` may still follow.
        newlines: whether line breaks surround the text of an argument, without being part of it.
    """

    name: str
    name_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    end: str
    newlines: bool

    @property
    def marks(self) -> tuple[str, ...]:
        """All tags, and the marks around calls."""
        inner = (self.name, self.key, self.key_end, self.value, self.value_end, self.end)
        return (BEGIN, END, *(it for it in inner if len(it) > 1 and it != END))


class TaggedParser(ArgumentsParser):
    """Parses calls between tags, with text around them; returns arguments one by one. The types of
    arguments follow from their schemas in `functions`."""

    def __init__(self, tags: Tags, functions: Schemas, dropped: Sequence[str] = ()) -> None:
        super().__init__()
        self._tags, self._functions = tags, functions
        begins = [BEGIN, *([tags.name] if tags.name else [])]  # some models omit the first one
        self._content_marks = [*begins, *(it for it in dropped if it not in tags.marks)]
        self._content = ContentWriter()
        self._name = self._key = ""
        self._text: list[str] = []  # since the last tag of the call
        self._finder = MarkFinder(self._content_marks)
        self._read = self._read_content

    def finish(self) -> Sequence[ToolEvent]:
        if self._read == self._read_call:  # the call was cut off, so it stays open
            return []
        held = self._finder.finish() if self._read == self._read_content else self._held
        if self._read == self._read_end and END.startswith(held.strip()):
            held = ""
        return [*self._content.write(held), *self._content.flush()]

    def _read_content(self, text: str) -> str:
        before, mark, text = self._finder.feed(text)
        self._events += self._content.write(before)
        if mark == BEGIN or (mark and mark == self._tags.name):
            self._held, self._read = mark, self._read_name
        return text

    def _read_name(self, text: str) -> str:
        """Decide whether a function's name follows."""
        self._held += text
        tags, start = self._tags, self._held.removeprefix(BEGIN).lstrip()
        if not start.startswith(tags.name):
            return "" if tags.name.startswith(start) else self._no_call()
        name = _NAME.match(start, len(tags.name))
        assert name is not None, "it matches anything"
        rest = start[name.end() :]
        ends = (tags.name_end,) if tags.name_end else (tags.key, tags.end)
        for end in ends:
            if rest.startswith(end) and name[1]:
                self._content.break_off()
                self._name = name[1]
                self._add_call(self._name)
                self._read = self._read_call
                self._expect(tags.key, tags.end, END)
                return rest.removeprefix(tags.name_end)
        return "" if any(end.startswith(rest) for end in ends) else self._no_call()

    def _no_call(self) -> str:
        """Treat the tag as content; returns the text after it."""
        tag = BEGIN if self._held.startswith(BEGIN) else self._tags.name
        self._events += self._content.write(tag)
        return self._to_content(self._held[len(tag) :])

    def _expect(self, *marks: str) -> None:
        self._finder, self._text = MarkFinder([*dict.fromkeys(marks)]), []

    def _read_call(self, text: str) -> str:
        before, mark, text = self._finder.feed(text)
        self._text.append(before)
        tags = self._tags
        if mark is None:
            return ""
        if mark == tags.key:
            self._expect(tags.key_end)
        elif mark == tags.key_end:
            self._key = "".join(self._text).strip()
            self._expect(tags.value or tags.value_end)
        elif mark == tags.value:
            self._expect(tags.value_end)
        elif mark == tags.value_end:
            if not self._write("".join(self._text)):
                self._text.append(mark)
                return text
            self._expect(tags.key, tags.end, END)
        else:
            self._end_call()
            if mark == END:
                return self._to_content(text)
            self._held, self._read = "", self._read_end
        return text

    def _write(self, value: str) -> bool:
        """Write an argument; false if the tag after it is inside a string of its JSON."""
        if self._tags.newlines:
            value = value.removeprefix("\n").removesuffix("\n")
        function = self._functions.get(self._name, {})
        properties = function.get("properties")
        schema = properties.get(self._key) if isinstance(properties, dict) else None
        types = types_of(schema, function)
        within = value.count(self._tags.value_end) < _MOST_WITHIN and "string" not in types
        if within and ends_in_string(value):
            return False
        self._add_argument(as_json(self._key, _STRING), as_json(value, types))
        return True

    def _read_end(self, text: str) -> str:
        """Drop `END`, unless it is the end of the call itself."""
        self._held += text
        start = self._held.lstrip()
        if END.startswith(start) and start != END:
            return ""
        if start.startswith(END):
            self._held = start[len(END) :]
        return self._to_content(self._held)

    def _to_content(self, text: str) -> str:
        self._held, self._read = "", self._read_content
        self._finder = MarkFinder(self._content_marks)
        return text
