"""Python literals as they arrive in pieces, and the JSON that they mean."""

import json
import re
from typing import Final

from slipstream.serve.tools.typed_arguments import type_of_json

_MEANINGS: Final = {
    **{"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"},
    **{"\\": "\\", "'": "'", '"': '"', "/": "/", "\n": ""},
}
_WORDS: Final = {
    **{"True": "true", "False": "false", "None": "null"},
    **{it: it for it in ("true", "false", "null")},  # which models write as well
}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_TOKEN = re.compile(
    r'''\s*(?:
        (?P<long>"""(?:[^\\]|\\.)*?"""|\'\'\'(?:[^\\]|\\.)*?\'\'\')
        |(?P<short>"[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*')
        |(?P<word>[^\W\d]\w*)
        |(?P<number>-?\d[\w.+-]*)
        |(?P<mark>[\[\](){},:])
    )\s*''',
    re.DOTALL | re.VERBOSE,
)
_SPELLED: Final = {"(": "[", ")": "]", ",": ", ", ":": ": "}  # a tuple is a list


class LiteralScanner:
    """Finds the `,` or the closing bracket behind a literal, without validating what is inside."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._quote = ""  # that ends the string; as long as that is not clear, what there is of it
        self._opening = self._escaped = False
        self._num_quotes = 0  # at the end of the text so far, in a string

    def scan(self, text: str) -> int:
        """The index behind the literal's text in further text."""
        for place, letter in enumerate(text):
            if self._opening and letter == self._quote[0]:
                self._quote += letter
                self._opening = len(self._quote) < 3
                continue
            if self._opening:
                self._opening = False
                if len(self._quote) == 2:  # an empty string
                    self._quote = ""
            if self._quote:
                self._take_in_string(letter)
            elif letter in "\"'":
                self._quote, self._opening, self._num_quotes = letter, True, 0
            elif letter in "([{":
                self._depth += 1
            elif not self._depth and letter in ",)]}":
                self.done = True
                return place
            elif letter in ")]}":
                self._depth -= 1
        return len(text)

    def _take_in_string(self, letter: str) -> None:
        is_quote = letter == self._quote[0] and not self._escaped
        self._num_quotes = self._num_quotes + 1 if is_quote else 0
        self._escaped = letter == "\\" and not self._escaped
        if self._num_quotes == len(self._quote):
            self._quote = ""


def literal_as_json(text: str) -> str:
    """JSON of a literal; of what is none, as a string."""
    parts: list[str] = []
    place = 0
    while found := _TOKEN.match(text, place):
        place, kind, token = found.end(), found.lastgroup, found[found.lastgroup or 0]
        if kind in ("long", "short"):
            size = 3 if kind == "long" else 1
            parts.append(json.dumps(_unescaped(token[size:-size]), ensure_ascii=False))
        elif kind == "word":
            parts.append(_WORDS.get(token, token))
        else:
            if token in ")]}" and parts[-1:] == [", "]:
                parts.pop()
            parts.append(_SPELLED.get(token, token))
    written = "".join(parts)
    if place == len(text) and type_of_json(written) is not None:
        return written
    return json.dumps(text.strip(), ensure_ascii=False)


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    text = _ESCAPE.sub(_meant, text)
    # Two halves of a character become one; a single half is none.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _meant(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2] or escape[3]
    if code is None:
        return _MEANINGS.get(escape[4], escape[0])
    return chr(int(code, 16)) if int(code, 16) <= 0x10FFFF else "\N{REPLACEMENT CHARACTER}"
