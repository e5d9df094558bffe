"""The request fields that both generating endpoints share."""

from typing import Annotated, Literal

from pydantic import Field

from slipstream.core.sampling_params import SEED_BITS
from slipstream.serve.protocol import bounds
from slipstream.serve.protocol.base import (
    MOST_INT,
    Count,
    JsonSchema,
    JsonSchemaOrText,
    ModelRequest,
    RequestBody,
    TokenId,
    TokenIds,
)
from slipstream.serve.protocol.bounds import AtMost
from slipstream.serve.protocol.usage import SpeculativeOptions, StreamOptions

MOST_LOGPROBS = 1000  # the server's --max-logprobs sets fewer
_MOST_CHOICES = 128

_Word = Annotated[str, Field(min_length=1, max_length=bounds.MOST_WORD_CHARACTERS)]
_Grammar = Annotated[str, Field(max_length=bounds.MOST_GRAMMAR_CHARACTERS)]
_Choices = Annotated[list[str], Field(min_length=1), AtMost(bounds.MOST_CHOICES)]
_LogitKey = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
_LogitBias = Annotated[
    dict[_LogitKey, Annotated[float, Field(ge=-100, le=100)]], AtMost(bounds.MOST_BIASES)
]


class TextFormat(RequestBody):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(RequestBody):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(RequestBody):
    """A JSON schema with a name; it is followed whether `strict` is set or not."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    schema_: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(RequestBody):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class StructuredOutputs(RequestBody):
    """A constraint on the text; exactly one of the fields."""

    json_: JsonSchemaOrText | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: _Grammar | None = None
    choice: _Choices | None = None
    grammar: _Grammar | None = None


class SamplingFields(ModelRequest):
    """Fields of the OpenAI protocol, then those that inference engines have added."""

    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: _LogitBias | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << SEED_BITS)] | None = None
    stop: _Word | Annotated[list[_Word], AtMost(bounds.MOST_STOP_STRINGS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    # Additions of other engines.
    top_k: Annotated[int, Field(ge=-1, le=MOST_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], AtMost(bounds.MOST_STOP_TOKENS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    add_special_tokens: bool | None = None
    bad_words: Annotated[list[_Word], AtMost(bounds.MOST_BAD_WORDS)] | None = None
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchemaOrText | None = None
    guided_regex: _Grammar | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _Grammar | None = None
    speculative: SpeculativeOptions | None = None
    return_speculation: bool | None = None
