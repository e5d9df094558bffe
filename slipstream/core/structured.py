"""Structured outputs, and the interface of the guides that follow an output's grammar."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from slipstream.core.errors import UsageError

KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, kw_only=True)
class Thought:
    """Unconstrained reasoning before the structured part of an output.

    Args:
        opening, closing: the tokens that open and close it, such as <think> and </think>.
        begun: the output begins within the reasoning; otherwise there is reasoning if the output
            begins with `opening`.
        spaces: tokens that may be before `opening` and after `closing`.
        budget: maximum number of its tokens, after which `closing` is forced; None: no limit.
    """

    opening: int
    closing: int
    begun: bool
    spaces: Sequence[int] = ()
    budget: int | None = None


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """A constraint of an output: exactly one of the kinds, or none if there is a `thought`.

    Args:
        json_schema: JSON schema (an object or its JSON text) of the output.
        json_object: the output is any JSON object.
        regex: regular expression (Rust's syntax) that matches the whole output.
        choice: the output is one of these texts.
        grammar: grammar of the output, in the Lark syntax of llguidance.
        frame: Lark rules (`start` and others) of an output that contains the constrained text; the
            rule `body`, which they do not define, stands for that text. None: the constrained text
            is the whole output.
        thought: reasoning before the output; None: there is none.
    """

    json_schema: str | Mapping[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    frame: str | None = None
    thought: Thought | None = None

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if self.json_schema is False:
            raise UsageError("the json_schema false allows nothing; give one that allows something")
        if not given and self.thought is not None:
            return
        if len(given) != 1:
            raise UsageError(
                f"structured output takes exactly one of {', '.join(KINDS)}, not "
                f"{', '.join(given) or 'none'}"
            )
        getattr(self, f"_check_{given[0]}")()

    @property
    def is_free(self) -> bool:
        """Whether the output after the reasoning is unconstrained."""
        return all(getattr(self, kind) in (None, False) for kind in KINDS)

    @property
    def kind(self) -> str:
        """The kind of the constraint, one of `KINDS`; only if there is one."""
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))

    @property
    def text(self) -> str:
        """The constraint as a text; equal texts of one kind are equal constraints."""
        if self.choice is not None:
            return json.dumps(list(self.choice))
        return str(self.json_schema or self.regex or self.grammar or "")

    def _check_json_schema(self) -> None:
        """Keep the schema as text, so that later changes of the object have no effect."""
        schema = self.json_schema
        try:
            found = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(found, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"json_schema is not JSON ({error}); give a JSON schema") from error
        if not isinstance(found, Mapping | bool) or found is False:
            raise UsageError(f"json_schema must be a JSON object, not {text[:80]}")
        object.__setattr__(self, "json_schema", text)

    def _check_json_object(self) -> None:
        if self.json_object is not True:
            raise UsageError(f"json_object must be true or false, not {self.json_object!r}")

    def _check_regex(self) -> None:
        _require_text("regex", self.regex)

    def _check_grammar(self) -> None:
        _require_text("grammar", self.grammar)

    def _check_choice(self) -> None:
        texts = self.choice
        legal = isinstance(texts, Sequence) and not isinstance(texts, str | bytes) and len(texts)
        if not legal or not all(isinstance(text, str) and text for text in texts or ()):
            raise UsageError("choice must be a list of one or more texts, none of them empty")


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name} must be a text that is not empty")


class Advance(Enum):
    """The result of a token: more tokens may follow, none can, or the token was not allowed."""

    OPEN = "open"
    COMPLETE = "complete"
    REFUSED = "refused"


class Guide(Protocol):
    """Follows one sample's output through its grammar, on the host.

    Attributes:
        problem: why a token was refused.
    """

    problem: str

    def advance(self, token: int) -> Advance:
        """Advance by a token of the output."""
