"""Llama 3.2, Llama 4 and others: the whole answer is [name(key=value, ...), ...], as in Python."""

import json
import re
from collections.abc import Collection, Sequence
from typing import Final

from slipstream.serve.tools.call_format import Schemas, ToolFormat
from slipstream.serve.tools.call_rules import Literals, json_value, more_calls
from slipstream.serve.tools.events import ArgumentsParser, Content, ToolEvent
from slipstream.serve.tools.typed_arguments import SeparateArguments, type_of_json

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
    """Finds the `,` or closing bracket after a literal, without validating the literal."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._quote = ""  # that ends the string; as long as that is not clear, what there is of it
        self._opening = self._escaped = False
        self._num_quotes = 0  # at the end of the text so far, in a string

    def scan(self, text: str) -> int:
        """The index after the literal's end in further text."""
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
    """Convert a literal to JSON; text that is not a literal becomes a string."""
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
    # Surrogate pairs become one character; a lone surrogate is invalid.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _meant(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2] or escape[3]
    if code is None:
        return _MEANINGS.get(escape[4], escape[0])
    return chr(int(code, 16)) if int(code, 16) <= 0x10FFFF else "\N{REPLACEMENT CHARACTER}"


BEGIN, END = "<|python_start|>", "<|python_end|>"  # optional marks around the list
_NAME = re.compile(r"\s*([a-zA-Z0-9_.-]{1,64})\s*\(")
_MAY_BE_NAME = re.compile(r"\s*[a-zA-Z0-9_.-]{0,64}\s*")
_KEY = re.compile(r"([^\s=,:()'\"\[\]{}]{1,128})\s*=")
_MAY_BE_KEY = re.compile(r"[^\s=,:()'\"\[\]{}]{0,128}\s*")


class PythonicParser(ArgumentsParser):
    """Parses answers that are calls; returns arguments one by one. A list that does not begin with
    one of the functions' names is text."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._key, self._value = "", list[str]()
        self._scanner = LiteralScanner()
        self._read = self._read_start

    def finish(self) -> Sequence[ToolEvent]:
        began_no_call = self._read == self._read_start
        after_end = self._read == self._read_end and self._held.strip() not in ("", END)
        return [Content(self._held)] if self._held and (began_no_call or after_end) else []

    def _read_start(self, text: str) -> str:
        self._held += text
        rest = self._held.lstrip()
        if BEGIN.startswith(rest):
            return ""
        rest = rest.removeprefix(BEGIN).lstrip()
        return self._begin_call(rest[1:]) if rest[:1] in ("", "[") else self._to_text()

    def _begin_call(self, rest: str) -> str:
        """Decide whether a function's name follows."""
        name = _NAME.match(rest)
        if name is None and _MAY_BE_NAME.fullmatch(rest):
            return ""
        if name is None or name[1] not in self._names:
            return self._to_text()
        self._add_call(name[1])
        self._held, self._read = "", self._read_key
        return rest[name.end() :]

    def _read_key(self, text: str) -> str:
        self._held += text
        rest = self._held.lstrip()
        if rest.startswith(")"):
            self._end_call()
            self._held, self._read = "", self._read_next
            return rest[1:]
        key = _KEY.match(rest)
        if key is None:
            return "" if _MAY_BE_KEY.fullmatch(rest) else self._to_text()
        self._key, self._value, self._scanner = key[1], [], LiteralScanner()
        self._held, self._read = "", self._read_value
        return rest[key.end() :]

    def _read_value(self, text: str) -> str:
        end = self._scanner.scan(text)
        self._value.append(text[:end])
        if self._scanner.done:
            key = json.dumps(self._key, ensure_ascii=False)
            self._add_argument(key, literal_as_json("".join(self._value)))
            self._read = self._read_key
        return text[end:].removeprefix(",")

    def _read_next(self, text: str) -> str:
        self._held += text
        rest = self._held.lstrip()
        if rest.startswith(","):
            return self._begin_call(rest[1:])
        if rest.startswith("]"):
            self._held, self._read = "", self._read_end
            return rest[1:]
        return self._to_text() if rest else ""

    def _read_end(self, text: str) -> str:
        self._held += text
        rest = self._held.lstrip()
        if END.startswith(rest):
            return ""
        if rest.startswith(END):
            self._held = rest[len(END) :]
        return self._to_text()


def _only(_: Literals, several: bool) -> list[str]:
    more = more_calls('", " call', several)
    return [f'start: "[" call{more} "]"']


def _in_text(_: Literals) -> list[str]:
    """Either the whole answer is calls, or it has none."""
    return ['start: "[" call (", " call)* "]" | other', r"other: /([^\[\s](.|\n)*)?/"]


def _calls(_: Literals, functions: Schemas) -> list[str]:
    rules = [f"call: {' | '.join(f'call_{index}' for index in range(len(functions)))}"]
    for index, (name, schema) in enumerate(functions.items()):
        rule, arguments = f"call_{index}", SeparateArguments("pythonic", name, schema)
        given, found = arguments.schemas(), list[str]()
        if given is None:
            found.append(f'{rule}_any: /[a-zA-Z_][a-zA-Z0-9_]{{0,63}}/ "=" {json_value({})}')
            inner = f'({rule}_any (", " {rule}_any)*)?'
        else:
            for key, part in given.items():
                if not _KEY.fullmatch(f"{key}="):
                    raise arguments.error(f"its argument {key!r}", "an invalid name in Python")
                place = f"{rule}_{len(found)}"
                found.append(f"{place}: {json.dumps(f'{key}=')} {_value(arguments, part)}")
            needed = [key in arguments.required for key in given]
            inner = _listed(rule, needed, found)
        rules += [f'{rule}: {json.dumps(f"{name}(")} {inner} ")"', *found]
    return rules


def _value(arguments: SeparateArguments, schema: object) -> str:
    whole = arguments.whole(schema)
    if whole.get("type") == "boolean" and not {"enum", "const"} & {*whole}:
        return '("True" | "False")'
    return json_value(whole)


def _listed(rule: str, needed: Sequence[bool], rules: list[str]) -> str:
    """An expression for the arguments, required ones first; adds the rules that it needs."""
    first = [f"{rule}_{index}" for index, it in enumerate(needed) if it]
    others = [f"{rule}_{index}" for index, it in enumerate(needed) if not it]
    if first:
        return ' ", " '.join(first) + "".join(f' (", " {it})?' for it in others)
    rest = [f"{rule}_after_{index}" for index in range(len(others))]
    choices = []
    for index, other in enumerate(others):
        more = f" {rest[index + 1]}" if index + 1 < len(others) else ""
        choices.append(other + more)
        if index:
            rules.append(f'{rest[index]}: (", " {other})?{more}')
    return f"({' | '.join(choices)})?" if choices else ""


FORMAT: Final = ToolFormat(
    name="pythonic",
    marks=(),
    parser=lambda functions, _: PythonicParser(functions),
    # an example from Meta's prompt for these models
    shown_by=lambda template, _: template.mentions("func_name1("),
    only=_only,
    in_text=_in_text,
    calls=_calls,
)
