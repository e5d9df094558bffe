"""Mistral: [TOOL_CALLS], then [{"name": ..., "arguments": {...}}, ...] or name[ARGS]{...}."""

import json
import re
from collections.abc import Sequence
from typing import Final
from uuid import uuid4

from slipstream.models.chat_template import ChatTemplate
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.tools.call_format import Schemas, ToolFormat
from slipstream.serve.tools.call_reader import JSON_SPACE, CallReader, ValueScanner
from slipstream.serve.tools.call_rules import (
    ANY_ARGUMENTS,
    Literals,
    json_calls,
    json_value,
    more_calls,
)
from slipstream.serve.tools.events import (
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    ContentWriter,
    MarkFinder,
    StatefulParser,
    ToolEvent,
)

BEGIN, ARGS = "[TOOL_CALLS]", "[ARGS]"
# The newer format; some models write the name directly before the object.
_NAMED = re.compile(
    r"\s{0,8}([a-zA-Z0-9_.-]{1,64})(?:\[CALL_ID\][a-zA-Z0-9]{0,64})?"
    r"\s{0,8}(?:\[ARGS\]\s{0,8})?(?=\{)"
)
_MAY_BE_NAMED = re.compile(r"\s*[a-zA-Z0-9_.\-\[\]\s]{0,200}")


class MistralParser(StatefulParser):
    """Parses calls after a mark."""

    def __init__(self, dropped: Sequence[str] = ()) -> None:
        super().__init__()
        self._finder = MarkFinder([BEGIN, *(it for it in dropped if it != BEGIN)])
        self._content = ContentWriter()
        self._in_list = False
        self._call, self._value = CallReader(), ValueScanner()
        self._read = self._read_content

    def finish(self) -> Sequence[ToolEvent]:
        if self._read == self._read_call and not self._call.begun:
            return [Content(self._call.raw)]
        held = self._held if self._read == self._look else self._finder.finish()
        return [*self._content.write(held), *self._content.flush()]

    def _read_content(self, text: str) -> str:
        before, mark, text = self._finder.feed(text)
        self._events += self._content.write(before)
        if mark == BEGIN:
            self._content.break_off()
            self._in_list, self._read = False, self._look
        return text

    def _look(self, text: str) -> str:
        """Decide what follows the mark or a call."""
        text, self._held = self._held + text, ""
        start = text.lstrip(JSON_SPACE + ("," if self._in_list else ""))
        if not start:
            return ""
        if not self._in_list:
            if start.startswith(BEGIN):
                return start[len(BEGIN) :]
            if BEGIN.startswith(start):
                self._held = start
                return ""
            if start.startswith("["):
                self._in_list = True
                return start[1:]
        if start.startswith("{"):
            self._call, self._read = CallReader(), self._read_call
            return start
        if start.startswith("]") and self._in_list:
            self._read = self._read_content
            return start[1:]
        return self._look_for_name(start)

    def _look_for_name(self, text: str) -> str:
        named = _NAMED.match(text)
        if named is not None:
            self._events.append(CallBegun(named[1]))
            self._value, self._read = ValueScanner(), self._read_value
            return text[named.end() :]
        if _MAY_BE_NAMED.fullmatch(text):
            self._held = text
            return ""
        self._read = self._read_content
        return text

    def _read_call(self, text: str) -> str:
        call = self._call
        self._events += call.feed(text)
        if call.failed:
            self._read = self._read_content
            return call.rest if call.begun else call.raw
        if call.done:
            self._read = self._look
            return call.rest
        return ""

    def _read_value(self, text: str) -> str:
        end = self._value.scan(text, 0)
        self._events.append(Arguments(text[:end]))
        if self._value.done:
            self._events.append(CallEnded())
            self._read = self._look
        return text[end:]


def _shown_by(template: ChatTemplate, tokenizer: Tokenizer) -> bool:
    return tokenizer.token_to_id(BEGIN) is not None or template.mentions(BEGIN)


def _only(literal: Literals, several: bool) -> list[str]:
    if literal.knows(ARGS):
        return [f"start: marked{more_calls('marked', several)}", f"marked: {literal(BEGIN)} call"]
    more = more_calls('", " call', several)
    return [f'start: {literal(BEGIN)} "[" call{more} "]"']


def _in_text(literal: Literals) -> list[str]:
    begun = literal.up_to_mark("begun", BEGIN)
    if literal.knows(ARGS):
        return [f"start: begun call ({literal(BEGIN)} call)* | TEXT", begun]
    return ['start: begun "[" call (", " call)* "]" | TEXT', begun]


def _calls(literal: Literals, functions: Schemas) -> list[str]:
    """The newer format, if the vocabulary has the mark before its arguments."""
    if not literal.knows(ARGS):
        return json_calls(functions, "arguments")
    calls = [
        f"{json.dumps(name)} {literal(ARGS)} {json_value(schema or ANY_ARGUMENTS)}"
        for name, schema in functions.items()
    ]
    names = [f"call_{index}" for index in range(len(calls))]
    rules = [f"{name}: {call}" for name, call in zip(names, calls, strict=True)]
    return [f"call: {' | '.join(names)}", *rules]


FORMAT: Final = ToolFormat(
    name="mistral",
    marks=(BEGIN, ARGS),
    parser=lambda _, dropped: MistralParser(dropped),
    shown_by=_shown_by,
    only=_only,
    in_text=_in_text,
    calls=_calls,
    call_id=lambda: uuid4().hex[:9],  # the only length that Mistral's templates accept
)
