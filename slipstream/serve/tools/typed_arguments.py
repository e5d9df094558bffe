"""Arguments that a format writes one by one: their schemas, and the types of plain-text ones,
which follow from the tool's schema."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from slipstream.core.errors import UsageError
from slipstream.serve.tools.call_rules import DEFINITIONS

NOTES: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "type"}
)
_SUPPORTED: Final = NOTES | {"properties", "required", "additionalProperties", *DEFINITIONS}


@dataclass(frozen=True)
class SeparateArguments:
    """The schemas of one function's arguments; the format and the name are for errors."""

    format: str
    name: str
    schema: Mapping[str, Any]

    def schemas(self) -> dict[str, object] | None:
        """Schemas by argument name; None if arguments may have any names; UsageError for other
        constraints."""
        function = self._function
        self.require("its schema", function, _SUPPORTED)
        found: dict[str, object] = {key: {} for key in self.required}
        found.update(function.get("properties", {}))
        more = function.get("additionalProperties")
        if found or more is False:
            return found
        if isinstance(more, Mapping) and more:
            raise self.error("its schema", "additionalProperties")
        return None

    @property
    def required(self) -> list[str]:
        return [*self._function.get("required", ())]

    def whole(self, schema: object) -> dict[str, Any]:
        """Add to an argument's schema the definitions that it may refer to."""
        definitions = {key: self.schema[key] for key in DEFINITIONS if key in self.schema}
        return {**resolved(schema, self.schema), **definitions}

    def require(self, what: str, schema: Mapping[str, Any], known: frozenset[str]) -> None:
        """Raise UsageError for keywords of a schema that are not in `known`."""
        for key in schema:
            if key not in known:
                raise self.error(what, key)

    def error(self, what: str, problem: str) -> UsageError:
        return UsageError(
            f"calls in the format {self.format} cannot be made to follow the schema of the tool "
            f"{self.name!r}: {what} has {problem}; leave that out, or let the model choose "
            "(tool_choice auto, not strict)"
        )

    @cached_property
    def _function(self) -> Mapping[str, Any]:
        return resolved(self.schema, self.schema)


_MOST_REFERENCES = 16  # maximum length of a chain of references
_NAMES: Final = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
_KNOWN: Final = frozenset(_NAMES.values())


def resolved(schema: object, function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Resolve a reference to one of the definitions in `function`, the schema of all arguments;
    other schemas are unchanged."""
    for _ in range(_MOST_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            break
        _, key, name = (*reference.split("/", 2), "", "")[:3]
        defined = function.get(key) if key in DEFINITIONS else None
        schema = defined.get(name) if isinstance(defined, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def types_of(schema: object, function: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows; string if it does not say."""
    types: set[str] = set()
    waiting, seen = [schema], set[int]()
    while waiting:
        found = resolved(waiting.pop(), function)
        if id(found) in seen:  # references may be circular
            continue
        seen.add(id(found))
        types.update(it for it in _listed(found.get("type")) if isinstance(it, str))
        values = _listed(found.get("enum")) + ([found["const"]] if "const" in found else [])
        types.update(_NAMES[type(value)] for value in values)
        for key in ("anyOf", "oneOf", "allOf"):
            waiting += _listed(found.get(key))
    return frozenset(types) & _KNOWN or frozenset({"string"})


def as_json(text: str, types: frozenset[str]) -> str:
    """Convert an argument's text to JSON.

    Among several types, string is tried last. Text that matches none of the types is kept as is if
    it is JSON, and becomes a string otherwise.
    """
    plain = text.strip()
    lowered = plain.lower()
    if lowered == "null" and "null" in types:
        return "null"
    if lowered in ("true", "false") and "boolean" in types:
        return lowered
    found = type_of_json(plain)
    if found in types or (found == "integer" and "number" in types):
        return plain
    if "string" in types or found is None:
        return json.dumps(text, ensure_ascii=False)
    return plain


def _listed(value: object) -> list[Any]:
    """Wrap a value in a list unless it is one; None gives an empty list."""
    return value if isinstance(value, list) else [] if value is None else [value]


def type_of_json(text: str) -> str | None:
    """The type of the value in a JSON text; None if the text is not JSON."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return _NAMES[type(value)]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
