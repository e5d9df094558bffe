"""Marks of a format of answers that a request spells are text: nobody's words open a message."""

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.errors import bad_request
from slipstream.serve.protocol.bounds import MOST_SPELLED_TOKENS

_DIGITS = 2


class SpelledTokens:
    """Takes marks out of a request's texts, and puts them back as ordinary tokens.

    The chat template writes texts and marks into one text, in which they could not be told apart.
    So a mark that a text spells is replaced by a number before, and the rendered text is encoded in
    parts. Only methods of `str` read whole texts: a regular expression would keep the interpreter's
    lock for long.

    Args:
        marks: token ids.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._marks = [it for it in map(tokenizer.id_to_token, marks) if it]
        self._prefix = str(uuid4().int)  # templates that change case keep digits
        self._num_hidden = 0

    def hide(self, value: Any) -> Any:
        """JSON data with numbers in place of marks; ApiError for too many of them."""
        if isinstance(value, str):
            return self._hide_in(value)
        if isinstance(value, dict):
            return {self.hide(key): self.hide(it) for key, it in value.items()}
        return [self.hide(it) for it in value] if isinstance(value, list) else value

    def show(self, text: str) -> str | list[int]:
        """A rendered text: as token ids where marks were hidden."""
        if not self._num_hidden:
            return text
        first, *others = text.split(self._prefix)
        parts = [first]
        for other in others:
            mark = self._marks[int(other[:_DIGITS])]
            # Without its first character a mark is none.
            parts += [mark[:1], mark[1:], other[_DIGITS:]]
        return self._tokenizer.encode_parts(parts)

    def _hide_in(self, text: str) -> str:
        for number, mark in enumerate(self._marks):
            count = text.count(mark)
            self._num_hidden += count
            if self._num_hidden > MOST_SPELLED_TOKENS:
                raise bad_request(
                    f"the messages spell more than {MOST_SPELLED_TOKENS} of the marks by which the "
                    "model tells messages apart; leave some of them out",
                    "messages",
                )
            if count:
                text = text.replace(mark, f"{self._prefix}{number:0{_DIGITS}}")
        return text
