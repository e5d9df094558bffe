"""Translates a request to /v1/responses to a chat request."""

from collections.abc import Sequence
from typing import Any, Final

from slipstream.serve.conversation import reads_reasoning
from slipstream.serve.errors import bad_request
from slipstream.serve.model_service import ModelService
from slipstream.serve.protocol import chat, responses
from slipstream.serve.protocol.sampling import JsonSchemaFormat, NamedSchema, SamplingFields
from slipstream.serve.responses.messages import MessageBuilder, parse_messages

# Fields with the same name and meaning in both requests.
_COMMON: Final = (
    *(set(SamplingFields.model_fields) - {"store", "stream_options"}),
    *("chat_template_kwargs", "include_reasoning", "mm_processor_kwargs", "thinking_token_budget"),
)
# Chat fields whose effects a response has no place for.
_OF_CHATS: Final = ("prompt_logprobs", "return_token_ids", "return_weight_versions")
# Fields of a chat request that have other names here.
NAMES: Final = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


def check(body: responses.ResponsesRequest) -> None:
    """Raise ApiError for fields that contradict each other."""
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options goes with stream: true", "stream_options")
    for name in _OF_CHATS:
        if (value := getattr(body, name)) is not None and value is not False:
            raise bad_request(
                f"{name} is not supported here; ask /v1/chat/completions for it", name
            )
    if body.top_logprobs and not wants_logprobs(body):
        raise bad_request(
            f"top_logprobs goes with include: [{responses.LOGPROBS!r}]", "top_logprobs"
        )


def wants_logprobs(body: responses.ResponsesRequest) -> bool:
    return responses.LOGPROBS in (body.include or ())


def conversation(
    service: ModelService, body: responses.ResponsesRequest, earlier: bytes | None
) -> MessageBuilder:
    """The conversation after `earlier` messages, without instructions."""
    found = MessageBuilder(
        [] if earlier is None else parse_messages(earlier), reads_reasoning(service)
    )
    if isinstance(body.input, str):
        found.add([responses.MessageItem(role="user", content=body.input)])
    else:
        found.add(body.input)
    found.require_few()
    return found


def later_turns(messages: Sequence[chat.Message]) -> list[int]:
    """Indices at which turns begin (with a user message), except the first turn."""
    return [place for place, message in enumerate(messages) if message.role == "user"][1:]


def from_turn(messages: Sequence[chat.Message], start: int) -> list[chat.Message]:
    """The conversation from `start` on, and the instructions before it."""
    kept = [message for message in messages[:start] if message.role in ("system", "developer")]
    return [*kept, *messages[start:]]


def chat_request(
    body: responses.ResponsesRequest, messages: Sequence[chat.Message]
) -> chat.ChatRequest:
    """Translate to a chat request; all values were validated already."""
    given = {name: getattr(body, name) for name in _COMMON}
    instructions: list[chat.Message] = []
    if body.instructions is not None:
        instructions = [chat.PlainMessage(role="system", content=body.instructions)]
    fields: dict[str, Any] = {
        "messages": [*instructions, *messages],
        "max_completion_tokens": body.max_output_tokens,
        "response_format": _format(body),
        "reasoning_effort": body.reasoning and body.reasoning.effort,
    }
    if wants_logprobs(body):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.tools:
        functions = (chat.Function(**it.model_dump(exclude={"type"})) for it in body.tools)
        choice: Any = body.tool_choice
        if isinstance(choice, responses.ChosenFunctionTool):
            named = chat.ChosenFunction(name=choice.name)
            choice = chat.ChosenTool(type="function", function=named)
        fields |= {
            "tools": [chat.Tool(type="function", function=it) for it in functions],
            "tool_choice": choice,
            "parallel_tool_calls": body.parallel_tool_calls,
        }
    elif body.tool_choice not in (None, "auto", "none"):
        raise bad_request("tool_choice goes with tools; give tools, or leave it out", "tool_choice")
    return chat.ChatRequest.model_construct(**given, **fields)


def _format(body: responses.ResponsesRequest) -> Any:
    wanted = body.text and body.text.format
    if not isinstance(wanted, responses.SchemaFormat):
        return wanted
    schema = NamedSchema(name=wanted.name, schema=wanted.schema_)
    return JsonSchemaFormat(type="json_schema", json_schema=schema)
