"""Formats of tool calls, and grammars of calls in them."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol
from uuid import uuid4

from slipstream.core.errors import UsageError
from slipstream.models.chat_template import ChatTemplate
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.tools import hermes, mistral
from slipstream.serve.tools.events import ToolParser
from slipstream.serve.tools.hermes import HermesParser
from slipstream.serve.tools.llama3 import Llama3Parser
from slipstream.serve.tools.mistral import MistralParser

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments, by function name

ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
# The way models write JSON; if any white space is allowed, small models may never stop writing it.
WRITING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class CallFormat(Protocol):
    """How a family of models writes tool calls."""

    @property
    def name(self) -> str: ...
    @property
    def call_id(self) -> Callable[[], str]:
        """Returns a new id."""

    def only_calls(self, functions: Schemas, tokenizer: Tokenizer, several: bool) -> str:
        """A Lark grammar (of llguidance) of nothing but calls of these functions."""

    def calls_amid_text(self, functions: Schemas, tokenizer: Tokenizer) -> str:
        """A Lark grammar of any text, in which each call is one of these functions."""


@dataclass(frozen=True)
class ToolFormat:
    """A `CallFormat` whose calls stand in the text of an answer.

    Attributes:
        marks: texts around its calls; a mark that is a special token must be kept in the text.
        parser: (names of the functions, special tokens that are not content) -> parser.
    """

    name: str
    marks: tuple[str, ...]
    parser: Callable[[Collection[str], Sequence[str]], ToolParser]
    call_id: Callable[[], str]
    _only_calls: Callable[["_Literals", bool], list[str]]
    _calls_amid_text: Callable[["_Literals"], list[str]]
    _arguments: str

    def only_calls(self, functions: Schemas, tokenizer: Tokenizer, several: bool) -> str:
        return "\n".join([*self._only_calls(_Literals(tokenizer), several), self._call(functions)])

    def calls_amid_text(self, functions: Schemas, tokenizer: Tokenizer) -> str:
        rules = self._calls_amid_text(_Literals(tokenizer))
        return "\n".join([*rules, "TEXT: /(.|\\n)*/", self._call(functions)])

    def _call(self, functions: Schemas) -> str:
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    self._arguments: schema or ANY_ARGUMENTS,
                },
                "required": ["name", self._arguments],
                "additionalProperties": False,
            }
            for name, schema in functions.items()
        ]
        schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
        return f"call: %json {json.dumps({**_lifted(schema), 'x-guidance': WRITING})}"


class _Literals:
    """Spells texts in a grammar; a mark that is a special token is written as the token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> str:
        token = self._special(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    def up_to_mark(self, rule: str, mark: str) -> str:
        """A rule for any text up to the first occurrence of a mark."""
        token = self._special(mark)
        if token is None:
            return f"{rule}[lazy]: /(.|\\n)*{re.escape(mark)}/"
        return f"{rule}: TEXT <[{token}]>"

    def _special(self, text: str) -> int | None:
        token = self._tokenizer.token_to_id(text)
        return token if token in self._tokenizer.special_token_ids else None


def _lifted(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with its `$defs` at the top, where references look for them."""
    definitions: dict[str, Any] = {}
    for call in schema.get("anyOf", [schema]):
        for name, arguments in call["properties"].items():
            for key in ("$defs", "definitions"):
                if isinstance(arguments, Mapping) and key in arguments:
                    inner = dict(arguments)
                    for defined, value in inner.pop(key).items():
                        if definitions.setdefault(key, {}).setdefault(defined, value) != value:
                            raise UsageError(
                                f"tools define {defined!r} in two ways; give the definitions "
                                "different names"
                            )
                    call["properties"][name] = arguments = inner
    return {**schema, **definitions}


def _hermes_only(literal: _Literals, several: bool) -> list[str]:
    begin, end = literal(hermes.BEGIN), literal(hermes.END)
    more = ' ("\\n" marked)*' if several else ""
    return [f"start: marked{more}", f'marked: {begin} "\\n" call "\\n" {end}']


def _hermes_amid(literal: _Literals) -> list[str]:
    begun = literal.up_to_mark("begun", hermes.BEGIN)
    inner = f'inner: "\\n" call "\\n" {literal(hermes.END)}'
    return ["start: (begun inner)* TEXT", begun, inner]


def _llama3_only(_: _Literals, several: bool) -> list[str]:
    return ['start: call ("; " call)*' if several else "start: call"]


def _llama3_amid(_: _Literals) -> list[str]:
    """The whole answer is calls, or there are none."""
    return ['start: call ("; " call)* | other', r"other: /([^{\s](.|\n)*)?/"]


def _mistral_only(literal: _Literals, several: bool) -> list[str]:
    more = ' (", " call)*' if several else ""
    return [f'start: {literal(mistral.BEGIN)} "[" call{more} "]"']


def _mistral_amid(literal: _Literals) -> list[str]:
    begun = literal.up_to_mark("begun", mistral.BEGIN)
    return ['start: begun "[" call (", " call)* "]" | TEXT', begun]


def long_id() -> str:
    """An id of a call."""
    return f"call_{uuid4().hex}"


def _short_id() -> str:
    """Mistral's templates refuse ids of any other length."""
    return uuid4().hex[:9]


FORMATS: Final = {
    it.name: it
    for it in (
        ToolFormat(
            "hermes",
            (hermes.BEGIN, hermes.END),
            lambda _, dropped: HermesParser(dropped),
            long_id,
            _hermes_only,
            _hermes_amid,
            "arguments",
        ),
        ToolFormat(
            "llama3_json",
            (),
            lambda names, _: Llama3Parser(names),
            long_id,
            _llama3_only,
            _llama3_amid,
            "parameters",
        ),
        ToolFormat(
            "mistral",
            (mistral.BEGIN,),
            lambda _, dropped: MistralParser(dropped),
            _short_id,
            _mistral_only,
            _mistral_amid,
            "arguments",
        ),
    )
}


def find_format(template: ChatTemplate, tokenizer: Tokenizer) -> ToolFormat | None:
    """The format that the model's template and vocabulary mention; None if there is none."""
    if tokenizer.token_to_id(mistral.BEGIN) is not None or template.mentions(mistral.BEGIN):
        return FORMATS["mistral"]
    # Another format uses the same tags, with XML inside.
    if template.mentions(hermes.BEGIN) and not template.mentions("<function="):
        return FORMATS["hermes"]
    if tokenizer.token_to_id("<|python_tag|>") is not None:
        return FORMATS["llama3_json"]
    return None
