"""Special tokens that a request spells are text: nobody's words may open a message."""

import re
from typing import Any
from uuid import uuid4

from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.errors import bad_request
from slipstream.serve.protocol.bounds import MOST_SPELLED_TOKENS


class SpelledTokens:
    """Takes special tokens out of a request's texts, and puts them back as ordinary tokens.

    The chat template writes texts and special tokens into one text, in which they could not be told
    apart. So a special token that a text spells is replaced by a mark before, and the rendered text
    is encoded in parts.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        spelled = map(tokenizer.id_to_token, tokenizer.special_token_ids)
        longest_first = sorted(filter(None, spelled), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._marks: dict[str, str] = {}  # by the token

    def hide(self, value: Any) -> Any:
        """JSON data with marks in place of special tokens."""
        if isinstance(value, str):
            return self._pattern.sub(lambda found: self._mark(found[0]), value)
        if isinstance(value, dict):
            return {self.hide(key): self.hide(it) for key, it in value.items()}
        return [self.hide(it) for it in value] if isinstance(value, list) else value

    def show(self, text: str) -> str | list[int]:
        """A rendered text: as token ids where it has marks; ApiError for too many of them."""
        if not self._marks:
            return text
        tokens = {mark: token for token, mark in self._marks.items()}
        found = re.split(f"({'|'.join(tokens)})", text)
        if len(found) > 2 * MOST_SPELLED_TOKENS:
            raise bad_request(
                f"the messages spell more than {MOST_SPELLED_TOKENS} special tokens of the model; "
                "leave some of them out",
                "messages",
            )
        parts: list[str] = []
        for part in found:
            token = tokens.get(part)
            # Without its first character the text of a special token is none.
            parts += [part] if token is None else [token[:1], token[1:]]
        return self._tokenizer.encode_parts(parts)

    def _mark(self, token: str) -> str:
        """Digits: templates that change case keep them."""
        return self._marks.setdefault(token, str(uuid4().int))
