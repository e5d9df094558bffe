"""`response_format`: what the text must be."""

from typing import Annotated, Literal

from pydantic import Field

from slipstream.serve.protocol.base import JsonSchema, RequestBody


class TextFormat(RequestBody):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(RequestBody):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(RequestBody):
    """A JSON schema under a name; it holds whether `strict` is set or not."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    schema_: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(RequestBody):
    """JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]
