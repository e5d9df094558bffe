"""The sandbox that chat templates run in, with what published templates expect of it.

Apart from `chat_template` so that jinja2 is imported when a template is first rendered.
"""

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MOST_OF_A_PRODUCT = 1 << 16  # templates repeat a few spaces or dashes


class _GenerationTag(Extension):
    """{% generation %}: marks what the assistant said, for training; here its content alone."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope of its own, as in transformers: what is set within does not leave it.
        return [nodes.Scope(body, lineno=line)]


class _Bounded(ImmutableSandboxedEnvironment):
    """A sandbox whose products and powers have a size; jinja bounds `range` itself."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a product or a power; TemplateError if it would be too large."""
        if _size(operator, left, right) > _MOST_OF_A_PRODUCT:
            raise TemplateError(f"a result of {operator} is too large for a chat template")
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> int:
    """Characters, entries or bits of what would come out, about."""
    if operator == "**":
        whole = isinstance(left, int) and isinstance(right, int)
        return left.bit_length() * max(right, 0) if whole else 0
    for repeated, times in ((left, right), (right, left)):
        if isinstance(repeated, str | list | tuple) and isinstance(times, int):
            return len(repeated) * max(times, 0)
    whole = isinstance(left, int) and isinstance(right, int)
    return left.bit_length() + right.bit_length() if whole else 0


def make_environment() -> Environment:
    """An environment without access to files, to other templates or to Python's inside."""
    environment = _Bounded(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own escapes <, > and & for HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
