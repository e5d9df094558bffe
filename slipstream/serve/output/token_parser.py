"""What parsers that read answers token by token have in common."""

from collections.abc import Collection, Sequence

from slipstream.serve.output.parts import Part, Piece, Reading
from slipstream.serve.tools.events import AnswerEvent, Content
from slipstream.serve.tools.marked_text import MarkFinder
from slipstream.serve.updates import Delta


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
