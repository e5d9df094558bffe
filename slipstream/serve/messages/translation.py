"""Requests of the Messages protocol as requests for chats."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final

from pydantic_core import to_json

from slipstream.serve.conversation import SWITCHES, reads_reasoning
from slipstream.serve.model_service import ModelService
from slipstream.serve.protocol import chat
from slipstream.serve.protocol.messages import (
    AssistantBlock,
    Base64Source,
    CountTokensRequest,
    ImageBlock,
    Message,
    MessagesRequest,
    TextBlock,
    Texts,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
    UserBlock,
)
from slipstream.serve.protocol.sampling import JsonSchemaFormat, NamedSchema

# Begins a block that coding agents put in front of their instructions. It differs from request to
# request, so that no prefix would ever be found in the cache.
_BILLING: Final = "x-anthropic-billing-header"
# Fields with the same name and meaning in both requests.
_COMMON: Final = ("max_tokens", "stream", "temperature", "top_p", "top_k", "cache_salt")
# Fields of a chat that have other names here.
NAMES: Final = {
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
}


def chat_request(body: CountTokensRequest, service: ModelService) -> chat.ChatRequest:
    """The request for a chat that asks for the same; ApiError as of chats, when it is prepared."""
    messages = [*_system(body.system), *_messages(body.messages, reads_reasoning(service))]
    continues = _takes_beginning(messages)
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "continue_final_message": True if continues else None,
        **_tools(body),
        **_thinking(body, service),
    }
    config = body.output_config
    if config is not None:
        fields["reasoning_effort"] = config.effort
    if config is not None and config.format is not None:
        schema = NamedSchema(name="answer", schema=config.format.schema_)
        fields["response_format"] = JsonSchemaFormat(type="json_schema", json_schema=schema)
    if isinstance(body, MessagesRequest):
        fields |= {name: getattr(body, name) for name in _COMMON}
        fields["stop"] = body.stop_sequences
    # All of it was validated already, in the other protocol.
    return chat.ChatRequest.model_construct(**fields)


def _system(system: Texts | None) -> Iterator[chat.Message]:
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    text = "\n".join(text for text in texts if not text.startswith(_BILLING))
    if text:
        yield chat.PlainMessage(role="system", content=text)


def _messages(messages: Sequence[Message], keeps_thinking: bool) -> Iterator[chat.Message]:
    """Messages of one role that follow each other are one turn."""
    for role, turn in groupby(enumerate(messages), lambda placed: placed[1].role):
        blocks = [
            (f"messages[{place}].content[{number}]", block)
            for place, message in turn
            for number, block in enumerate(_blocks(message.content))
        ]
        if role == "assistant":
            yield _assistant([block for _, block in blocks], keeps_thinking)
        elif role == "user":
            yield from _user(blocks)
        else:
            yield chat.PlainMessage(role="system", content=_content(blocks))


def _blocks(content: str | Sequence[Any]) -> Sequence[Any]:
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content


def _user(blocks: Sequence[tuple[str, UserBlock]]) -> Iterator[chat.Message]:
    for is_result, run in groupby(blocks, lambda placed: isinstance(placed[1], ToolResultBlock)):
        if not is_result:
            yield chat.PlainMessage(role="user", content=_content([*run]))
            continue
        for where, block in run:
            assert isinstance(block, ToolResultBlock)
            inner = enumerate(_blocks(block.content or ""))
            content = _content([(f"{where}.content[{number}]", it) for number, it in inner])
            yield chat.ToolMessage(role="tool", content=content, tool_call_id=block.tool_use_id)


def _assistant(blocks: Sequence[AssistantBlock], keeps_thinking: bool) -> chat.AssistantMessage:
    """Texts are put together as they are: an answer has several where calls stood between them."""
    calls = [
        chat.MessageToolCall(
            id=block.id,
            function=chat.CalledFunction(name=block.name, arguments=to_json(block.input).decode()),
        )
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    return chat.AssistantMessage(
        role="assistant",
        content=None if calls and not text else text,
        reasoning="\n".join(thoughts) or None if keeps_thinking else None,
        tool_calls=calls or None,
    )


def _content(blocks: Sequence[tuple[str, Any]]) -> Any:
    """Texts one under the other, as chats put the parts of a content together; parts if any of the
    blocks is an image.

    Args:
        blocks: with the fields that they came in.
    """
    if not any(isinstance(block, ImageBlock) for _, block in blocks):
        return "\n".join(block.text for _, block in blocks)
    return [
        chat.ImagePart.at(where, _url(block.source))
        if isinstance(block, ImageBlock)
        else chat.TextPart(type="text", text=block.text)
        for where, block in blocks
    ]


def _url(source: Base64Source | UrlSource) -> str:
    if isinstance(source, UrlSource):
        return source.url
    return f"data:{source.media_type};base64,{source.data}"


def sees_images(body: CountTokensRequest) -> bool:
    """Whether a conversation has images."""
    for message in body.messages:
        for block in () if isinstance(message.content, str) else message.content:
            inner = block.content or () if isinstance(block, ToolResultBlock) else ()
            if any(isinstance(it, ImageBlock) for it in (block, *inner)):
                return True
    return False


def _takes_beginning(messages: list[chat.Message]) -> bool:
    """Whether the last message begins the answer; one that says nothing is removed."""
    last = messages[-1]
    if not isinstance(last, chat.AssistantMessage) or last.tool_calls:
        return False
    assert isinstance(last.content, str)
    if last.content.strip():
        return True
    messages.pop()
    return False


def _tools(body: CountTokensRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.tools is not None:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    choice = body.tool_choice
    if choice is not None:
        names: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
        if choice.name is not None:
            function = chat.ChosenFunction(name=choice.name)
            names["tool"] = chat.ChosenTool(type="function", function=function)
        fields["tool_choice"] = names[choice.type]
        if choice.disable_parallel_tool_use is not None and body.tools:
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _tool(tool: Tool) -> chat.Tool:
    function = chat.Function.model_construct(  # whose names are shorter there
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return chat.Tool.model_construct(type="function", function=function)


def _thinking(body: CountTokensRequest, service: ModelService) -> dict[str, Any]:
    """Without `thinking` the model does what it does by default."""
    fields: dict[str, Any] = {"chat_template_kwargs": body.chat_template_kwargs}
    thinking = body.thinking
    if thinking is None:
        return fields
    fields["thinking_token_budget"] = thinking.budget_tokens
    wanted = thinking.type != "disabled"
    switches = {name: wanted for name in SWITCHES if name in service.template.variables}
    if switches:
        fields["chat_template_kwargs"] = {**switches, **(body.chat_template_kwargs or {})}
    if not wanted or thinking.display == "omitted":
        fields["include_reasoning"] = False
    return fields
