"""Bodies of /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from slipstream.serve.protocol import bounds
from slipstream.serve.protocol.base import (
    MOST_INT,
    Empty,
    JsonSchema,
    Positive,
    RequestBody,
    ResponseBody,
)
from slipstream.serve.protocol.bounds import FEW_VALUES, AtMost
from slipstream.serve.protocol.completions import PromptLogprobs
from slipstream.serve.protocol.sampling import MOST_LOGPROBS, ResponseFormat, SamplingFields
from slipstream.serve.protocol.usage import AnswerBody, ChoiceBody, Usage

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class TextPart(RequestBody):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ImageUrl(RequestBody):
    """The URL of an image: a data URL, or a file or web address that the server allows.

    Attributes:
        detail: a hint without effect, since the server sets one size for all images.
    """

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(RequestBody):
    """An image in a message's content."""

    type: Literal["image_url"]
    image_url: ImageUrl
    _where: str = ""

    @classmethod
    def at(cls, where: str, url: str) -> "ImagePart":
        """An image from a body of another protocol, where it was in the field `where`."""
        part = cls(type="image_url", image_url=ImageUrl(url=url))
        part._where = where
        return part

    @property
    def where(self) -> str:
        """The field that errors name; empty for this part itself."""
        return self._where


class CalledFunction(RequestBody):
    """A function that the assistant called; `arguments` is a JSON object as text."""

    name: str
    arguments: str


class MessageToolCall(RequestBody):
    """A tool call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


Content = str | Annotated[list[TextPart], Field(min_length=1), AtMost(bounds.MOST_PARTS)]
Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]
ContentWithImages = str | Annotated[list[Part], Field(min_length=1), AtMost(bounds.MOST_PARTS)]


class PlainMessage(RequestBody):
    """A message of the user, or instructions before it."""

    role: Literal["developer", "system", "user"]
    content: ContentWithImages
    name: str | None = None


class AssistantMessage(RequestBody):
    """An earlier answer of the model.

    Attributes:
        reasoning: the reasoning before it; `reasoning_content` is the older name.
    """

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[MessageToolCall], AtMost(bounds.MOST_PARTS)] | None = None

    @model_validator(mode="after")
    def _check(self) -> "AssistantMessage":
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs a content; only one with tool_calls may lack it")
        older, newer = self.reasoning_content, self.reasoning
        if older is not None and newer is not None and older != newer:
            raise ValueError("reasoning_content is the older name of reasoning; give one of them")
        return self


class ToolMessage(RequestBody):
    """The result of a tool call."""

    role: Literal["tool"]
    content: ContentWithImages
    tool_call_id: str
    name: str | None = None


Message = Annotated[PlainMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Messages = Annotated[list[Message], Field(min_length=1), AtMost(bounds.MOST_MESSAGES)]


class Function(RequestBody):
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments; without one any object is allowed.
        strict: whether arguments must follow the schema.
    """

    name: FunctionName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class Tool(RequestBody):
    """A tool; all tools are functions."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], FEW_VALUES, AtMost(bounds.MOST_TOOLS)]
Documents = Annotated[list[dict[str, str]], FEW_VALUES, AtMost(bounds.MOST_DOCUMENTS)]
ProcessorOptions = Annotated[dict[str, Any], FEW_VALUES, AtMost(bounds.MOST_OPTIONS)]
TemplateVariables = Annotated[dict[str, Any], FEW_VALUES, AtMost(bounds.MOST_LABELS)]


class ChosenFunction(RequestBody):
    """The name of a function in `tools`."""

    name: str


class ChosenTool(RequestBody):
    """The tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ThinkingBudget = Annotated[int, Field(ge=-1, le=MOST_INT)]


class TemplateFields(RequestBody):
    """The fields of a request that determine the tokens of its messages.

    Attributes:
        documents: the variable of that name of the chat template.
        chat_template: replaces the model's, if the server allows it.
        chat_template_kwargs: further variables of the chat template.
        reasoning_effort: the variable of that name of the chat template; "none" switches thinking
            off.
        continue_final_message: continue the text of the last message.
        mm_processor_kwargs: options of the image processor, which precede the server's.
    """

    tools: Tools | None = None
    documents: Documents | None = None
    chat_template: (
        Annotated[str, Field(min_length=1, max_length=bounds.MOST_TEMPLATE_CHARACTERS)] | None
    ) = None
    chat_template_kwargs: TemplateVariables | None = None
    reasoning_effort: ReasoningEffort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    mm_processor_kwargs: ProcessorOptions | None = None


class ChatRequest(SamplingFields, TemplateFields):
    """Answer a conversation.

    Attributes:
        max_tokens: the older name of `max_completion_tokens`; by default up to `max_model_len`.
        parallel_tool_calls: false ends the answer after its first tool call.
        include_reasoning: false leaves the reasoning out of the answer.
        echo: begin the content with that of the last message, if it is an assistant's.
        return_prompt_text: the answer includes the prompt that the chat template rendered.
        thinking_token_budget: the answer begins after this many tokens of reasoning; -1: no limit.
    """

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    response_format: ResponseFormat | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: ThinkingBudget | None = None

    echo: bool | None = None
    return_prompt_text: bool | None = None
    # Accepted without effect, or empty: see docs/protocol.md.
    modalities: (
        Annotated[list[Literal["text"]], Field(min_length=1), AtMost(bounds.MOST_LABELS)] | None
    ) = None
    media_io_kwargs: Empty | None = None


class TopLogprob(ResponseBody):
    """A candidate for a token; `bytes` of its text in UTF-8."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token and its most probable alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseBody):
    """One entry per token; if reasoning is separated from the content, per token of the content."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(ResponseBody):
    """The function of a call; `arguments` is JSON as the model wrote it."""

    name: str
    arguments: str


class ToolCall(ResponseBody):
    """A tool call of the answer."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AnswerMessage(ResponseBody):
    """The assistant's message; `reasoning_content` repeats `reasoning` for older clients.

    Attributes:
        role: "assistant", unless the server's --response-role is another.
    """

    role: str
    content: str | None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(ChoiceBody):
    """One answer."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(AnswerBody):
    """The response."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


class FunctionDelta(ResponseBody):
    """New text of a call; the first one has the name."""

    name: str | None = None
    arguments: str


class ToolCallDelta(ResponseBody):
    """New text of the call with this index; the first one has the id."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(ResponseBody):
    """New text of the assistant's message."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(ChoiceBody):
    """An increment of a choice; the last one has the finish reason."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatChunk(AnswerBody):
    """One event of a streamed response."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
