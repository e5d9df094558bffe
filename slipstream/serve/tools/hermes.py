"""Qwen, Hermes and others: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from collections.abc import Sequence
from typing import Final

from slipstream.models.chat_template import ChatTemplate
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.tools.call_format import ToolFormat
from slipstream.serve.tools.call_reader import CallReader
from slipstream.serve.tools.call_rules import Literals, json_calls, more_calls
from slipstream.serve.tools.events import (
    Content,
    ContentWriter,
    MarkFinder,
    StatefulParser,
    ToolEvent,
)

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(StatefulParser):
    """Parses calls between marks, with text around them."""

    def __init__(self, dropped: Sequence[str] = ()) -> None:
        super().__init__()
        self._finder = MarkFinder([BEGIN, *(it for it in dropped if it not in (BEGIN, END))])
        self._closing = MarkFinder([END])
        self._content = ContentWriter()
        self._call = CallReader()
        self._read = self._read_content

    def finish(self) -> Sequence[ToolEvent]:
        if self._read == self._read_call and not self._call.begun:
            return [*self._content.flush(), Content(BEGIN + self._call.raw)]
        return [*self._content.write(self._finder.finish()), *self._content.flush()]

    def _read_content(self, text: str) -> str:
        before, mark, text = self._finder.feed(text)
        self._events += self._content.write(before)
        if mark == BEGIN:
            self._content.break_off()
            self._call, self._read = CallReader(), self._read_call
        return text

    def _read_call(self, text: str) -> str:
        call = self._call
        self._events += call.feed(text)
        if call.failed and not call.begun:
            self._events += self._content.write(BEGIN)
            self._read = self._read_content
            return call.raw
        if call.failed or call.done:
            self._read = self._drop_to_end
            return call.rest
        return ""

    def _drop_to_end(self, text: str) -> str:
        _, mark, text = self._closing.feed(text)
        if mark is not None:
            self._read = self._read_content
        return text


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
