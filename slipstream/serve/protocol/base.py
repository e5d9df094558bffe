"""Base classes and common types of bodies."""

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, model_validator

from slipstream.serve.protocol.bounds import FEW_VALUES, MOST_TOKEN_IDS, AtMost

MOST_INT = 2**31 - 1  # counts and token ids live in 32-bit tensors

TokenId = Annotated[int, Field(ge=0, le=MOST_INT)]
TokenIds = Annotated[list[TokenId], Field(min_length=1), AtMost(MOST_TOKEN_IDS)]
Count = Annotated[int, Field(ge=0, le=MOST_INT)]
JsonSchema = Annotated[dict[str, Any], FEW_VALUES]
JsonSchemaOrText = Annotated[dict[str, Any] | str, FEW_VALUES]


# Fields of the OpenAI protocol that are refused, and what to do instead.
REFUSALS: Final = {
    "audio": "this server reads and writes text only; leave it out",
    "function_call": "it is the older form of tool calls; use tools and tool_choice",
    "file": "this server reads and writes text only; leave it out",
    "functions": "it is the older form of tools; use tools",
    "image_url": "this server reads and writes text only; leave it out",
    "input_audio": "this server reads and writes text only; leave it out",
    "moderation": "this server moderates nothing; leave it out",
    "prediction": "the server drafts by itself; use speculative to set how much",
    "prompt_cache_options": "the prefix cache has no options of a request; leave it out",
    "refusal": "this server's messages have none; leave it out",
    "suffix": "nothing is filled in between two texts; put what the model needs into prompt",
    "verbosity": "say in a message how long the answer should be",
    "web_search_options": "this server searches nothing; leave it out",
}


class RequestBody(BaseModel):
    """Values are never converted; unknown fields are refused by name."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    @classmethod
    def field_names(cls) -> set[str]:
        """The names of the fields in JSON."""
        return {field.alias or name for name, field in cls.model_fields.items()}

    @model_validator(mode="before")
    @classmethod
    def _drop_further_unknown_fields(cls, value: Any) -> Any:
        """Keep one unknown field: an error for each of a million would take seconds."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        known = cls.field_names()
        kept = {name: it for name, it in value.items() if name in known}
        unknown = next(name for name in value if name not in known)
        return {**kept, unknown: value[unknown]}


class ModelRequest(RequestBody):
    """A request that may name the model."""

    model: str | None = None


class ResponseBody(BaseModel):
    """A response; the OpenAPI document describes it exactly."""

    model_config = ConfigDict(extra="forbid")
