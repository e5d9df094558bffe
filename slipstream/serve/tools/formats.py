"""Which format of tool calls a model was trained on, and a grammar of its calls."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from slipstream.core.errors import UsageError
from slipstream.models.chat_template import ChatTemplate
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.tools import hermes, mistral
from slipstream.serve.tools.events import ToolParser
from slipstream.serve.tools.hermes import HermesParser
from slipstream.serve.tools.llama3 import Llama3Parser
from slipstream.serve.tools.mistral import MistralParser

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments, by the name of the function

_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
# As the models write JSON: without it a small model may fill the answer with white space.
_WRITING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls.

    Attributes:
        marks: texts around its calls; where one is a special token, the text must keep those.
        parser: made of the functions' names and of special tokens that are no content.
        call_id: a new id of a call.
    """

    name: str
    marks: tuple[str, ...]
    parser: Callable[[Collection[str], Sequence[str]], ToolParser]
    call_id: Callable[[], str]
    _rules: Callable[["_Literals", str, bool], list[str]]
    _arguments: str

    def grammar(self, functions: Schemas, tokenizer: Tokenizer, several: bool) -> str:
        """Exactly calls, of these functions alone, in the Lark syntax of llguidance."""
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    self._arguments: schema or _ANY_ARGUMENTS,
                },
                "required": ["name", self._arguments],
                "additionalProperties": False,
            }
            for name, schema in functions.items()
        ]
        schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
        call = f"call: %json {json.dumps({**_lifted(schema), 'x-guidance': _WRITING})}"
        return "\n".join([*self._rules(_Literals(tokenizer), "call", several), call])


class _Literals:
    """Texts in a grammar: a mark that is one special token is no text there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> str:
        token = self._tokenizer.token_to_id(text)
        if token is not None and token in self._tokenizer.special_token_ids:
            return f"<[{token}]>"
        return json.dumps(text)


def _lifted(schema: dict[str, Any]) -> dict[str, Any]:
    """Definitions of the functions' schemas where references look for them: at the top."""
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


def _hermes_rules(literal: _Literals, call: str, several: bool) -> list[str]:
    begin, end = literal(hermes.BEGIN), literal(hermes.END)
    more = ' ("\\n" marked)*' if several else ""
    return [f"start: marked{more}", f'marked: {begin} "\\n" {call} "\\n" {end}']


def _llama3_rules(literal: _Literals, call: str, several: bool) -> list[str]:
    del literal
    return [f'start: {call} ("; " {call})*' if several else f"start: {call}"]


def _mistral_rules(literal: _Literals, call: str, several: bool) -> list[str]:
    more = f' (", " {call})*' if several else ""
    return [f'start: {literal(mistral.BEGIN)} "[" {call}{more} "]"']


def _long_id() -> str:
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
            _long_id,
            _hermes_rules,
            "arguments",
        ),
        ToolFormat(
            "llama3_json",
            (),
            lambda names, _: Llama3Parser(names),
            _long_id,
            _llama3_rules,
            "parameters",
        ),
        ToolFormat(
            "mistral",
            (mistral.BEGIN,),
            lambda _, dropped: MistralParser(dropped),
            _short_id,
            _mistral_rules,
            "arguments",
        ),
    )
}


def find_format(template: ChatTemplate, tokenizer: Tokenizer) -> ToolFormat | None:
    """The format that the model's template and vocabulary speak of; None where they do not."""
    if tokenizer.token_to_id(mistral.BEGIN) is not None or template.mentions(mistral.BEGIN):
        return FORMATS["mistral"]
    # The tags are shared with a format that has XML within.
    if template.mentions(hermes.BEGIN) and not template.mentions("<function="):
        return FORMATS["hermes"]
    if tokenizer.token_to_id("<|python_tag|>") is not None:
        return FORMATS["llama3_json"]
    return None
