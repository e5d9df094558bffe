"""Bodies of /v1/messages and /v1/messages/count_tokens: the Messages protocol of `anthropic`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from slipstream.serve.protocol import bounds
from slipstream.serve.protocol.base import (
    Count,
    JsonSchema,
    ModelRequest,
    Positive,
    RequestBody,
    ResponseBody,
)
from slipstream.serve.protocol.bounds import FEW_VALUES, AtMost
from slipstream.serve.protocol.chat import TemplateVariables
from slipstream.serve.protocol.sampling import Word

_ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class CacheControl(RequestBody):
    """Has no effect: all prompts are cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Cached(RequestBody):
    cache_control: CacheControl | None = None


class TextBlock(_Cached):
    """A text."""

    type: Literal["text"]
    text: str


class Base64Source(RequestBody):
    """An image itself."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp", "image/bmp"]
    data: str


class UrlSource(RequestBody):
    """The URL of an image, as in a chat request."""

    type: Literal["url"]
    url: str


class ImageBlock(_Cached):
    """An image."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


class ThinkingBlock(RequestBody):
    """Reasoning of an earlier answer; `signature` may be anything."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(_Cached):
    """A call of a tool in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[dict[str, Any], FEW_VALUES]


Texts = str | Annotated[list[TextBlock], AtMost(bounds.MOST_PARTS)]
SeenBlock = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class ToolResultBlock(_Cached):
    """The result of a call; `is_error` has no effect, so the content should say it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[SeenBlock], AtMost(bounds.MOST_PARTS)] | None = None
    is_error: bool | None = None


UserBlock = Annotated[TextBlock | ImageBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class UserMessage(RequestBody):
    """A message of the user, or the results of tools."""

    role: Literal["user"]
    content: str | Annotated[list[UserBlock], Field(min_length=1), AtMost(bounds.MOST_PARTS)]


class AssistantMessage(RequestBody):
    """An earlier answer; as the last message, the beginning of the new answer."""

    role: Literal["assistant"]
    content: str | Annotated[list[AssistantBlock], AtMost(bounds.MOST_PARTS)]


class SystemMessage(RequestBody):
    """Instructions within a conversation."""

    role: Literal["system"]
    content: Texts


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class Tool(_Cached):
    """A tool that the client runs.

    Attributes:
        input_schema: JSON schema of its arguments.
        strict: whether arguments must follow the schema.
    """

    name: _ToolName
    input_schema: JsonSchema
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    eager_input_streaming: bool | None = (
        None  # no effect: arguments are always streamed as they are generated
    )


class ToolChoice(RequestBody):
    """Which tools the model calls: auto (it chooses), any (at least one), tool (this one), none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> "ToolChoice":
        if (self.name is None) == (self.type == "tool"):
            raise ValueError('name goes with the type "tool", and only with it')
        return self


class Thinking(RequestBody):
    """Whether the model thinks before it answers.

    Attributes:
        budget_tokens: the answer begins after this many tokens of thinking.
        display: "omitted" leaves thinking out of the answer; "summarized" includes all of it.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Positive | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _check(self) -> "Thinking":
        if (self.budget_tokens is None) == (self.type == "enabled"):
            raise ValueError('budget_tokens goes with the type "enabled", and only with it')
        return self


class JsonSchemaOutput(RequestBody):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: JsonSchema = Field(alias="schema")


class OutputConfig(RequestBody):
    """The form of the answer, and the `reasoning_effort` of chat requests."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonSchemaOutput | None = None


class CountTokensRequest(ModelRequest, _Cached):
    """Count the tokens of a conversation."""

    forms: ClassVar[Mapping[str, str]] = {
        "content": "a text or a list of blocks",
        "system": "a text or a list of blocks of type text",
        "tool_choice": '{"type": "auto"}, "any", "none", or "tool" with a name',
    }
    messages: Annotated[list[Message], Field(min_length=1), AtMost(bounds.MOST_MESSAGES)]
    system: Texts | None = None
    tools: Annotated[list[Tool], FEW_VALUES, AtMost(bounds.MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: TemplateVariables | None = None


class Metadata(RequestBody):
    """Has no effect."""

    user_id: str | None = None


class MessagesRequest(CountTokensRequest):
    """Answer a conversation.

    Attributes:
        max_tokens: may exceed the room that is left.
    """

    max_tokens: Positive
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    stop_sequences: Annotated[list[Word], AtMost(bounds.MOST_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Count | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> "MessagesRequest":
        if self.thinking is not None and (self.thinking.budget_tokens or 0) >= self.max_tokens:
            raise ValueError("thinking.budget_tokens must be less than max_tokens")
        return self


class AnswerText(ResponseBody):
    """Text of the answer."""

    type: Literal["text"]
    text: str


class AnswerThinking(ResponseBody):
    """Reasoning; the signature is a constant, since nothing is signed."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class AnswerToolUse(ResponseBody):
    """A call; `input` is empty at the start of a streamed one."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = Annotated[AnswerText | AnswerThinking | AnswerToolUse, Field(discriminator="type")]
StopReason = Literal[
    "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"
]


class MessagesUsage(ResponseBody):
    """Token counts; the prompt has `input_tokens` + `cache_read_input_tokens` tokens."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int


class MessagesAnswer(ResponseBody):
    """The response."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessagesDelta(ResponseBody):
    """New text of a block, or why the message ended."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] | None = (
        None
    )
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    partial_json: str | None = None
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None


class MessagesErrorObject(ResponseBody):
    """What is wrong, and what to do about it."""

    type: str
    message: str


class MessagesError(ResponseBody):
    """An error in the form of the Messages protocol."""

    type: Literal["error"]
    error: MessagesErrorObject


class MessagesEvent(ResponseBody):
    """The data of one event of a streamed response; the event has the name of its type."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    message: MessagesAnswer | None = None
    index: int | None = None
    content_block: AnswerBlock | None = None
    delta: MessagesDelta | None = None
    usage: MessagesUsage | None = None
    error: MessagesErrorObject | None = None


class TokenCount(ResponseBody):
    """Tokens of the prompt."""

    input_tokens: int
