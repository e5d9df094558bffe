"""Bodies of requests to /v1/responses."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from slipstream.serve.protocol import bounds
from slipstream.serve.protocol.base import JsonSchema, OnlyFalse, Positive, RequestBody
from slipstream.serve.protocol.bounds import FEW_VALUES, AtMost
from slipstream.serve.protocol.chat import (
    ChosenFunction,
    Function,
    ProcessorOptions,
    ReasoningEffort,
    TemplateVariables,
    ThinkingBudget,
)
from slipstream.serve.protocol.sampling import (
    MOST_LOGPROBS,
    JsonObjectFormat,
    NamedSchema,
    SamplingFields,
    TextFormat,
)
from slipstream.serve.protocol.usage import StreamOptions

_Status = Literal["in_progress", "completed", "incomplete"]
# Fields of an earlier answer besides its text; they have no effect when they are sent back.
_Ignored = Annotated[list[Any], AtMost(bounds.MOST_TOKEN_IDS)]


class InputText(RequestBody):
    """Text of the user, of instructions or of a tool."""

    type: Literal["input_text"]
    text: str


class InputImage(RequestBody):
    """An image of the user or of a tool.

    Attributes:
        image_url, detail: the `url` and the `detail` of an image in a chat.
    """

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high"] | None = None


class EarlierText(RequestBody):
    """Text of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: _Ignored | None = None
    logprobs: _Ignored | None = None


_Parts = Annotated[
    list[Annotated[InputText | InputImage | EarlierText, Field(discriminator="type")]],
    Field(min_length=1),
    AtMost(bounds.MOST_PARTS),
]


class MessageItem(RequestBody):
    """A message; its type may be left out."""

    type: Literal["message"] = "message"
    role: Literal["assistant", "developer", "system", "user"]
    content: str | _Parts
    id: str | None = None
    status: _Status | None = None

    @model_validator(mode="after")
    def _check(self) -> "MessageItem":
        if self.role == "assistant" and any(isinstance(it, InputImage) for it in self.content):
            raise ValueError("the assistant writes no images; send them as the user's")
        return self


class FunctionCallItem(RequestBody):
    """A call by the model; `arguments` is a JSON object as text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: _Status | None = None


class FunctionOutputItem(RequestBody):
    """The result of the call with this id."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | _Parts
    id: str | None = None
    status: _Status | None = None


class SummaryPart(RequestBody):
    """A summary of reasoning, as other servers write it."""

    type: Literal["summary_text"]
    text: str


class ReasoningPart(RequestBody):
    """Text of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(RequestBody):
    """Reasoning of an earlier answer: its content, or else its summary."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryPart], AtMost(bounds.MOST_PARTS)] | None = None
    content: Annotated[list[ReasoningPart], AtMost(bounds.MOST_PARTS)] | None = None
    id: str | None = None
    status: _Status | None = None


def _named(item: Any) -> Any:
    """Items without a type but with a role are messages."""
    if isinstance(item, dict) and "type" not in item and "role" in item:
        return {**item, "type": "message"}
    return item


Item = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem
_Items = Annotated[
    list[Annotated[Annotated[Item, Field(discriminator="type")], BeforeValidator(_named)]],
    Field(min_length=1),
    AtMost(bounds.MOST_MESSAGES),
]


class FunctionTool(Function):
    """A function that the model may call, which the client runs; the only type of tool here."""

    type: Literal["function"]


def _require_function(tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise ValueError(
            f"the type {kind[:50]} is not supported: tools are functions here, which the client "
            "runs; describe the tool as one"
        )
    return tool


_FUNCTION_ALONE = BeforeValidator(_require_function)


Tools = Annotated[
    list[Annotated[FunctionTool, _FUNCTION_ALONE]], FEW_VALUES, AtMost(bounds.MOST_TOOLS)
]


class ChosenFunctionTool(ChosenFunction):
    """The function that must be called."""

    type: Literal["function"]


class SchemaFormat(NamedSchema):
    """JSON that follows a schema; it is followed whether `strict` is set or not."""

    type: Literal["json_schema"]
    schema_: JsonSchema = Field(alias="schema")


class TextOptions(RequestBody):
    """The form of the text."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None
    ) = None


class ReasoningOptions(RequestBody):
    """Options of the model's reasoning.

    Attributes:
        effort: the `reasoning_effort` of chats.
        summary, generate_summary: no effect; reasoning is returned unsummarized.
    """

    effort: ReasoningEffort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(StreamOptions):
    """Options of a stream; its last event has the usage in any case."""

    continuous_usage_stats: OnlyFalse | None = None


LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(SamplingFields):
    """Answer a conversation, which may continue that of an earlier response.

    Attributes:
        previous_response_id: id of a stored response; its instructions are not used again.
        max_output_tokens: reasoning included; by default up to `max_model_len`.
        max_tool_calls: no effect: it limits the calls of tools that a server runs itself.
        parallel_tool_calls: false ends the answer after its first tool call.
        include: reasoning.encrypted_content has no effect: reasoning is returned unencrypted.
        truncation: auto drops the oldest turns of a conversation that is too long.
        store: keep the response for `previous_response_id`; true by default.
    """

    input: str | _Items
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Positive | None = None
    max_tool_calls: Positive | None = None
    tools: Tools | None = None
    tool_choice: (
        Annotated[Literal["none", "auto", "required"] | ChosenFunctionTool, _FUNCTION_ALONE] | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: (
        Annotated[
            list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
            AtMost(bounds.MOST_LABELS),
        ]
        | None
    ) = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None  # type: ignore[assignment]  # chats store nothing
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: TemplateVariables | None = None
    mm_processor_kwargs: ProcessorOptions | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: ThinkingBudget | None = None

    # Accepted without effect: see docs/protocol.md.
    background: OnlyFalse | None = None
    n: Annotated[int, Field(ge=1, le=1)] | None = None
