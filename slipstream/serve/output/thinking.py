"""Output formats with reasoning between two marks, as of Qwen3, GLM and DeepSeek R1."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, Final

from slipstream.core.structured import StructuredOutput, Thought
from slipstream.models.chat_template import ChatTemplate
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.errors import bad_request
from slipstream.serve.output.parts import OutputConstraints, OutputPart, Reading, TokenParser
from slipstream.serve.token_texts import TokenReader, TokenTexts
from slipstream.serve.tools.events import (
    AnswerEvent,
    CallBegun,
    CallEnded,
    Content,
    MarkFinder,
    Reasoning,
)

_BREAK = "\n"


class Place(Enum):
    """The parser's state: before the thought, within it, or after it."""

    START = "start"
    THOUGHT = "thought"
    CONTENT = "content"


class ThinkingParser(TokenParser):
    """Parses an answer that may begin with a thought (reasoning), followed by content and calls.

    If both marks are single tokens, they are found by token id, so that text cannot be mistaken for
    a mark; otherwise they are found in the text. Line breaks around a thought are dropped.

    Args:
        marks: texts that open and close a thought.
        tokens: their ids; None if the vocabulary lacks one.
        place: where the output begins; in a thought, it may have the opening mark all the same.
        ends: end tokens of the model.
    """

    def __init__(
        self,
        marks: tuple[str, str],
        tokens: tuple[int, int] | None,
        place: Place,
        texts: TokenTexts,
        reading: Reading,
        ends: Collection[int] = (),
    ) -> None:
        super().__init__(reading, ends)
        self._marks, self._tokens = marks, tokens
        self._closing = MarkFinder(() if tokens else marks[1:])
        self._thinks = place is Place.THOUGHT
        self._place = Place.CONTENT if place is Place.CONTENT else Place.START
        self._texts, self._calls = texts, reading.calls
        self._in_call = self._by_call = False  # by: between its marks, or after it
        self._reader = self._new_reader()
        self._held = ""  # at the start: what may begin a mark; in a thought: line breaks
        self._at_edge = True  # of a text: line breaks are not part of it

    def finish(self) -> list[AnswerEvent]:
        """The events of held-back text; an incomplete call stays open."""
        if self._place is Place.START:
            self._leave_start()
        elif self._place is Place.THOUGHT:
            self._think(self._closing.finish())
        self._flush_stops()
        if self._calls is not None:
            self._events += self._calls.finish()
        return self._take_events()

    def _take(self, token: int) -> OutputPart:
        marks = self._tokens
        if self._place is not Place.CONTENT and marks is not None and token in marks:
            self._pass(opens=token == marks[0])
            return OutputPart.MARKUP
        if token in self._reading.call_marks:
            self._by_call = True
        return self._read(self._reader.take(token))

    def _read(self, text: str) -> OutputPart:
        if self._place is Place.START:
            return self._look_for_mark(text)
        if self._place is Place.CONTENT:
            return self._answer(text)
        before, mark, rest = self._closing.feed(text)
        self._think(before)
        if mark is None:
            return OutputPart.REASONING
        self._pass(opens=False)
        return self._answer(rest) if rest else OutputPart.MARKUP

    def _look_for_mark(self, text: str) -> OutputPart:
        self._held += text
        begun = self._held.lstrip(_BREAK)
        for opens, mark in zip((True, False), self._marks, strict=True):
            if not self._tokens and begun.startswith(mark):
                self._pass(opens)
                rest = begun.removeprefix(mark)
                return self._read(rest) if rest else OutputPart.MARKUP
        if not begun or (not self._tokens and any(it.startswith(begun) for it in self._marks)):
            return OutputPart.REASONING if self._thinks else OutputPart.MARKUP
        return self._leave_start()

    def _leave_start(self) -> OutputPart:
        """Leave the start: the output does not begin with a mark."""
        text, self._held = self._held, ""
        if self._thinks:
            self._place = Place.THOUGHT
            return self._read(text)
        self._place, self._at_edge = Place.CONTENT, False
        return self._answer(text)

    def _pass(self, opens: bool) -> None:
        """Handle a mark, which ends the text before it."""
        self._thinks, self._at_edge, self._held = opens, True, ""
        self._place = Place.THOUGHT if opens else Place.CONTENT
        self._reader = self._new_reader()

    def _think(self, text: str) -> None:
        text = self._held + text
        if self._at_edge:
            text = text.lstrip(_BREAK)
        kept = text.rstrip(_BREAK)
        self._held = text[len(kept) :]
        if kept:
            self._at_edge = False
            self._events.append(Reasoning(kept))

    def _answer(self, text: str) -> OutputPart:
        if self._at_edge:
            text = text.lstrip(_BREAK)
            if not text:
                return OutputPart.MARKUP
            self._at_edge = False
        first, in_call = len(self._events), self._in_call
        self._write_content(text)
        if self._calls is None:
            return OutputPart.CONTENT
        for event in self._events[first:]:
            if isinstance(event, CallBegun | CallEnded):
                in_call, self._in_call = True, isinstance(event, CallBegun)
            self._by_call = not isinstance(event, Content)
        if in_call:
            return OutputPart.CALL
        return OutputPart.MARKUP if self._by_call else OutputPart.CONTENT

    def _add_content(self, text: str) -> None:
        self._events += [Content(text)] if self._calls is None else self._calls.feed(text)

    def _new_reader(self) -> TokenReader:
        # The parser of calls needs special tokens, and removes them from the content.
        keeps = self._reading.keeps_special and not self._thinks
        return TokenReader(self._texts, self._reading.skip_special and not keeps)


