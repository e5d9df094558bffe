"""Qwen, Hermes and others: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from collections.abc import Sequence
from typing import Final

from slipstream.models.chat_template import ChatTemplate
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.tools.call_format import ToolFormat
from slipstream.serve.tools.call_reader import CallReader
from slipstream.serve.tools.call_rules import Literals, json_calls, more_calls
from slipstream.serve.tools.events import Content, ContentWriter, MarkFinder, ToolEvent

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser:
    """Parses calls between marks, with text around them."""

    def __init__(self, dropped: Sequence[str] = ()) -> None:
        self._finder = MarkFinder([BEGIN, *(it for it in dropped if it not in (BEGIN, END))])
        self._content = ContentWriter()
        self._call: CallReader | None = None
        self._closing: MarkFinder | None = None  # after a call: text up to END is dropped

    def feed(self, text: str) -> Sequence[ToolEvent]:
        events: list[ToolEvent] = []
        while text:
            if self._closing is not None:
                _, mark, text = self._closing.feed(text)
                if mark is not None:
                    self._closing = None
            elif self._call is not None:
                text = self._read_call(self._call, text, events)
            else:
                before, mark, text = self._finder.feed(text)
                events.extend(self._content.write(before))
                if mark == BEGIN:
                    self._content.break_off()
                    self._call = CallReader()
        return events

    def finish(self) -> Sequence[ToolEvent]:
        if self._call is not None and not self._call.begun:
            return [*self._content.flush(), Content(BEGIN + self._call.raw)]
        held = "" if self._closing is not None else self._finder.finish()
        return [*self._content.write(held), *self._content.flush()]

    def _read_call(self, call: CallReader, text: str, events: list[ToolEvent]) -> str:
        """Returns the text after the call."""
        events.extend(call.feed(text))
        if call.failed:
            self._call = None
            if call.begun:
                self._closing = MarkFinder([END])
                return call.rest
            events.extend(self._content.write(BEGIN))
            return call.raw
        if call.done:
            self._call, self._closing = None, MarkFinder([END])
            return call.rest
        return ""


def _shown_by(template: ChatTemplate, _: Tokenizer) -> bool:
    # Other formats use the same tags, but have more tags inside.
    return template.mentions(BEGIN) and not any(map(template.mentions, ("<function=", "<arg_key>")))


def _only(literal: Literals, several: bool) -> list[str]:
    more = more_calls('"\\n" marked', several)
    return [f"start: marked{more}", f'marked: {literal(BEGIN)} "\\n" call "\\n" {literal(END)}']


def _in_text(literal: Literals) -> list[str]:
    inner = f'inner: "\\n" call "\\n" {literal(END)}'
    return ["start: (begun inner)* TEXT", literal.up_to_mark("begun", BEGIN), inner]


FORMAT: Final = ToolFormat(
    name="hermes",
    marks=(BEGIN, END),
    parser=lambda _, dropped: HermesParser(dropped),
    shown_by=_shown_by,
    only=_only,
    in_text=_in_text,
    calls=lambda _, functions: json_calls(functions, "arguments"),
)
