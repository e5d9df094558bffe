"""The sandbox that chat templates run in, with what published templates expect of it.

Apart from `chat_template` so that jinja2 is imported when a template is first rendered.
"""

import json
import re
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MOST_OF_A_PRODUCT = 1 << 16  # templates repeat a few spaces or dashes
_MOST_OF_A_SUM = 1 << 26  # more characters than a request may have
_WIDE_FORMAT = re.compile(r"%[-+ #0]*\d*\.?(\d{5,}|\*)|\{[^{}]*:[^{}]*(\d{5,}|\{)")


class _GenerationTag(Extension):
    """{% generation %}: marks what the assistant said, for training; here its content alone."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope of its own, as in transformers: what is set within does not leave it.
        return [nodes.Scope(body, lineno=line)]


class _Code(CodeGenerator):
    """`a ~ b` goes through the sandbox as `a + b` does."""

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:  # noqa: N802
        self.write("environment.joined((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")


class _Bounded(ImmutableSandboxedEnvironment):
    """A sandbox in which no single operation makes much; jinja bounds `range` itself."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))
    code_generator_class = _Code

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute by an operator; TemplateError if the result would be too large."""
        if operator == "+":
            _require_short(left, right)
        elif operator == "%":
            _require_narrow(left)
        elif _size(operator, left, right) > _MOST_OF_A_PRODUCT:
            raise TemplateError(f"a result of {operator} is too large for a chat template")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, called: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the template; TemplateError for a text that is padded too far."""
        method = getattr(called, "__wrapped__", called)  # jinja wraps str.format
        text = getattr(method, "__self__", None)
        if isinstance(text, str) and method.__name__ in _PADDING:
            _require_narrow(text, *() if "format" in method.__name__ else args)
        return super().call(context, called, *args, **kwargs)

    @staticmethod
    def joined(operands: tuple[Any, ...]) -> str:
        """The texts of the operands, one behind the other."""
        texts = [*map(str, operands)]
        _require_short(*texts)
        return "".join(texts)


_PADDING = ("center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill")
_PADDING_FILTERS = ("batch", "center", "format", "indent", "slice", "tojson", "wordwrap")


def _require_short(*parts: Any) -> None:
    """Raise TemplateError where texts or lists are too long together."""
    if sum(len(it) for it in parts if isinstance(it, str | list | tuple)) > _MOST_OF_A_SUM:
        raise TemplateError("a text or list is too long for a chat template")


def _require_narrow(text: Any, *widths: Any) -> None:
    """Raise TemplateError for a width that is too large, or for a format with such a width."""
    wide = any(isinstance(it, int) and it > _MOST_OF_A_PRODUCT for it in widths)
    if wide or (isinstance(text, str) and _WIDE_FORMAT.search(text)):
        raise TemplateError("a width is too large for a chat template")


def _narrow(pad: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, which refuses large widths."""

    @wraps(pad)  # with what jinja has marked it with
    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        formats = pad is do_format
        _require_narrow(value if formats else "", *() if formats else (*args, *kwargs.values()))
        return pad(value, *args, **kwargs)

    return checked


def _size(operator: str, left: Any, right: Any) -> int:
    """Characters, entries or bits of what would come out, about."""
    whole = isinstance(left, int) and isinstance(right, int)
    if operator == "**":
        return left.bit_length() * max(right, 0) if whole else 0
    for repeated, times in ((left, right), (right, left)):
        if isinstance(repeated, str | list | tuple) and isinstance(times, int):
            return len(repeated) * max(times, 0)
    return left.bit_length() + right.bit_length() if whole else 0


def make_environment() -> Environment:
    """An environment without access to files, to other templates or to Python's inside."""
    environment = _Bounded(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.filters |= {it: _narrow(environment.filters[it]) for it in _PADDING_FILTERS}
    del environment.globals["lipsum"]  # as much text as it is asked for
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
