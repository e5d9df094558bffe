"""The Jinja sandbox of chat templates, with the extensions that published templates use.

This is a separate module so that jinja2 is imported only when a template is rendered.
"""

import json
import re
import threading
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from inspect import signature
from itertools import chain
from time import thread_time
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes, pass_environment
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MOST_OF_A_PRODUCT = 1 << 16  # templates repeat a few spaces or dashes
_MOST_OF_A_SUM = 1 << 26  # more characters than a request may have
_CHARACTERS_PER_ENTRY = 64  # of a list in that sum: a million entries take about as long to write
_MOST_SECONDS = 5.0  # of a thread's own time; published templates take milliseconds
_WIDE_FORMAT = re.compile(r"%(?:\([^()]*\))?[-+ #0]*\d*\.?(\d{5,}|\*)|\{[^{}]*:[^{}]*(\d{5,}|\{)")


class _GenerationTag(Extension):
    """{% generation %}: marks the assistant's text for training; here it renders its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # The block is a scope, as in transformers: variables set inside are not visible outside.
        return [nodes.Scope(body, lineno=line)]


class _Code(CodeGenerator):
    """Generates code in which `a ~ b` is checked like `a + b`, and every block checks the time."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Any) -> None:
        self.writeline("environment.go_on()")
        super().blockvisit(nodes, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:  # noqa: N802
        self.write("environment.joined((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")


class _Timed(Template):
    """A template with a time limit."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        """Render the template; TemplateError if it takes too long."""
        _clock.end = thread_time() + _MOST_SECONDS
        try:
            return super().render(*args, **kwargs)
        finally:
            del _clock.end


_clock = threading.local()  # `end`: the thread's time limit while it renders


class _Bounded(ImmutableSandboxedEnvironment):
    """A sandbox that limits the size of each operation's result, and the total time. Jinja itself
    limits `range`."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))
    code_generator_class = _Code
    template_class = _Timed

    @staticmethod
    def go_on() -> None:
        """Raise TemplateError if the time limit is exceeded."""
        if thread_time() > getattr(_clock, "end", float("inf")):
            raise TemplateError("the chat template takes too long")

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the output of the statements of a template, macro or block."""
        length, kept = 0, []
        for part in parts:
            length += len(part)
            if length > _MOST_OF_A_SUM:
                raise TemplateError("a text is too long for a chat template")
            kept.append(part)
        return "".join(kept)

    def call_filter(self, *args: Any, **kwargs: Any) -> Any:
        """Apply a filter; `map` calls this for each value."""
        self.go_on()
        return super().call_filter(*args, **kwargs)

    def call_test(self, *args: Any, **kwargs: Any) -> Any:
        """Apply a test; `select` calls this for each value."""
        self.go_on()
        return super().call_test(*args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use an attribute; not methods whose results cannot be limited."""
        return attr not in _NEVER and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator; TemplateError if the result would be too large."""
        if operator == "+":
            _require_short(left, right)
        elif operator == "%":
            _require_narrow(left)
            _require_modest(right)
        elif _size(operator, left, right) > _MOST_OF_A_PRODUCT:
            raise TemplateError(f"a result of {operator} is too large for a chat template")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, called: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function; TemplateError if a method of a text would make a result too large."""
        method = getattr(called, "__wrapped__", called)  # jinja wraps str.format
        text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(text, str):
            _require_modest(*args, *kwargs.values())
        if isinstance(text, str) and name == "join" and len(args) == 1:
            return _join(self, args[0], text)
        if isinstance(text, str) and name == "replace" and len(args) >= 2:
            _require_room(text.count(str(args[0])), args[1])
        elif isinstance(text, str) and name == "expandtabs":
            _require_room(text.count("\t"), *args, *kwargs.values())
        elif isinstance(text, str) and name in _PADDING:
            _require_narrow(text, *() if "format" in name else args)
        return super().call(context, called, *args, **kwargs)

    @staticmethod
    def joined(operands: tuple[Any, ...]) -> str:
        texts = [*map(_text, operands)]
        _require_short(*texts)
        return "".join(texts)


_NEVER = ("encode", "to_bytes", "translate")
_PADDING = ("center", "format", "format_map", "ljust", "rjust", "zfill")
_PADDING_FILTERS = ("batch", "center", "format", "round", "slice")
_WRITING_FILTERS = tuple(
    """
    capitalize center e escape forceescape format indent lower pprint replace string striptags title
    tojson trim truncate upper urlencode urlize wordcount wordwrap xmlattr
    """.split()
)
_CONTAINERS = (list, tuple, dict)


def _require_short(*parts: Any) -> None:
    """Raise TemplateError if texts or lists are too long together."""
    if sum(len(it) for it in parts if isinstance(it, str | list | tuple)) > _MOST_OF_A_SUM:
        raise TemplateError("a text or list is too long for a chat template")


def _require_modest(*values: Any) -> None:
    """Raise TemplateError for lists or mappings that would be too long when written out. Nested
    lists may hold one list many times: 25 doublings take 33 million entries."""
    room = _MOST_OF_A_SUM
    left = [it for it in values if isinstance(it, _CONTAINERS)]
    while left:
        container = left.pop()
        entries: Iterable[Any] = container
        if isinstance(container, dict):
            entries = chain(container, container.values())
        for entry in entries:
            room -= len(entry) if isinstance(entry, str) else _CHARACTERS_PER_ENTRY
            if room < 0:
                raise TemplateError("a list is too long for a chat template to write")
            if isinstance(entry, _CONTAINERS):
                left.append(entry)


def _modest(value: Any) -> Any:
    """The value; TemplateError if it is too long to be written out."""
    if isinstance(value, _CONTAINERS):
        _require_modest(value)
    return value


def _text(value: Any) -> str:
    return str(_modest(value))


def _size_limited(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Make a filter refuse values that are too long to be written out."""

    @wraps(apply)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _require_modest(*args, *kwargs.values())
        return apply(*args, **kwargs)

    return checked


def _require_narrow(text: Any, *widths: Any) -> None:
    """Raise TemplateError for a width that is too large, or for a format with such a width."""
    wide = any(isinstance(it, int) and abs(it) > _MOST_OF_A_PRODUCT for it in widths)
    if wide or (isinstance(text, str) and _WIDE_FORMAT.search(text)):
        raise TemplateError("a width is too large for a chat template")


def _require_room(times: int, *parts: Any) -> None:
    """Raise TemplateError if texts, or numbers of characters, are too long when repeated."""
    for part in parts:
        length = part if isinstance(part, int) else len(part) if isinstance(part, str) else 0
        if times * length > _MOST_OF_A_SUM:
            raise TemplateError("a text is too long for a chat template")


def _narrow(pad: Callable[..., Any]) -> Callable[..., Any]:
    """Make a filter refuse large widths."""

    @wraps(pad)  # keeps jinja's marks on the function
    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        formats = pad is do_format
        _require_narrow(value if formats else "", *() if formats else (*args, *kwargs.values()))
        return pad(value, *args, **kwargs)

    return checked


# Names of the text, of what is repeated in it, and of the mark at which that is repeated; None: it
# may be repeated for each character.
_REPEATING_FILTERS: dict[str, tuple[str, str, str | None]] = {
    "indent": ("s", "width", "\n"),
    "replace": ("s", "new", "old"),
    "wordwrap": ("s", "wrapstring", None),
}


def _roomy(
    repeat: Callable[..., Any], text: str, part: str, mark: str | None
) -> Callable[..., Any]:
    """Make a filter refuse to repeat a long part many times."""
    names = signature(repeat)

    @wraps(repeat)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = names.bind(*args, **kwargs).arguments
        whole = str(given[text])
        times = len(whole) if mark is None else whole.count(str(given.get(mark, mark))) + 1
        _require_room(times, given.get(part))
        return repeat(*args, **kwargs)

    return checked


@pass_environment
def _join(
    environment: Environment, value: Iterable[Any], d: str = "", attribute: str | None = None
) -> str:
    """Join the values' texts with `d`; TemplateError if the result is too long."""
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    texts = [*map(_text, value)]
    _require_short(*texts)
    _require_room(len(texts), _text(d))
    return _text(d).join(texts)


def _size(operator: str, left: Any, right: Any) -> int:
    """The approximate size of the result in characters, entries or bits."""
    whole = isinstance(left, int) and isinstance(right, int)
    if operator == "**":
        return left.bit_length() * max(right, 0) if whole else 0
    for repeated, times in ((left, right), (right, left)):
        if isinstance(repeated, str | list | tuple) and isinstance(times, int):
            return len(repeated) * max(times, 0)
    return left.bit_length() + right.bit_length() if whole else 0


def make_environment() -> Environment:
    """Make an environment without access to files, other templates or Python's internals."""
    environment = _Bounded(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, loopcontrols],
        finalize=_modest,
    )
    filters = environment.filters
    filters |= {"tojson": _to_json, "join": _join}
    filters |= {it: _roomy(filters[it], *named) for it, named in _REPEATING_FILTERS.items()}
    environment.filters |= {it: _narrow(environment.filters[it]) for it in _PADDING_FILTERS}
    environment.filters |= {it: _size_limited(environment.filters[it]) for it in _WRITING_FILTERS}
    del environment.globals["lipsum"]  # makes text of any length
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
    _require_room(1 << 20, indent, *(separators or ()))  # as if there were a million entries
    # jinja's own escapes <, > and & for HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
