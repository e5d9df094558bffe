"""Base classes and common types of request and response bodies."""

from collections.abc import Mapping
from functools import cache
from itertools import islice
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from slipstream.serve.protocol.bounds import FEW_VALUES, MOST_TOKEN_IDS, AtMost

MOST_INT = 2**31 - 1  # counts and token ids live in 32-bit tensors
REQUEST_ID = r"^[A-Za-z0-9._:+/=@-]{1,128}$"

TokenId = Annotated[int, Field(ge=0, le=MOST_INT)]
TokenIds = Annotated[list[TokenId], Field(min_length=1), AtMost(MOST_TOKEN_IDS)]
Count = Annotated[int, Field(ge=0, le=MOST_INT)]
Positive = Annotated[int, Field(ge=1, le=MOST_INT)]
JsonSchema = Annotated[dict[str, Any], FEW_VALUES]
JsonSchemaOrText = Annotated[dict[str, Any] | str, FEW_VALUES]
Empty = Annotated[dict[str, Any], AtMost(0)]


def _require_boolean(value: Any) -> Any:
    """Refuse 0 and 1, which Python accepts as booleans and JSON does not."""
    if not isinstance(value, bool):
        raise PydanticCustomError("bool_type", "input should be a boolean")
    return value


OnlyTrue = Annotated[Literal[True], BeforeValidator(_require_boolean)]
OnlyFalse = Annotated[Literal[False], BeforeValidator(_require_boolean)]

# Fields of OpenAI's and vLLM's protocols that are refused, and what to do instead. Values that ask
# for nothing are accepted.
_IMAGES = (
    "images go into messages of the user and results of tools: as image_url in "
    "/v1/chat/completions, as input_image in /v1/responses, as image in /v1/messages"
)
_NO_FILES = "this server keeps no files; send an image itself, in a data URL or as base64"
_NO_MEDIA = "this server reads texts and images, and writes text; leave it out"
REFUSALS: Final = {
    "audio": _NO_MEDIA,
    "audio_url": _NO_MEDIA,
    "context_management": "nothing of a conversation is compacted; leave it out",
    "conversation": "continue a response by previous_response_id, or send all items as input",
    "document": _NO_MEDIA,
    "ec_transfer_params": "encoding is not disaggregated here; leave it out",
    "encrypted_content": "only the server that wrote it can read it; send the item's content",
    "file": _NO_FILES,
    "file_id": _NO_FILES,
    "function_call": "it is the older form of tool calls; use tools and tool_choice",
    "functions": "it is the older form of tools; use tools",
    "image": _IMAGES,
    "image_url": _IMAGES,
    "input_audio": _NO_MEDIA,
    "input_file": _NO_MEDIA,
    "input_image": _IMAGES,
    "item_reference": "send the item itself, or previous_response_id",
    "kv_transfer_params": "prefill and decoding are not disaggregated here; leave it out",
    "logits_processors": "no code of a client is run; use logit_bias, allowed_token_ids, bad_words "
    "or structured_outputs",
    "media_io_kwargs": _NO_MEDIA,
    "moderation": "this server moderates nothing; leave it out",
    "prediction": "the server drafts by itself; use speculative to set how much",
    "prompt_cache_options": "the prefix cache has no options for a request; leave it out",
    "prompt_embeds": "a prompt is text or token ids, not embeddings; send it as prompt",
    "redacted_thinking": "only the server that wrote it can read it; leave it out",
    "refusal": "this server's messages have none; leave it out",
    "store": "nothing is stored; leave it out",
    "thread": "no conversations are kept here; leave it out, and send all messages",
    "use_beam_search": "there is no beam search; use temperature 0, or "
    "n with logprobs and choose yourself",
    "thinking_token_budget": "completions do not separate reasoning; use /v1/chat/completions",
    "verbosity": "say in a message how long the answer should be",
    "video": _NO_MEDIA,
    "video_url": _NO_MEDIA,
    "vllm_xargs": "this server has no extensions that would read it; leave it out",
    "watermarking": "this server marks no text; leave it out",
    "web_search_options": "this server searches nothing; leave it out",
}


class RequestBody(BaseModel):
    """Base of request bodies. Values are never converted. Unknown fields are refused by name unless
    they are null, which clients send for fields that they do not use.

    Attributes:
        forms: descriptions, for error messages, of what fields with several types accept.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )

    forms: ClassVar[Mapping[str, str]] = {}

    @classmethod
    @cache
    def field_names(cls) -> set[str]:
        """The names of the fields in JSON."""
        return {field.alias or name for name, field in cls.model_fields.items()}

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown_fields(cls, value: Any) -> Any:
        """Keep only one unknown field, since an error for each of a million would take seconds."""
        if not isinstance(value, dict):
            return value
        known = cls.field_names()
        if value.keys() <= known:
            return value
        kept = {name: it for name, it in value.items() if name in known}
        unknown = (name for name, it in value.items() if name not in known and it is not None)
        return {**kept, **{name: value[name] for name in islice(unknown, 1)}}


class ModelRequest(RequestBody):
    """A request that may name the model."""

    model: str | None = None


class ResponseBody(BaseModel):
    """A response; the OpenAPI document describes it exactly."""

    model_config = ConfigDict(extra="forbid")
