"""Split answers that begin with a thought into reasoning, content and tool calls."""

from collections.abc import Collection
from enum import Enum

from slipstream.serve.output.parts import Part, Reading
from slipstream.serve.output.token_parser import TokenParser
from slipstream.serve.token_texts import TokenReader, TokenTexts
from slipstream.serve.tools.events import AnswerEvent, CallBegun, CallEnded, Content, Reasoning
from slipstream.serve.tools.marked_text import MarkFinder

_BREAK = "\n"


class Place(Enum):
    """Where an output stands: before or within its thought, or behind it."""

    START = "start"
    THOUGHT = "thought"
    CONTENT = "content"


class ThinkingParser(TokenParser):
    """A parser of one thought, if there is any, and of what follows.

    Marks that are tokens of the vocabulary are found by their ids, so that no other text passes for
    one; else they are found in the text. Line breaks around a thought belong to neither text.

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
        self._in_call = self._by_call = False  # by: between its marks, or behind it
        self._reader = self._new_reader()
        self._held = ""  # at the start: what may begin a mark; in a thought: line breaks
        self._at_edge = True  # of a text: line breaks are not part of it

    def finish(self) -> list[AnswerEvent]:
        """What was held back; a call that was cut off stays open."""
        if self._place is Place.START:
            self._leave_start()
        elif self._place is Place.THOUGHT:
            self._think(self._closing.finish())
        self._let_out()
        if self._calls is not None:
            self._events += self._calls.finish()
        return self._told()

    def _take(self, token: int) -> Part:
        marks = self._tokens
        if self._place is not Place.CONTENT and marks is not None and token in marks:
            self._pass(opens=token == marks[0])
            return Part.MARKUP
        if token in self._reading.call_marks:
            self._by_call = True
        return self._read(self._reader.take(token))

    def _read(self, text: str) -> Part:
        if self._place is Place.START:
            return self._look_for_mark(text)
        if self._place is Place.CONTENT:
            return self._answer(text)
        before, mark, rest = self._closing.feed(text)
        self._think(before)
        if mark is None:
            return Part.REASONING
        self._pass(opens=False)
        return self._answer(rest) if rest else Part.MARKUP

    def _look_for_mark(self, text: str) -> Part:
        self._held += text
        begun = self._held.lstrip(_BREAK)
        for opens, mark in zip((True, False), self._marks, strict=True):
            if not self._tokens and begun.startswith(mark):
                self._pass(opens)
                rest = begun.removeprefix(mark)
                return self._read(rest) if rest else Part.MARKUP
        if not begun or (not self._tokens and any(it.startswith(begun) for it in self._marks)):
            return Part.REASONING if self._thinks else Part.MARKUP
        return self._leave_start()

    def _leave_start(self) -> Part:
        """There is no mark where the output begins."""
        text, self._held = self._held, ""
        if self._thinks:
            self._place = Place.THOUGHT
            return self._read(text)
        self._place, self._at_edge = Place.CONTENT, False
        return self._answer(text)

    def _pass(self, opens: bool) -> None:
        """A mark ends the text before it."""
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

    def _answer(self, text: str) -> Part:
        if self._at_edge:
            text = text.lstrip(_BREAK)
            if not text:
                return Part.MARKUP
            self._at_edge = False
        first, in_call = len(self._events), self._in_call
        self._write_content(text)
        if self._calls is None:
            return Part.CONTENT
        for event in self._events[first:]:
            if isinstance(event, CallBegun | CallEnded):
                in_call, self._in_call = True, isinstance(event, CallBegun)
            self._by_call = not isinstance(event, Content)
        if in_call:
            return Part.CALL
        return Part.MARKUP if self._by_call else Part.CONTENT

    def _say(self, text: str) -> None:
        self._events += [Content(text)] if self._calls is None else self._calls.feed(text)

    def _new_reader(self) -> TokenReader:
        # The parser of calls takes special tokens out of the content.
        keeps = self._reading.keeps_special and not self._thinks
        return TokenReader(self._texts, self._reading.skip_special and not keeps)
