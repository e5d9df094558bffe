"""Lark rules (for llguidance) from which formats build the grammars of their calls."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from slipstream.core.errors import UsageError
from slipstream.models.tokenizer import Tokenizer

MOST_CALLS: Final = 16
"""Calls of an answer that may have nothing else: without a limit a small model repeats them until
its context is full."""

_OF_SCHEMAS: Final = ("properties", "$defs", "definitions")  # objects whose values are schemas
_ALTERNATIVES: Final = ("anyOf", "oneOf", "allOf")
_KINDS: Final[dict[str, type | tuple[type, ...]]] = {
    **dict.fromkeys(_OF_SCHEMAS, dict),
    **dict.fromkeys((*_ALTERNATIVES, "required", "enum"), list),
    **dict.fromkeys(("pattern", "$ref"), str),
    **dict.fromkeys(("minLength", "maxLength"), int),
    "type": (str, list),
}


def more_calls(call: str, several: bool) -> str:
    """An expression for the calls after the first one of an answer; `call` has the separator."""
    return f" ({call}){{0,{MOST_CALLS - 1}}}" if several else ""


def require_well_formed(name: str, schema: Mapping[str, Any]) -> None:
    """Raise UsageError for keywords of a tool whose values are of a type that none may have."""
    waiting: list[Any] = [schema]
    while waiting:
        found = waiting.pop()
        if isinstance(found, bool):
            continue
        if not isinstance(found, Mapping):
            raise _error(name, f"{str(found)[:40]!r} stands in place of a schema")
        for key, kind in _KINDS.items():
            if key in found and not isinstance(found[key], kind):
                raise _error(name, f"the value of {key!r} is of the wrong type")
        if not all(isinstance(it, str) for it in found.get("required", ())):
            raise _error(name, "'required' must be a list of names")
        for key in _OF_SCHEMAS:
            waiting += found.get(key, {}).values()
        for key in _ALTERNATIVES:
            waiting += found.get(key, ())


def _error(name: str, problem: str) -> UsageError:
    return UsageError(
        f"the parameters of the tool {name!r} are no JSON schema: {problem}; fix them, or let the "
        "model choose (tool_choice auto, not strict)"
    )


ANY_ARGUMENTS: Final[Mapping[str, Any]] = {"type": "object"}
# White space as models write it; with any white space, small models may never stop writing it.
WRITING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_SLASHED: Final = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
DEFINITIONS: Final = (
    "$defs",
    "definitions",
)  # keys of definitions that references in a schema point to


class Literals:
    """Writes texts as literals of a grammar; a mark that is a special token becomes the token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> str:
        token = self._special(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    def knows(self, mark: str) -> bool:
        return self._tokenizer.token_to_id(mark) is not None

    def up_to_mark(self, rule: str, mark: str) -> str:
        """A rule for any text that ends with the first occurrence of a mark."""
        token = self._special(mark)
        if token is None:
            return f"{rule}[lazy]: /(.|\\n)*{_in_slashes(re.escape(mark))}/"
        return f"{rule}: /(.|\\n)*/ <[{token}]>"

    def limited(self, rule: str, mark: str, limits: Sequence[str], newline: bool) -> str:
        """Rules for a text that fully matches regular expressions, followed by a mark.

        Args:
            rule: name of the first rule, and the beginning of the other's name.
            newline: there is a line break before the mark.
        """
        token, name = self._special(mark), f"{rule.upper()}_TEXT"
        found = _in_slashes(re.escape(mark))
        end = ("\\n" if newline else "") + (found if token is None else "")
        body = [f"/({_in_slashes(limit)}){end}/" for limit in limits]
        if token is None:
            body.append(f"~/(?s:.*){found}(?s:.+)/")
        end_token = "" if token is None else f" <[{token}]>"
        return f"{rule}: {name}{end_token}\n{name}: {' & '.join(body)}"

    def _special(self, text: str) -> int | None:
        token = self._tokenizer.token_to_id(text)
        if token in self._tokenizer.special_token_ids:
            return token
        # llguidance also treats added tokens in angle brackets (such as Qwen3's) as special.
        tag = text.startswith("<") and text.endswith(">")
        return token if tag and token in self._tokenizer.added_token_ids else None


def _in_slashes(pattern: str) -> str:
    """Escape a regular expression for use between slashes."""
    return re.sub(r"\\.|/|\n", lambda it: _SLASHED.get(it[0], it[0]), pattern, flags=re.DOTALL)


def json_value(schema: Mapping[str, Any]) -> str:
    """A Lark expression for JSON that satisfies a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': WRITING})}"


def json_calls(functions: Mapping[str, Mapping[str, Any]], arguments: str) -> list[str]:
    """The rule `call` of a format that writes a call as one JSON object, with this key of the
    arguments."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, arguments: schema or ANY_ARGUMENTS},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for name, schema in functions.items()
    ]
    return [f"call: {json_value(_lifted(calls))}"]


def _lifted(calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine schemas to an `anyOf`, with their `$defs` at the top, where references point."""
    definitions: dict[str, Any] = {}
    for call in calls:
        for name, arguments in call["properties"].items():
            for key in DEFINITIONS:
                if isinstance(arguments, Mapping) and key in arguments:
                    inner = dict(arguments)
                    for defined, value in inner.pop(key).items():
                        if definitions.setdefault(key, {}).setdefault(defined, value) != value:
                            raise UsageError(
                                f"tools define {defined!r} in two ways; give the definitions "
                                "different names"
                            )
                    call["properties"][name] = arguments = inner
    return {**(calls[0] if len(calls) == 1 else {"anyOf": [*calls]}), **definitions}
