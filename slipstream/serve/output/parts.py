"""What a format of answers has to offer, what parsers of whole answers tell, and what those that
read token by token share."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from slipstream.core.structured import StructuredOutput
from slipstream.serve.token_texts import TokenTexts
from slipstream.serve.tools.call_format import CallFormat, Schemas
from slipstream.serve.tools.events import AnswerEvent, Content, MarkFinder, ToolParser
from slipstream.serve.updates import Delta


class Part(Enum):
    """The part of an answer that a token belongs to; MARKUP is shown to nobody."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"
    MARKUP = "markup"


@dataclass(frozen=True, slots=True)
class Piece:
    """What follows from further output.

    Attributes:
        parts: one for each token that was read; None where the format does not tell.
        stop: a stop string that ended the content; the tokens behind it were not read.
    """

    events: Sequence[AnswerEvent]
    parts: Sequence[Part] | None = None
    stop: str | None = None


class AnswerParser(Protocol):
    """Parses one answer incrementally; the text does not depend on how the output is split."""

    def feed(self, delta: Delta) -> Piece:
        """What follows from further output."""

    def finish(self) -> Sequence[AnswerEvent]:
        """The remaining events; the answer is complete."""


@dataclass(frozen=True)
class Reading:
    """How one answer is to be read.

    Attributes:
        prompt: its token ids, which may have begun the answer.
        continues: the prompt ends within a message that the answer continues.
        functions: names of those that may be called; None if there may be no calls.
        calls: finds calls in the content of formats that have none of their own.
        call_marks: tokens that are marks around them.
        keeps_special: `calls` takes special tokens out of the text, as its marks are some.
        skip_special: special tokens are not part of the texts.
        stop: strings that end the content.
        include_stop: keep the stop string in the content.
        min_tokens: stop strings count only behind so many tokens.
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
class Wanted:
    """What a request asks of the form of an answer.

    Attributes:
        content: a constraint on the content.
        calls: a grammar of tool calls, which takes the place of `content`.
        functions: that may be called instead of a constrained content.
        budget: most tokens of reasoning; None if there is no limit.
    """

    content: StructuredOutput | None = None
    calls: str | None = None
    functions: Schemas = field(default_factory=dict)
    budget: int | None = None


class OutputFormat(Protocol):
    """How a family of models writes whole answers.

    Attributes:
        name: in --reasoning-parser.
        calls: its tool calls; None if they stand in the text of the content.
        marks: tokens that no text of a request may become.
    """

    @property
    def name(self) -> str: ...
    @property
    def calls(self) -> CallFormat | None: ...
    @property
    def marks(self) -> Sequence[int]: ...

    def parser(self, texts: TokenTexts, reading: Reading) -> AnswerParser:
        """A parser for one answer."""

    def framed(
        self, wanted: Wanted, prompt: Sequence[int], continues: bool
    ) -> StructuredOutput | None:
        """What the output must be, reasoning and marks included; None if it may be anything.

        Args:
            prompt, continues: as of `Reading`.

        Raises:
            ApiError: an output of this format cannot be constrained so.
        """

    def remember(self, message: dict[str, Any], reasoning: str) -> str:
        """Put the reasoning of an earlier answer into its message as chat templates read it; the
        key that they read."""


class CallsInText:
    """An `AnswerParser` of answers whose text holds content and calls."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser

    def feed(self, delta: Delta) -> Piece:
        return Piece(self._parser.feed(delta.text))

    def finish(self) -> Sequence[AnswerEvent]:
        return self._parser.finish()


class TokenParser:
    """An `AnswerParser` that reads token ids and finds the stop strings of the content itself.

    Args:
        ends: end tokens of the model that are text, so that the one that ends an output has to be
            left out.
    """

    def __init__(self, reading: Reading, ends: Collection[int] = ()) -> None:
        self._reading, self._ends = reading, ends
        self._events: list[AnswerEvent] = []
        self._stop: str | None = None
        self._stops = MarkFinder(reading.stop)
        self._num_tokens = 0

    def feed(self, delta: Delta) -> Piece:
        """What follows from further tokens; a token that ended the output is no text of it."""
        tokens = delta.token_ids
        if delta.finish_reason != "stop" or self._reading.include_stop or not tokens:
            return self.read(tokens)
        if not isinstance(delta.stop_reason, int) and tokens[-1] not in self._ends:
            return self.read(tokens)
        piece = self.read(tokens[:-1])
        return Piece(piece.events, [*(piece.parts or ()), Part.MARKUP], piece.stop)

    def read(self, token_ids: Sequence[int]) -> Piece:
        """What follows from further tokens."""
        parts: list[Part] = []
        for token in token_ids:
            if self._stop is not None:
                break
            self._num_tokens += 1
            parts.append(self._take(token))
        return Piece(self._told(), parts, self._stop)

    def finish(self) -> Sequence[AnswerEvent]:
        """What a possible stop string held back; a call that was cut off stays open."""
        self._let_out()
        return self._told()

    def _take(self, token: int) -> Part:
        """Read a token: write what follows from it, and tell what it is part of."""
        raise NotImplementedError

    def _say(self, text: str) -> None:
        """Take in text of the content in which no stop string is left."""
        self._events.append(Content(text))

    def _write_content(self, text: str) -> None:
        while text:
            before, stop, text = self._stops.feed(text)
            if before:
                self._say(before)
            if stop is None:
                continue
            counts = self._num_tokens > self._reading.min_tokens
            if not counts or self._reading.include_stop:
                self._say(stop)
            if counts:
                self._stop = stop
                return

    def _let_out(self) -> None:
        held = self._stops.finish()
        if held:
            self._say(held)

    def _told(self) -> list[AnswerEvent]:
        events, self._events = self._events, []
        return events
