"""Metadata of configuration fields: their command line flags, and the values they allow."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin

from slipstream.core.errors import UsageError

T = TypeVar("T")

REQUIRED = cast(Any, MISSING)
"""The default of fields that must be given."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B?)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Flag:
    """The command line flag of a field.

    Attributes:
        help: help text; brackets at its end have the default.
        panel: heading on the help page, for this field and the following ones.
        name: name of the flag, if it is not the field's name with hyphens.
        also: aliases of the flag.
        metavar: placeholder for the value; by default it follows from `parse` or the type.
        parse: (flag, text) -> value; raises UsageError.
        stands_for_none: a value that means None.
        choices: the allowed values; empty: all.
        remedy: last part of the message about a refused value.
        at_least, above, at_most, below: bounds of a number, which must be finite.
        argument: it is a positional argument.
        envvar: environment variable with the value, if the flag is not given.
        hidden: accepted, but not shown on the help page.
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
        """The bounds in words, such as `of at least 1`; empty if there are none."""
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
    """A dataclass field with a flag; `options` are fields of `Flag`."""
    return field(default=default, metadata={"flag": Flag(help=text, **options)})


def rare_flag(default: T, text: str = "", **options: Any) -> T:
    """A flag that is accepted, but not shown on the help page."""
    return flag(default, text, hidden=True, **options)


def like(config: type, name: str, default: T) -> T:
    """A dataclass field with the flag of a field of another dataclass."""
    (found,) = (it for it in fields(config) if it.name == name)
    return field(default=default, metadata=found.metadata)


def flag_of(config_field: "Field[Any]") -> Flag | None:
    """The flag of a field; None if it has none. Values of fields that are mappings are JSON."""
    found: Flag | None = config_field.metadata.get("flag")
    kinds = [get_origin(it) for it in kinds_of(config_field.type)]
    if found is None or found.parse is not None or Mapping not in kinds:
        return found
    return replace(found, parse=parse_object)


def spelled(config_field: "Field[Any]") -> str:
    """The name of a field's flag."""
    found = flag_of(config_field)
    return (found and found.name) or flag_name(config_field.name)


def flag_name(field_name: str) -> str:
    """The default name of a field's flag: `--max-model-len` for `max_model_len`."""
    return "--" + field_name.replace("_", "-")


def given_flags(config: Any) -> list[str]:
    """The names of the flags whose fields do not have their defaults."""
    return [spelled(it) for it in fields(config) if getattr(config, it.name) != it.default]


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union type; any other type by itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def check_fields(
    config: type,
    values: Mapping[str, Any],
    name: Callable[["Field[Any]"], str] = lambda field: field.name,
) -> None:
    """Raise UsageError for a value that the flag of its field does not allow.

    Args:
        config: the dataclass; the types of its fields must not be strings.
        name: field -> its name in messages.
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
    """A description of the allowed values; None if the value is allowed."""
    if bool in kinds and not isinstance(value, bool):
        return "true or false"
    if found.parse is parse_object and not isinstance(value, Mapping):
        return "a mapping such as {'key': 1}, or None"
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


def read_text(name: str, file: str | Path) -> str:
    """The UTF-8 text of the file that a flag names; raises UsageError where it cannot be read."""
    try:
        return Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{name} {file} cannot be read: {error}") from None


def parse_bytes(name: str, text: str) -> int:
    """Read "512M", "4G", "4GiB" (powers of 1024), "4GB" (powers of 1000) or plain bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{name} must be a number of bytes, or such as 512M, 4G, 4GiB: {text!r}")
    number, prefix, unit = match.groups()
    base = 1000 if prefix and unit.lower() == "b" else 1024
    return int(float(number) * base ** " KMGT".index(prefix.upper() or " "))


def parse_count(name: str, text: str) -> int | None:
    """Read 8192, 8k (8,000) or 8K (8,192), likewise m and M; auto and -1 are None."""
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
    """Read a comma-separated list of words."""
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise UsageError(f"{name} takes words with commas between them, not {text!r}")
    return words


def parse_integers(name: str, text: str) -> tuple[int, ...]:
    """Read a comma-separated list of integers."""
    return _numbers(name, text, int)


def parse_floats(name: str, text: str) -> tuple[float, ...]:
    """Read a comma-separated list of numbers."""
    return _numbers(name, text, float)


def _numbers(name: str, text: str, number: Callable[[str], T]) -> tuple[T, ...]:
    try:
        return tuple(number(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{name} takes numbers with commas between them, not {text!r}") from None
