"""Flags: metadata of configuration fields for the command line, with the values they admit."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin

from slipstream.core.errors import UsageError

T = TypeVar("T")

REQUIRED = cast(Any, MISSING)
"""In place of a default: the field has to be given."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B?)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Flag:
    """How the command line offers a field.

    Attributes:
        help: where it ends in brackets, they tell the default.
        panel: a heading of the help page, for this field and those that follow.
        name: the spelling, if that is not the field's name with hyphens.
        also: further spellings.
        metavar: what stands for the value; by default its type.
        parse: (flag, text) -> value; raises UsageError.
        stands_for_none: a value that means None.
        choices: the only values.
        remedy: ends the message about a value that is refused.
        at_least, above, at_most, below: bounds of a number, which must be finite.
        argument: it is given by its place, without a name.
        envvar: where the value comes from when it is not given.
        hidden: accepted and not shown.
    """

    help: str = ""
    panel: str | None = None
    name: str | None = None
    also: tuple[str, ...] = ()
    metavar: str | None = None
    parse: Callable[[str, str], Any] | None = None
    stands_for_none: Any = None
    choices: tuple[Any, ...] | None = None
    remedy: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    argument: bool = False
    envvar: str | None = None
    hidden: bool = False

    @property
    def bounds(self) -> str:
        """The bounds in words, such as `of at least 1`; empty without bounds."""
        low, high = self.at_least, self.at_most
        if low is not None and high is not None:
            return f"from {low:g} to {high:g}"
        named = {"above": self.above, "of at least": low, "at most": high, "below": self.below}
        return " and ".join(f"{word} {it:g}" for word, it in named.items() if it is not None)

    def admits(self, number: float) -> bool:
        """Whether a number lies within the bounds."""
        return (
            math.isfinite(number)
            and (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )


def flag(default: T, text: str = "", **options: Any) -> T:
    """A field of a dataclass that is a flag as well; `options` are fields of `Flag`."""
    return field(default=default, metadata={"flag": Flag(help=text, **options)})


def like(config: type, name: str, default: T) -> T:
    """A field with the flag of a field of another dataclass."""
    (found,) = (it for it in fields(config) if it.name == name)
    return field(default=default, metadata=found.metadata)


def flag_of(config_field: "Field[Any]") -> Flag | None:
    """The flag of a field; None if the command line does not offer it."""
    found: Flag | None = config_field.metadata.get("flag")
    return found


def spelled(config_field: "Field[Any]") -> str:
    """The spelling of a field's flag."""
    found = flag_of(config_field)
    return (found and found.name) or flag_name(config_field.name)


def flag_name(field_name: str) -> str:
    """`--max-model-len` for `max_model_len`."""
    return "--" + field_name.replace("_", "-")


def given_flags(config: Any) -> list[str]:
    """The spellings of the fields that do not have their defaults."""
    return [spelled(it) for it in fields(config) if getattr(config, it.name) != it.default]


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union type; any other type by itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def check_fields(
    config: type,
    values: Mapping[str, Any],
    name: Callable[["Field[Any]"], str] = lambda field: field.name,
) -> None:
    """Raise UsageError for a value that the flag of its field does not admit.

    Args:
        config: the dataclass; a type of its fields may not be a string.
        name: how messages call a field.
    """
    for it in fields(config):
        found, kinds = flag_of(it), kinds_of(it.type)
        if found is None or it.name not in values:
            continue
        value = values[it.name]
        wanted = None if value is None and NoneType in kinds else _refusal(found, kinds, value)
        if wanted is not None:
            remedy = f"; {found.remedy}" if found.remedy else ""
            raise UsageError(f"{name(it)} must be {wanted}, not {value!r}{remedy}")


def _refusal(found: Flag, kinds: tuple[Any, ...], value: Any) -> str | None:
    """What the value should be; None for a good value."""
    if bool in kinds and not isinstance(value, bool):
        return "true or false"
    if found.choices is not None:
        words = ", ".join(str(it).lower() if bool in kinds else it for it in found.choices)
        several = "one of " if len(found.choices) > 1 else ""
        return None if value in found.choices else several + words
    if bool in kinds:
        return None
    if not found.bounds:
        return None
    number = int if int in kinds else int | float
    if isinstance(value, number) and not isinstance(value, bool) and found.admits(value):
        return None
    return f"{'an integer' if int in kinds else 'a number'} {found.bounds}"


def parse_bytes(name: str, text: str) -> int:
    """Read "512M", "4G", "4GiB" (powers of 1024), "4GB" (powers of 1000) or plain bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{name} must be a number of bytes, or such as 512M, 4G, 4GiB: {text!r}")
    number, prefix, unit = match.groups()
    base = 1000 if prefix and unit.lower() == "b" else 1024
    return int(float(number) * base ** " KMGT".index(prefix.upper() or " "))


def parse_count(name: str, text: str) -> int | None:
    """Read 8192, 8k (8,000) or 8K (8,192), with m and M likewise; auto and -1 are None."""
    if text in ("auto", "-1"):
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text.strip())
    if match is None:
        raise UsageError(f"{name} must be a number such as 8192, 8k (8000) or 8K (8192): {text!r}")
    scale = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}[match[2]]
    return int(float(match[1]) * scale)


def parse_object(name: str, text: str) -> dict[str, Any] | None:
    """Read a JSON object; null is None."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{name} is not JSON: {error}; it was {text!r}") from None
    if value is not None and not isinstance(value, dict):
        raise UsageError(f'{name} must be a JSON object such as {{"key": 1}}, not {text}')
    return value


def parse_words(name: str, text: str) -> tuple[str, ...]:
    """Read words such as "a,b"."""
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise UsageError(f"{name} takes words with commas between them, not {text!r}")
    return words


def parse_integers(name: str, text: str) -> tuple[int, ...]:
    """Read integers such as "2,18,33"."""
    return _numbers(name, text, int)


def parse_floats(name: str, text: str) -> tuple[float, ...]:
    """Read numbers such as "0,0.5,1"."""
    return _numbers(name, text, float)


def _numbers(name: str, text: str, number: Callable[[str], T]) -> tuple[T, ...]:
    try:
        return tuple(number(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{name} takes numbers with commas between them, not {text!r}") from None
