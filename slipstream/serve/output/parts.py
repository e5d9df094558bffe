"""The interfaces of output formats and answer parsers, and the base class of parsers that read
token ids."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from slipstream.core.structured import StructuredOutput
from slipstream.serve.token_texts import TokenTexts
from slipstream.serve.tools.call_format import CallFormat, Schemas
from slipstream.serve.tools.events import AnswerEvent, Content, MarkFinder, ToolParser
from slipstream.serve.updates import Delta


class OutputPart(Enum):
    """The part of an answer that a token belongs to; MARKUP is never sent to the client."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"
    MARKUP = "markup"


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """The result of parsing further output.

    Attributes:
        parts: one for each token that was read; None if the format does not mark parts.
        stop: the stop string that ended the content, if any; tokens after it were not read.
    """

    events: Sequence[AnswerEvent]
    parts: Sequence[OutputPart] | None = None
    stop: str | None = None


class AnswerParser(Protocol):
    """Parses one answer incrementally; the result does not depend on how output is split."""

    def feed(self, delta: Delta) -> ParsedOutput:
        """Parse further output."""

    def finish(self) -> Sequence[AnswerEvent]:
        """The remaining events; the answer is complete."""


@dataclass(frozen=True)
class Reading:
    """The settings for parsing one answer.

    Attributes:
        prompt: token ids of the prompt, which may contain the beginning of the answer.
        continues: whether the prompt ends within a message that the answer continues.
        functions: names of the functions that may be called; None if calls are not allowed.
        calls: parses tool calls in the content, for formats without calls of their own.
        call_marks: token ids of the marks around those calls.
        keeps_special: whether `calls` removes special tokens itself, since its marks are such.
        skip_special: whether special tokens are left out of the texts.
        stop: strings that end the content.
        include_stop: whether to keep the stop string in the content.
        min_tokens: stop strings are ignored in the first `min_tokens` tokens.
    """

    prompt: Sequence[int] = ()
    continues: bool = False
    functions: Collection[str] | None = None
    calls: ToolParser | None = None
    call_marks: Collection[int] = ()
    keeps_special: bool = False
    skip_special: bool = True
    stop: Sequence[str] = ()
    include_stop: bool = False
    min_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class OutputConstraints:
    """The constraints that a request puts on an answer.

    Attributes:
        content: a constraint on the content.
        calls: a grammar of tool calls; replaces `content`.
        functions: functions that may be called instead of giving a constrained content.
        budget: maximum number of reasoning tokens; None: no limit.
    """

    content: StructuredOutput | None = None
    calls: str | None = None
    functions: Schemas = field(default_factory=dict)
    budget: int | None = None


class OutputFormat(Protocol):
    """The output format of a family of models: reasoning, content and tool calls.

    Attributes:
        name: its name in --reasoning-parser.
        calls: the format of its tool calls; None if they are written in the content's text.
        marks: ids of its special tokens, which texts of a request must not be encoded to.
    """

    @property
    def name(self) -> str: ...
    @property
    def calls(self) -> CallFormat | None: ...
    @property
    def marks(self) -> Sequence[int]: ...

    def parser(self, texts: TokenTexts, reading: Reading) -> AnswerParser:
        """Create a parser for one answer."""

    def framed(
        self, constraints: OutputConstraints, prompt: Sequence[int], continues: bool
    ) -> StructuredOutput | None:
        """The constraint on the whole output, with reasoning and marks; None if there is none.

        Args:
            prompt, continues: see `Reading`.

        Raises:
            ApiError: this format does not support the constraint.
        """

    def remember(self, message: dict[str, Any], reasoning: str) -> str:
        """Add the reasoning of an earlier answer to its message, in the form that chat templates
        expect; returns the key that they read."""


class CallsInText:
    """An `AnswerParser` for answers that are plain text with tool calls in it."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser

    def feed(self, delta: Delta) -> ParsedOutput:
        return ParsedOutput(self._parser.feed(delta.text))

    def finish(self) -> Sequence[AnswerEvent]:
        return self._parser.finish()


class TokenParser:
    """An `AnswerParser` that reads token ids and finds the stop strings of the content itself.

    Args:
        ends: end tokens of the model that would be decoded as text; one that ends an output is
            left out.
    """

    def __init__(self, reading: Reading, ends: Collection[int] = ()) -> None:
        self._reading, self._ends = reading, ends
        self._events: list[AnswerEvent] = []
        self._stop: str | None = None
        self._stops = MarkFinder(reading.stop)
        self._num_tokens = 0

    def feed(self, delta: Delta) -> ParsedOutput:
        """Parse further tokens; a stop token that ended the output is not part of the text."""
        tokens = delta.token_ids
        if delta.finish_reason != "stop" or self._reading.include_stop or not tokens:
            return self.read(tokens)
        if not isinstance(delta.stop_reason, int) and tokens[-1] not in self._ends:
            return self.read(tokens)
        parsed = self.read(tokens[:-1])
        return ParsedOutput(parsed.events, [*(parsed.parts or ()), OutputPart.MARKUP], parsed.stop)

    def read(self, token_ids: Sequence[int]) -> ParsedOutput:
        """Parse further tokens, up to the one that completes a stop string."""
        parts: list[OutputPart] = []
        for token in token_ids:
            if self._stop is not None:
                break
            self._num_tokens += 1
            parts.append(self._take(token))
        return ParsedOutput(self._take_events(), parts, self._stop)

    def finish(self) -> Sequence[AnswerEvent]:
        """The text held back as a possible stop string; an incomplete call stays open."""
        self._flush_stops()
        return self._take_events()

    def _take(self, token: int) -> OutputPart:
        """Read one token: add its events, and return the part that it belongs to."""
        raise NotImplementedError

    def _add_content(self, text: str) -> None:
        """Add content text that was already searched for stop strings."""
        self._events.append(Content(text))

    def _write_content(self, text: str) -> None:
        while text:
            before, stop, text = self._stops.feed(text)
            if before:
                self._add_content(before)
            if stop is None:
                continue
            counts = self._num_tokens > self._reading.min_tokens
            if not counts or self._reading.include_stop:
                self._add_content(stop)
            if counts:
                self._stop = stop
                return

    def _flush_stops(self) -> None:
        held = self._stops.finish()
        if held:
            self._add_content(held)

    def _take_events(self) -> list[AnswerEvent]:
        events, self._events = self._events, []
        return events
