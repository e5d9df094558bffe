"""Split answers in the harmony format into reasoning, content and tool calls, token by token."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from slipstream.models.harmony import HarmonyTokens
from slipstream.serve.output.harmony_header import Header
from slipstream.serve.output.parts import Part, Reading
from slipstream.serve.output.token_parser import TokenParser
from slipstream.serve.token_texts import TokenReader, TokenTexts
from slipstream.serve.tools.events import Arguments, CallBegun, CallEnded, Reasoning
from slipstream.serve.tools.marked_text import MarkFinder


class HarmonyParser(TokenParser):
    """A parser of messages, whose marks are tokens, so that no text can pass for one.

    Messages in the channel analysis are reasoning, and so is what is addressed to neither the user
    nor a function. Calls are what is addressed to a function. All else is content, also where marks
    are missing. Texts of several messages stand on lines of their own.
    """

    def __init__(self, tokens: HarmonyTokens, texts: TokenTexts, reading: Reading) -> None:
        super().__init__(replace(reading, stop=()))
        self._tokens, self._texts = tokens, texts
        self._marks = frozenset(tokens.marks)
        self._header = Header()
        self._part: Part | None = None  # of the open message; None in a header
        self._reader = self._new_reader()
        self._said: set[Part] = set()  # whose next message begins a new line
        self._has_text = False  # the open message
        self._functions: Collection[str] | None = None
        for token in _begun(reading.prompt, tokens.start):
            self._take(token)
        self._events.clear()
        self._said.clear()
        self._stops = MarkFinder(reading.stop)
        self._functions = reading.functions

    @property
    def begins_anew(self) -> bool:
        """Whether a message's role is all that there is of it."""
        return self._part is None and self._header.channel is None and self._header.role != ""

    def _take(self, token: int) -> Part:
        if token not in self._marks:
            text = self._reader.take(token)
            if self._part is None:
                self._header.write(text)
                self._look_for_text()
            else:
                self._write(text)
            return self._part or Part.MARKUP
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
        return Part.MARKUP

    def _look_for_text(self) -> None:
        text = self._header.text()
        if text is not None:
            self._begin_message()
            self._write(text)

    def _begin_message(self) -> None:
        self._reader, self._has_text = self._new_reader(), False
        name = self._header.called(self._functions)
        if name is None:
            self._part = self._header.part()
        else:
            self._part = Part.CALL
            self._events.append(CallBegun(name))

    def _end_message(self) -> None:
        if self._part is Part.CALL:
            if not self._has_text:
                self._events.append(Arguments("{}"))
            self._events.append(CallEnded())
        self._let_out()
        if self._part is not None and self._has_text:
            self._said.add(self._part)
        self._part, self._header, self._reader = None, Header(), self._new_reader()

    def _write(self, text: str) -> None:
        if not text:
            return
        if not self._has_text and self._part in self._said and self._part is not Part.CALL:
            text = "\n" + text
        self._has_text = True
        if self._part is Part.CALL:
            self._events.append(Arguments(text))
        elif self._part is Part.REASONING:
            self._events.append(Reasoning(text))
        else:
            self._write_content(text)

    def _new_reader(self) -> TokenReader:
        return TokenReader(self._texts, self._reading.skip_special)


def _begun(prompt: Sequence[int], start: int) -> Sequence[int]:
    """The tokens of a prompt's last message, behind its START."""
    for place in range(len(prompt) - 1, -1, -1):
        if prompt[place] == start:
            return prompt[place + 1 :]
    return ()
