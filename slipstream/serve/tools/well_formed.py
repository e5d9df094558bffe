"""Check that a tool's schema is one, before a grammar is made of it."""

from collections.abc import Mapping
from typing import Any, Final

from slipstream.core.errors import UsageError

_OF_SCHEMAS: Final = ("properties", "$defs", "definitions")  # objects whose values are schemas
_ALTERNATIVES: Final = ("anyOf", "oneOf", "allOf")
_KINDS: Final[dict[str, type | tuple[type, ...]]] = {
    **dict.fromkeys(_OF_SCHEMAS, dict),
    **dict.fromkeys((*_ALTERNATIVES, "required", "enum"), list),
    **dict.fromkeys(("pattern", "$ref"), str),
    **dict.fromkeys(("minLength", "maxLength"), int),
    "type": (str, list),
}


def require_well_formed(name: str, schema: Mapping[str, Any]) -> None:
    """Raise UsageError for keywords whose values are not of the kind that JSON Schema wants.

    Args:
        name: of the tool.
    """
    waiting: list[Any] = [schema]
    while waiting:
        found = waiting.pop()
        if isinstance(found, bool):
            continue
        if not isinstance(found, Mapping):
            raise _error(name, f"{str(found)[:40]!r} stands in place of a schema")
        for key, kind in _KINDS.items():
            if key in found and not isinstance(found[key], kind):
                raise _error(name, f"the value of {key!r} is of the wrong type")
        if not all(isinstance(it, str) for it in found.get("required", ())):
            raise _error(name, "'required' must be a list of names")
        for key in _OF_SCHEMAS:
            waiting += found.get(key, {}).values()
        for key in _ALTERNATIVES:
            waiting += found.get(key, ())


def _error(name: str, problem: str) -> UsageError:
    return UsageError(
        f"the parameters of the tool {name!r} are no JSON schema: {problem}; mend them, or let the "
        "model choose (tool_choice auto, not strict)"
    )
