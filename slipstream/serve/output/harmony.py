"""Harmony, the output format of gpt-oss models: grammars and parser."""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.core.structured import StructuredOutput
from slipstream.models.harmony import HarmonyTokens
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.errors import bad_request
from slipstream.serve.output.parts import (
    OutputConstraints,
    OutputPart,
    ParsedOutput,
    Reading,
    TokenParser,
)
from slipstream.serve.token_texts import TokenReader, TokenTexts
from slipstream.serve.tools.call_format import Schemas, long_id
from slipstream.serve.tools.call_rules import ANY_ARGUMENTS, json_value
from slipstream.serve.tools.events import Arguments, CallBegun, CallEnded, MarkFinder, Reasoning
from slipstream.serve.updates import Delta

_MOST_CHARACTERS = 256
_ROLES = ("assistant", "user", "system", "developer", "tool")
_ROLE = re.compile(rf"\s*({'|'.join(_ROLES)}|functions\.[\w.-]{{0,64}})?")
_REST = re.compile(r"\s*(t|to|to=\s*\S{0,128})?\s*")
# Models write `to= functions.name` now and then. Without the prefix, it may be the content's type.
_RECIPIENT = re.compile(r"(?:^|\s)to=(?:\s+(?=functions\.))?(\S+)")
_FUNCTION = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_PREFIX = "functions."


class Header:
    """The header of a message, read token by token.

    Attributes:
        role, channel: the texts so far, either of which may include a recipient; `channel` is None
            until it begins.
    """

    def __init__(self) -> None:
        self.role = ""
        self.channel: str | None = None

    def begin_channel(self) -> None:
        self.channel = "" if self.channel is None else self.channel + " "

    def write(self, text: str) -> None:
        if self.channel is None:
            self.role += text
        else:
            self.channel += text

    def text(self) -> str | None:
        """The text read so far, if it cannot be a header but is content without marks; else None.

        Poorly trained models answer without any marks, or never end a header.
        """
        if self.channel is not None:
            return self.channel if len(self.channel) > _MOST_CHARACTERS else None
        role = self.role
        named = _ROLE.match(role)
        assert named is not None, "it matches anything"
        rest = role[named.end() :]
        if _REST.fullmatch(rest) and len(role) <= _MOST_CHARACTERS:
            return None
        if role.strip() and any(it.startswith(role.strip()) for it in (*_ROLES, _PREFIX)):
            return None
        return rest

    def part(self) -> OutputPart:
        """The part that the message's text is, if it is not a call."""
        named = _ROLE.match(self.role)
        role = (named[1] if named else None) or "assistant"
        channel = _RECIPIENT.sub(" ", self.channel or "").lower().split()
        if role != "assistant" or self._recipient() is not None or channel[:1] == ["analysis"]:
            return OutputPart.REASONING
        return OutputPart.CONTENT

    def called(self, functions: Collection[str] | None) -> str | None:
        """The function that the message calls, if it calls one.

        Args:
            functions: functions that may be called; None if calls are not allowed. An unknown name
                is returned, too, if the recipient is marked as a function.
        """
        recipient = self._recipient()
        if functions is None or recipient is None:
            return None
        if recipient in functions:
            return recipient
        name = recipient.removeprefix(_PREFIX)
        return name if name != recipient and _FUNCTION.fullmatch(name) else None

    def _recipient(self) -> str | None:
        found = _RECIPIENT.search(f"{self.role} {self.channel or ''}")
        return None if found is None or found[1] in ("user", "assistant") else found[1]


class HarmonyParser(TokenParser):
    """Parses harmony messages. Marks are special tokens, so text cannot be mistaken for a mark.

    Messages to a function are calls. Messages in the channel analysis, or to any other recipient
    but user and assistant, are reasoning. All else is content, also if marks are missing. The texts
    of several messages are joined by line breaks.
    """

    def __init__(self, tokens: HarmonyTokens, texts: TokenTexts, reading: Reading) -> None:
        super().__init__(replace(reading, stop=()))
        self._tokens, self._texts = tokens, texts
        self._marks = frozenset(tokens.marks)
        self._header = Header()
        self._part: OutputPart | None = None  # of the open message; None in a header
        self._reader = self._new_reader()
        self._begun_parts: set[OutputPart] = set()  # whose next message begins a new line
        self._has_text = False  # the open message
        self._functions: Collection[str] | None = None
        for token in _open_message(reading.prompt, tokens.start):
            self._take(token)
        self._events.clear()
        self._begun_parts.clear()
        self._stops = MarkFinder(reading.stop)
        self._functions = reading.functions

    def feed(self, delta: Delta) -> ParsedOutput:
        """Parse further tokens; an output that was not cut short has ended its last message."""
        parsed = super().feed(delta)
        if delta.finish_reason != "stop":
            return parsed
        self._end_message()
        return replace(parsed, events=[*parsed.events, *self._take_events()])

    @property
    def begins_anew(self) -> bool:
        """Whether only the role of the current message has been read."""
        return self._part is None and self._header.channel is None and self._header.role != ""

    def _take(self, token: int) -> OutputPart:
        if token not in self._marks:
            text = self._reader.take(token)
            if self._part is None:
                self._header.write(text)
                content = self._header.text()
                if content is not None:
                    self._begin_message()
                    self._write(content)
            else:
                self._write(text)
            return self._part or OutputPart.MARKUP
        tokens = self._tokens
        if token == tokens.message:
            if self._part is None:
                self._begin_message()
        elif token == tokens.constrain:
            if self._part is None:
                self._header.write(" ")
        elif token == tokens.channel:
            if self._part is not None:
                self._end_message()
            self._header.begin_channel()
        else:  # a message ends, or begins
            self._end_message()
        return OutputPart.MARKUP

    def _begin_message(self) -> None:
        self._reader, self._has_text = self._new_reader(), False
        name = self._header.called(self._functions)
        if name is None:
            self._part = self._header.part()
        else:
            self._part = OutputPart.CALL
            self._events.append(CallBegun(name))

    def _end_message(self) -> None:
        if self._part is OutputPart.CALL:
            if not self._has_text:
                self._events.append(Arguments("{}"))
            self._events.append(CallEnded())
        self._flush_stops()
        if self._part is not None and self._has_text:
            self._begun_parts.add(self._part)
        self._part, self._header, self._reader = None, Header(), self._new_reader()

    def _write(self, text: str) -> None:
        if not text:
            return
        if (
            not self._has_text
            and self._part in self._begun_parts
            and self._part is not OutputPart.CALL
        ):
            text = "\n" + text
        self._has_text = True
        if self._part is OutputPart.CALL:
            self._events.append(Arguments(text))
        elif self._part is OutputPart.REASONING:
            self._events.append(Reasoning(text))
        else:
            self._write_content(text)

    def _new_reader(self) -> TokenReader:
        return TokenReader(self._texts, self._reading.skip_special)


