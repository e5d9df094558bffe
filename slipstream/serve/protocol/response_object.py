"""Bodies of answers of /v1/responses."""

from typing import Any, Literal

from slipstream.serve.protocol.base import ResponseBody
from slipstream.serve.protocol.chat import TokenLogprob
from slipstream.serve.protocol.usage import SpeculatedTokens, SpeculationUsage

_Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(ResponseBody):
    """Text of the answer; `annotations` is empty."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class ReasoningText(ResponseBody):
    """Text of the model's reasoning before the answer."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(ResponseBody):
    """A message of the answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: _Status
    content: list[OutputText]


class OutputReasoning(ResponseBody):
    """Reasoning of the answer; nothing is summarized."""

    id: str
    type: Literal["reasoning"]
    status: _Status
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(ResponseBody):
    """A tool call of the answer; its result names `call_id`."""

    id: str
    type: Literal["function_call"]
    status: _Status
    call_id: str
    name: str
    arguments: str


class CachedTokens(ResponseBody):
    """Prompt tokens found in the prefix cache; tokens written to it are not counted."""

    cached_tokens: int
    cache_write_tokens: Literal[0]


class ReasoningTokens(ResponseBody):
    """Output tokens that are reasoning, if the model's format separates it."""

    reasoning_tokens: int


class ResponseUsage(ResponseBody):
    """Token counts."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int
    speculation: SpeculationUsage | None = None


class ResponseFailure(ResponseBody):
    """Why a streamed response failed."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(ResponseBody):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(ResponseBody):
    """A response, with the fields of its request.

    Attributes:
        usage: None until it is complete.
        speculation: the tokens, if asked for.
    """

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    speculation: SpeculatedTokens | None = None


class ResponseEvent(ResponseBody):
    """An event of a streamed response: its type says which of the fields it has."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: ResponseObject | None = None
    item: OutputMessage | OutputReasoning | OutputCall | None = None
    part: OutputText | ReasoningText | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None
    logprobs: list[TokenLogprob] | None = None


class DeletedResponse(ResponseBody):
    """The response is no longer stored."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]
