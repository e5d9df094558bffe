"""Incremental detokenization, and stop strings."""

from collections.abc import Sequence

from slipstream.core.sampling_params import SamplingParams
from slipstream.models.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"  # what an unfinished UTF-8 sequence decodes to


class Detokenizer:
    """The text of one sample.

    Tokens are decoded in a window that starts a little before the new ones, because a token's text
    may depend on its neighbours; text that ends inside a character is held back.

    Args:
        tokenizer: whose tokens they are.
        skip_special_tokens: leave special tokens out of the text.
        stop: strings that end the output.
        include_stop: keep the stop string in the text.
        min_tokens: stop strings are ignored before this many tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        stop: Sequence[str],
        include_stop: bool,
        min_tokens: int,
    ) -> None:
        self.text = ""
        self._ended = False
        self._tokenizer, self._skip_special = tokenizer, skip_special_tokens
        self._stop, self._include_stop, self._min_tokens = stop, include_stop, min_tokens
        self._longest_stop = max(map(len, stop), default=0)
        self._token_ids: list[int] = []
        self._window = 0  # decoding starts at this token
        self._done = 0  # the text of tokens before this one was released

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, params: SamplingParams) -> "Detokenizer | None":
        """A new one for a sample with these parameters; None where there is no tokenizer."""
        if tokenizer is None:
            return None
        return cls(
            tokenizer,
            params.skip_special_tokens,
            params.stop_strings,
            params.include_stop_str_in_output,
            params.min_tokens,
        )

    def push(self, token_id: int) -> str | None:
        """Add a token; the stop string that it completed, if any (the text is then cut)."""
        before = len(self.text)
        self._token_ids.append(token_id)
        self._emit()
        if not self._stop or len(self._token_ids) <= self._min_tokens:
            return None
        return self._find_stop(before)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add several tokens with one decoding; only if there are no stop strings."""
        assert not self._stop
        held = len(self._token_ids)
        self._token_ids.extend(token_ids)
        if self._emit() or len(token_ids) < 2:
            return
        # They end inside a character: the text before it is released all the same.
        del self._token_ids[held:]
        for token_id in token_ids:
            self.push(token_id)

    @property
    def has_stops(self) -> bool:
        return bool(self._stop)

    def finish(self) -> None:
        """Release the text that was held back."""
        self._ended = True
        shown = self._decode(self._window, self._done)
        self.text += self._decode(self._window, None)[len(shown) :]
        self._done = self._window = len(self._token_ids)

    @property
    def settled_text(self) -> str:
        """The text that will stay: without an end that may turn out to begin a stop string."""
        return self.text[: self.settled_length]

    @property
    def settled_length(self) -> int:
        """Characters of `settled_text`."""
        if self._ended or self._include_stop:
            return len(self.text)
        for size in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stop):
                return len(self.text) - size
        return len(self.text)

    def _emit(self) -> bool:
        """Decode new tokens; False if they end inside a character, which is held back."""
        shown = self._decode(self._window, self._done)
        text = self._decode(self._window, None)
        if len(text) <= len(shown) or text.endswith(_INCOMPLETE):
            return False
        self.text += text[len(shown) :]
        self._window, self._done = self._done, len(self._token_ids)
        return True

    def _decode(self, start: int, end: int | None) -> str:
        return self._tokenizer.decode(
            self._token_ids[start:end], skip_special_tokens=self._skip_special
        )

    def _find_stop(self, searched: int) -> str | None:
        """The stop string that appears first in the text, part of it beyond `searched`."""
        found = [
            (place, stop)
            for stop in self._stop
            if (place := self.text.find(stop, max(0, searched - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        self._ended = True
        place, stop = min(found)
        self.text = self.text[: place + len(stop) if self._include_stop else place]
        return stop
