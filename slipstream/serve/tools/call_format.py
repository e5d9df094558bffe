"""The interface of formats of tool calls, and formats whose calls are part of an answer's text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from slipstream.models.chat_template import ChatTemplate
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.tools.call_rules import Literals
from slipstream.serve.tools.events import ToolParser

Schemas = Mapping[str, Mapping[str, Any]]  # schemas of the arguments, by function name


class CallFormat(Protocol):
    """How a family of models writes tool calls.

    Making a grammar raises UsageError for a schema that says what the format cannot express.
    """

    @property
    def name(self) -> str: ...
    @property
    def call_id(self) -> Callable[[], str]:
        """Make a new id."""

    def only_calls(self, functions: Schemas, tokenizer: Tokenizer, several: bool) -> str:
        """A Lark grammar (for llguidance) for only calls of these functions."""

    def calls_in_text(self, functions: Schemas, tokenizer: Tokenizer) -> str:
        """A Lark grammar for any text whose calls are all of these functions."""


def long_id() -> str:
    return f"call_{uuid4().hex}"


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """A `CallFormat` whose calls are part of the text of an answer.

    Attributes:
        marks: texts around its calls; a mark that is a special token must be kept in the text.
        parser: (schemas of the functions, special tokens that are not content) -> parser.
        shown_by: whether a model's template and vocabulary show that it writes this format.
        only: Lark rules, including `start`, for one `call`, or up to `MOST_CALLS`.
        in_text: Lark rules for text (`TEXT`) in which each call is a `call`.
        calls: Lark rules for `call`, a call of one of the functions.
    """

    name: str
    marks: tuple[str, ...]
    parser: Callable[[Schemas, Sequence[str]], ToolParser]
    shown_by: Callable[[ChatTemplate, Tokenizer], bool]
    only: Callable[[Literals, bool], list[str]]
    in_text: Callable[[Literals], list[str]]
    calls: Callable[[Literals, Schemas], list[str]]
    call_id: Callable[[], str] = field(default=long_id)

    def only_calls(self, functions: Schemas, tokenizer: Tokenizer, several: bool) -> str:
        literal = Literals(tokenizer)
        return "\n".join([*self.only(literal, several), *self.calls(literal, functions)])

    def calls_in_text(self, functions: Schemas, tokenizer: Tokenizer) -> str:
        literal = Literals(tokenizer)
        rules = [*self.in_text(literal), "TEXT: /(.|\\n)*/", *self.calls(literal, functions)]
        return "\n".join(rules)