def _open_message(prompt: Sequence[int], start: int) -> Sequence[int]:
    """The tokens of the prompt's last message, after its start token."""
    for place in range(len(prompt) - 1, -1, -1):
        if prompt[place] == start:
            return prompt[place + 1 :]
    return ()


_FREE = ["body: TEXT"]


@dataclass(frozen=True)
class Harmony:
    """The harmony `OutputFormat`, in which calls are messages to functions.

    Grammars begin after the assistant's role. They leave reasoning unconstrained, and constrain
    the text of the last message.
    """

    tokens: HarmonyTokens
    tokenizer: Tokenizer
    name = "openai_gptoss"

    @property
    def calls(self) -> "HarmonyCalls":
        return HarmonyCalls(self.tokens)

    @property
    def marks(self) -> Sequence[int]:
        return self.tokens.marks

    def parser(self, texts: TokenTexts, reading: Reading) -> HarmonyParser:
        return HarmonyParser(self.tokens, texts, reading)

    def framed(
        self, constraints: OutputConstraints, prompt: Sequence[int], continues: bool
    ) -> StructuredOutput | None:
        if constraints.budget is not None:
            raise bad_request(
                "the format of this model's answers does not support thinking_token_budget; leave "
                "it out, or give reasoning_effort",
                "thinking_token_budget",
            )
        if constraints.content is None and constraints.calls is None:
            return None
        if not self.parser(TokenTexts(self.tokenizer), Reading(prompt)).begins_anew:
            raise bad_request(
                "structured output and tools that are strict, required or named begin with a new "
                "message; leave continue_final_message and add_generation_prompt out",
                "messages",
            )
        if constraints.content is None:
            return StructuredOutput(grammar=constraints.calls)
        # A message in the channel commentary would put text before the structured content.
        answers = _answers(self.tokens, constraints.functions, channels='"analysis"', final=True)
        return replace(constraints.content, frame="\n".join(answers))

    def remember(self, message: dict[str, Any], reasoning: str) -> str:
        content = message.get("content")
        if content and message.get("tool_calls"):
            # Templates of gpt-oss treat content next to calls as reasoning, and refuse both.
            if not isinstance(content, str):
                content = "\n".join(part["text"] for part in content)
            reasoning, message["content"] = f"{reasoning}\n{content}", None
        message["thinking"] = reasoning
        return "thinking"


@dataclass(frozen=True)
class HarmonyCalls:
    """The `CallFormat` of harmony, in which a call ends the answer."""

    tokens: HarmonyTokens
    name = "openai"

    def call_id(self) -> str:
        return long_id()

    def only_calls(self, functions: Schemas, tokenizer: Tokenizer, several: bool) -> str:
        return "\n".join(_answers(self.tokens, functions, _INNER_CHANNELS, final=False))

    def calls_in_text(self, functions: Schemas, tokenizer: Tokenizer) -> str:
        return "\n".join([*_answers(self.tokens, functions, _INNER_CHANNELS, final=True), *_FREE])


_INNER_CHANNELS = '("analysis" | "commentary")'


def _answers(tokens: HarmonyTokens, functions: Schemas, channels: str, final: bool) -> list[str]:
    """Lark rules: messages in `channels`, then a call or the final message with the text `body`."""
    channel, message = f"<[{tokens.channel}]>", f"<[{tokens.message}]>"
    end = f'<[{tokens.end}]> <[{tokens.start}]> "assistant"'
    calls = [f"call_{index}" for index in range(len(functions))]
    rules = [
        f"start: inner* ({' | '.join([*(['final'] if final else []), *calls])})",
        f"inner: {channel} {channels} {message} TEXT {end}",
        "TEXT: /(.|\\n)*/",
    ]
    if final:
        rules.append(f'final: {channel} "final" {message} body')
    for call, (name, schema) in zip(calls, functions.items(), strict=True):
        recipient = f"to=functions.{name}"
        after_channel = f"{channel} {json.dumps(f'commentary {recipient} ')}"
        after_role = f'{json.dumps(f" {recipient}")} {channel} "commentary "'
        rules.append(
            f"{call}: ({after_channel} | {after_role}) <[{tokens.constrain}]> "
            f'"json" {message} {json_value(schema or ANY_ARGUMENTS)}'
        )
    return rules
