"""The request fields that both generating endpoints share."""

from typing import Annotated, Literal

from pydantic import Field

from slipstream.core.sampling_params import MOST_PATTERN, MOST_REPEATS, SEED_BITS
from slipstream.serve.protocol import bounds
from slipstream.serve.protocol.base import (
    MOST_INT,
    REQUEST_ID,
    Count,
    Empty,
    JsonSchema,
    JsonSchemaOrText,
    ModelRequest,
    OnlyFalse,
    OnlyTrue,
    RequestBody,
    TokenId,
    TokenIds,
)
from slipstream.serve.protocol.bounds import AtMost
from slipstream.serve.protocol.usage import SpeculativeOptions, StreamOptions

MOST_LOGPROBS = 1000  # the server's --max-logprobs may be lower
_MOST_CHOICES = 128

Word = Annotated[str, Field(min_length=1, max_length=bounds.MOST_WORD_CHARACTERS)]
_Grammar = Annotated[str, Field(max_length=bounds.MOST_GRAMMAR_CHARACTERS)]
_Choices = Annotated[list[str], Field(min_length=1), AtMost(bounds.MOST_CHOICES)]
_LogitKey = Annotated[str, Field(min_length=1, max_length=bounds.MOST_WORD_CHARACTERS)]
_LogitBias = Annotated[
    dict[_LogitKey, Annotated[float, Field(ge=-100, le=100)]], AtMost(bounds.MOST_BIASES)
]


class TextFormat(RequestBody):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(RequestBody):
    """Any JSON object, or one that follows a schema."""

    type: Literal["json_object"]
    schema_: JsonSchema | None = Field(None, alias="schema")


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
    json_object: OnlyTrue | None = None
    regex: _Grammar | None = None
    choice: _Choices | None = None
    grammar: _Grammar | None = None


class RepetitionDetectionFields(RequestBody):
    """See the engine's `RepetitionDetection`."""

    max_pattern_size: Annotated[int, Field(ge=0, le=MOST_PATTERN)] | None = None
    min_pattern_size: Annotated[int, Field(ge=0, le=MOST_PATTERN)] | None = None
    min_count: Annotated[int, Field(ge=0, le=MOST_REPEATS)] | None = None


class IgnoredFields(ModelRequest):
    """Fields without effect, and fields that are accepted only with a value that has no effect;
    the reasons are in docs/protocol.md."""

    user: str | None = None
    metadata: Annotated[dict[str, str], AtMost(bounds.MOST_LABELS)] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: OnlyFalse | None = None
    session_id: str | None = None
    length_penalty: float | None = None
    mm_payload: Literal["tensors", "none"] | None = None
    return_mm_kwargs: bool | None = None
    return_token_offsets: bool | None = None
    routed_experts_prompt_start: Count | None = None
    use_beam_search: OnlyFalse | None = None
    watermarking: OnlyFalse | None = None
    kv_transfer_params: Empty | None = None
    ec_transfer_params: Empty | None = None
    vllm_xargs: Empty | None = None


class SamplingFields(IgnoredFields):
    """Fields of the OpenAI protocol, then those that inference engines have added.

    Attributes:
        priority: smaller values go first, if the server schedules by priority.
        cache_salt: the prefix cache is shared only with requests of the same salt.
        logprob_token_ids: tokens that logprobs report in place of the most probable alternatives.
        repetition_detection: ends an output that repeats itself.
        stream_interval: minimum new tokens of a chunk, except the first and the last.
        request_id: part of the answer's id, and the id in the log.
        return_token_ids: the answer has the ids of the prompt's and the output's tokens.
        return_tokens_as_token_ids: logprobs name tokens "token_id:7" rather than by their texts.
        truncate_prompt_tokens: maximum number of prompt tokens to keep; -1: as many as leave room
            for the output.
        truncation_side: the side on which tokens are cut off.
    """

    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: _LogitBias | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << SEED_BITS)] | None = None
    stop: Word | Annotated[list[Word], AtMost(bounds.MOST_STOP_STRINGS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Additions of other engines.
    top_k: Annotated[int, Field(ge=-1, le=MOST_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], AtMost(bounds.MOST_STOP_TOKENS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: OnlyTrue | None = None
    add_special_tokens: bool | None = None
    bad_words: Annotated[list[Word], AtMost(bounds.MOST_BAD_WORDS)] | None = None
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    logprob_token_ids: (
        Annotated[list[TokenId], Field(min_length=1), AtMost(bounds.MOST_LOGPROB_TOKENS)] | None
    ) = None
    repetition_detection: RepetitionDetectionFields | None = None
    stream_interval: Annotated[int, Field(ge=1, le=MOST_INT)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchemaOrText | None = None
    guided_regex: _Grammar | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _Grammar | None = None
    speculative: SpeculativeOptions | None = None
    return_speculation: bool | None = None
    priority: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    request_id: Annotated[str, Field(pattern=REQUEST_ID)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MOST_INT)] | None = None
    truncation_side: Literal["left", "right"] | None = None
