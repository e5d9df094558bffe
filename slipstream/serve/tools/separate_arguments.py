"""A function's schema for grammars of formats that write each argument apart."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from slipstream.core.errors import UsageError
from slipstream.serve.tools.call_rules import DEFINITIONS
from slipstream.serve.tools.typed_arguments import resolved

NOTES: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "type"}
)
_KNOWN: Final = NOTES | {"properties", "required", "additionalProperties", *DEFINITIONS}


@dataclass(frozen=True)
class SeparateArguments:
    """What each argument of one function may be.

    Args:
        format: its name, for errors.
        name: of the function.
        schema: of all arguments.
    """

    format: str
    name: str
    schema: Mapping[str, Any]

    def schemas(self) -> dict[str, object] | None:
        """Schemas by the names of the arguments; None if they may have any names.

        Raises:
            UsageError: the schema says more than that.
        """
        function = self._function
        self.require("its schema", function, _KNOWN)
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
        """Names of the arguments that must be there."""
        return [*self._function.get("required", ())]

    def whole(self, schema: object) -> dict[str, Any]:
        """An argument's schema, with the definitions that it may refer to."""
        definitions = {key: self.schema[key] for key in DEFINITIONS if key in self.schema}
        return {**resolved(schema, self.schema), **definitions}

    def require(self, what: str, schema: Mapping[str, Any], known: frozenset[str]) -> None:
        """Raise UsageError for what a schema says beyond `known`."""
        for key in schema:
            if key not in known:
                raise self.error(what, key)

    def error(self, what: str, problem: str) -> UsageError:
        """An error that names the function."""
        return UsageError(
            f"calls in the format {self.format} cannot be made to follow the schema of the tool "
            f"{self.name!r}: {what} has {problem}; leave that out, or let the model choose "
            "(tool_choice auto, not strict)"
        )

    @cached_property
    def _function(self) -> Mapping[str, Any]:
        return resolved(self.schema, self.schema)
