"""Qwen, Hermes and others: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from collections.abc import Sequence

from slipstream.serve.tools.call_reader import CallReader
from slipstream.serve.tools.events import Content, ToolEvent
from slipstream.serve.tools.marked_text import ContentWriter, MarkFinder

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser:
    """Parses calls between marks, with text around them.

    Args:
        dropped: special tokens that are not part of the content.
    """

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
