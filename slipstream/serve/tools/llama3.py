"""Llama 3: the whole answer is {"name": ..., "parameters": {...}}, or several after semicolons."""

from collections.abc import Collection, Sequence
from typing import Final

from slipstream.serve.tools.call_format import ToolFormat
from slipstream.serve.tools.call_reader import JSON_SPACE, CallReader
from slipstream.serve.tools.call_rules import Literals, json_calls, more_calls
from slipstream.serve.tools.events import Content, StatefulParser, ToolEvent

TAG = "<|python_tag|>"  # optional first token; in the text only if special tokens are kept


class Llama3Parser(StatefulParser):
    """Parses answers that are calls. There are no marks: an object that names a function is one."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._call = CallReader(names)
        self._has_called = False
        self._read = self._look

    def finish(self) -> Sequence[ToolEvent]:
        if self._read == self._read_call and not self._call.begun:
            return [Content(self._held + self._call.raw)]
        if self._read == self._look and self._held and not self._has_called:
            return [Content(self._held)]
        return []

    def _look(self, text: str) -> str:
        """Decide whether a call begins here."""
        self._held += text
        start = self._held.lstrip(JSON_SPACE + ";" if self._has_called else JSON_SPACE)
        if TAG.startswith(start):
            return ""
        start = start.removeprefix(TAG).lstrip(JSON_SPACE)
        if not start:
            return ""
        if start.startswith("{"):
            self._held = self._held[: len(self._held) - len(start)]
            self._call, self._read = CallReader(self._names), self._read_call
            return start
        return self._to_text()

    def _read_call(self, text: str) -> str:
        call = self._call
        self._events += call.feed(text)
        if call.done and call.begun:
            self._has_called, self._held, self._read = True, "", self._look
            return call.rest
        if call.failed:
            held = self._to_text()
            return call.rest if call.begun else held + call.raw
        return ""


def _in_text(_: Literals) -> list[str]:
    """Either the whole answer is calls, or it has none."""
    return ['start: call ("; " call)* | other', r"other: /([^{\s](.|\n)*)?/"]


FORMAT: Final = ToolFormat(
    name="llama3_json",
    marks=(),
    parser=lambda functions, _: Llama3Parser(functions),
    shown_by=lambda _, tokenizer: tokenizer.token_to_id(TAG) is not None,
    only=lambda _, several: ["start: call" + more_calls('"; " call', several)],
    in_text=_in_text,
    calls=lambda _, functions: json_calls(functions, "parameters"),
)
