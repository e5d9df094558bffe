"""Whether a JSON schema can be satisfied by a document that ends."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

_NESTING = {"object", "array"}


def has_finite_document(text: str) -> bool:
    """False if every document would have to contain another such document, endlessly.

    No text of such a schema is ever complete: an object that requires a property of its own type,
    an array of at least one element of its own type, a reference to itself. Other keywords are
    ignored.

    Args:
        text: of the schema, as JSON.
    """
    schema = json.loads(text)
    targets = {name: target for name in _references(schema) if (target := _find(schema, name))}
    finite = dict.fromkeys(targets, False)  # grows to the least fixed point
    while True:
        grown = {name: _is_finite(target, finite) for name, target in targets.items()}
        if grown == finite:
            return _is_finite(schema, finite)
        finite = grown


def _is_finite(schema: Any, finite: Mapping[str, bool]) -> bool:
    """Whether a schema is finite, given which references are. An unknown reference counts as
    finite: the grammar compiler refuses it."""
    if not isinstance(schema, Mapping):
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str) and not finite.get(reference, True):
        return False
    if not all(_is_finite(part, finite) for part in _parts(schema, "allOf")):
        return False
    for name in ("anyOf", "oneOf"):
        parts = _parts(schema, name)
        if parts and not any(_is_finite(part, finite) for part in parts):
            return False
    kinds = schema.get("type")
    named = {kinds} if isinstance(kinds, str) else set(kinds) if isinstance(kinds, list) else set()
    if "enum" in schema or "const" in schema or not named or named - _NESTING:
        return True
    return any(
        _object(schema, finite) if it == "object" else _array(schema, finite) for it in named
    )


def _object(schema: Mapping[str, Any], finite: Mapping[str, bool]) -> bool:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(required, list):
        return True
    known: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
    rest = schema.get("additionalProperties")
    return all(
        _is_finite(known.get(name, rest), finite) for name in required if isinstance(name, str)
    )


def _array(schema: Mapping[str, Any], finite: Mapping[str, bool]) -> bool:
    fewest = schema.get("minItems", 0)
    if not isinstance(fewest, int) or fewest < 1:
        return True
    first = _parts(schema, "prefixItems")[:fewest]
    rest = schema.get("items") if len(first) < fewest else None
    return all(_is_finite(part, finite) for part in [*first, rest])


def _parts(schema: Mapping[str, Any], name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []


def _references(schema: Any) -> set[str]:
    """All texts that may be references; if some are not, that does no harm."""
    found, left = set(), [schema]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            if isinstance(part.get("$ref"), str):
                found.add(part["$ref"])
            left.extend(part.values())
        elif isinstance(part, list):
            left.extend(part)
    return found


def _find(schema: Any, reference: str) -> Any:
    """The value that a JSON pointer into this document refers to; None for other references."""
    if not reference.startswith("#"):
        return None
    part = schema
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and name.isdecimal() and int(name) < len(part):
            part = part[int(name)]
        elif isinstance(part, Mapping) and name in part:
            part = part[name]
        else:
            return None
    return part