_TAIL = 16  # tokens at the end of a prompt that may hold a mark and white space
_KEY = "reasoning_content"


@dataclass(frozen=True)
class ThinkingStyle:
    """The marks and the name of one thinking format.

    Attributes:
        unopened: an answer begins with a thought even where neither it nor the prompt opens one.
    """

    name: str
    opening: str = "<think>"
    closing: str = "</think>"
    unopened: bool = False


STYLES: Final = (
    ThinkingStyle("qwen3"),
    ThinkingStyle("glm45"),
    ThinkingStyle("deepseek_r1", unopened=True),
    ThinkingStyle("mistral", "[THINK]", "[/THINK]"),
    # vLLM's names for other models in the format of the first.
    *map(ThinkingStyle, ("deepseek_v3", "glm47", "mimo")),
)


@dataclass(frozen=True)
class ThinkingFormat:
    """An `OutputFormat`, whose content may hold calls of any `ToolFormat`."""

    style: ThinkingStyle
    tokenizer: Tokenizer
    template: ChatTemplate
    ends: Sequence[int] = ()
    calls: None = None
    # A mark in a message cannot make it that of another role, and instructions on how to think
    # have to name the marks.
    marks: Sequence[int] = ()

    @property
    def name(self) -> str:
        return self.style.name

    @cached_property
    def tokens(self) -> tuple[int, int] | None:
        """The token ids of the marks; None if one is not in the vocabulary."""
        opening = self.tokenizer.token_to_id(self.style.opening)
        closing = self.tokenizer.token_to_id(self.style.closing)
        return None if opening is None or closing is None else (opening, closing)

    def parser(self, texts: TokenTexts, reading: Reading) -> ThinkingParser:
        marks = (self.style.opening, self.style.closing)
        place = self._place(reading.prompt, reading.continues)
        return ThinkingParser(marks, self.tokens, place, texts, reading, self.ends)

    def framed(
        self, constraints: OutputConstraints, prompt: Sequence[int], continues: bool
    ) -> StructuredOutput | None:
        content, place = constraints.content, self._place(prompt, continues)
        if constraints.calls is not None:
            content = StructuredOutput(grammar=constraints.calls)
        if place is Place.CONTENT or (content is None and constraints.budget is None):
            return content
        begun, tokens = place is Place.THOUGHT, self.tokens
        if tokens is not None:
            encoded = [self.tokenizer.encode("\n" * count, False) for count in range(1, 5)]
            spaces = [ids[0] for ids in encoded if len(ids) == 1]
            thought = Thought(
                opening=tokens[0],
                closing=tokens[1],
                begun=begun,
                spaces=spaces,
                budget=constraints.budget,
            )
            return (
                StructuredOutput(thought=thought)
                if content is None
                else replace(content, thought=thought)
            )
        opening, closing = self.style.opening, self.style.closing
        if constraints.budget is not None:
            raise bad_request(
                f"thinking_token_budget needs {opening} and {closing} as tokens, which the "
                "vocabulary of this model lacks; leave it out",
                "thinking_token_budget",
            )
        assert content is not None
        return replace(content, frame=_frame(opening, closing, begun))

    def remember(self, message: dict[str, Any], reasoning: str) -> str:
        if self.template.mentions(_KEY):
            message[_KEY] = reasoning
            return _KEY
        # Such templates take thoughts out of the content, as the model wrote them.
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "\n".join(part["text"] for part in content)
        style = self.style
        message["content"] = f"{style.opening}\n{reasoning}\n{style.closing}\n\n{content}"
        return style.closing

    def _place(self, prompt: Sequence[int], continues: bool) -> Place:
        opening, closing = self.style.opening, self.style.closing
        if continues:  # thoughts of earlier messages are closed
            return Place.THOUGHT if self._is_open(prompt) else Place.CONTENT
        text = self.tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
        if text.endswith(closing):
            return Place.CONTENT
        opened = text.endswith(opening) or self.style.unopened
        return Place.THOUGHT if opened else Place.START

    def _is_open(self, prompt: Sequence[int]) -> bool:
        """Whether the last mark of a prompt opens a thought."""
        if self.tokens is None:
            text = self.tokenizer.decode(prompt, skip_special_tokens=False)
            return text.rfind(self.style.opening) > text.rfind(self.style.closing)
        return next((it for it in reversed(prompt) if it in self.tokens), None) == self.tokens[0]


def _frame(opening: str, closing: str, begun: bool) -> str:
    """A frame of `StructuredOutput` for marks that are texts: the rule `body` begins after the
    thought."""
    gap = '("\\n" | "\\n\\n")?'
    first, last = (re.escape(mark).replace("/", "\\/") for mark in (opening, closing))
    start = f"thought {gap}" if begun else f"({gap} thought {gap})?"
    rule = f"thought[lazy]: /{'' if begun else first}(.|\\n)*{last}/"
    return f"start: {start} body\n{rule}"
