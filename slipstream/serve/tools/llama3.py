"""Llama 3: the whole answer is {"name": ..., "parameters": {...}}, or several after semicolons."""

from collections.abc import Collection, Sequence
from typing import Final

from slipstream.serve.tools.call_format import ToolFormat
from slipstream.serve.tools.call_reader import JSON_SPACE, CallReader
from slipstream.serve.tools.call_rules import Literals, json_calls, more_calls
from slipstream.serve.tools.events import Content, ToolEvent

TAG = "<|python_tag|>"  # optional first token; in the text only if special tokens are kept


class Llama3Parser:
    """Parses answers that are calls. There are no marks: an object that names a function is one."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""  # text that may turn out to be a call
        self._call: CallReader | None = None
        self._is_text = self._has_called = False

    def feed(self, text: str) -> Sequence[ToolEvent]:
        events: list[ToolEvent] = []
        while text:
            if self._is_text:
                events.append(Content(text))
                break
            text = self._look(text) if self._call is None else self._read_call(text, events)
        return events

    def finish(self) -> Sequence[ToolEvent]:
        if self._call is not None and not self._call.begun:
            return [Content(self._held + self._call.raw)]
        if self._call is None and self._held and not self._has_called:
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
            self._call = CallReader(self._names)
            return start
        held, self._held = self._held, ""
        self._is_text = True
        return held

    def _read_call(self, text: str, events: list[ToolEvent]) -> str:
        call = self._call
        assert call is not None
        events.extend(call.feed(text))
        if call.done and call.begun:
            self._call, self._has_called, self._held = None, True, ""
            return call.rest
        if call.failed:
            self._call, self._is_text = None, True
            held, self._held = self._held, ""
            return call.rest if call.begun else held + call.raw
        return ""


def _only(_: Literals, several: bool) -> list[str]:
    return ["start: call" + more_calls('"; " call', several)]


def _in_text(_: Literals) -> list[str]:
    """Either the whole answer is calls, or it has none."""
    return ['start: call ("; " call)* | other', r"other: /([^{\s](.|\n)*)?/"]


FORMAT: Final = ToolFormat(
    name="llama3_json",
    marks=(),
    parser=lambda functions, _: Llama3Parser(functions),
    shown_by=lambda _, tokenizer: tokenizer.token_to_id(TAG) is not None,
    only=_only,
    in_text=_in_text,
    calls=lambda _, functions: json_calls(functions, "parameters"),
)
