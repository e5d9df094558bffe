"""Translates requests of the Messages protocol to chat requests, and answers back."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final

from pydantic_core import from_json, to_json

from slipstream.serve.answer_reader import AnswerReader
from slipstream.serve.conversation import SWITCHES, reads_reasoning
from slipstream.serve.model_service import ModelService
from slipstream.serve.protocol import chat
from slipstream.serve.protocol import messages as given
from slipstream.serve.protocol.sampling import JsonSchemaFormat, NamedSchema
from slipstream.serve.tools.events import (
    AnswerEvent,
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    Reasoning,
)
from slipstream.serve.updates import Delta

# When clients send thinking back, they leave out blocks without a signature.
_SIGNATURE: Final = "unsigned"
_STOP_REASONS: Final = {"length": "max_tokens", "tool_calls": "tool_use"}


class BlockWriter:
    """Writes one sample's answer events as content blocks; a `SampleReader`. `stop_reason` and
    `stop_sequence` are set when it has ended."""

    def __init__(self, reader: AnswerReader) -> None:
        self.stop_reason: str | None = None
        self.stop_sequence: str | None = None
        self._reader = reader
        self._open: str | None = None  # type of the open block
        self._index = -1
        self._whole: list[tuple[dict[str, Any], list[str]]] = []

    @property
    def ended(self) -> bool:
        return self._reader.ended

    def collect(self, delta: Delta) -> None:
        for event in self.events(delta):
            if event["type"] == "content_block_start":
                self._whole.append((event["content_block"], []))
            elif event["type"] == "content_block_delta":
                self._whole[-1][1].extend(
                    text
                    for name, text in event["delta"].items()
                    if name not in ("type", "signature")
                )

    def whole(self) -> list[dict[str, Any]]:
        """The collected blocks."""
        return [_filled(block, "".join(texts)) for block, texts in self._whole]

    def events(self, delta: Delta) -> list[dict[str, Any]]:
        """The protocol's events for a delta; may be empty."""
        if self.stop_reason is not None:
            return []
        increment = self._reader.take(delta)
        events = [written for event in increment.events for written in self._written(event)]
        if self.ended:
            events += self._close()
            self._set_stop_reason(increment.delta)
        return events

    def _written(self, event: AnswerEvent) -> Iterator[dict[str, Any]]:
        match event:
            case Content(text) if text:
                yield from self._begin("text", text="")
                yield self._delta("text_delta", text=text)
            case Reasoning(text) if text:
                yield from self._begin("thinking", thinking="", signature="")
                yield self._delta("thinking_delta", thinking=text)
            case CallBegun(name):
                yield from self._close()
                yield from self._begin(
                    "tool_use", id=self._reader.new_call_id(), name=name, input={}
                )
            case Arguments(text) if text:
                yield self._delta("input_json_delta", partial_json=text)
            case CallEnded():
                yield from self._close()

    def _begin(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        if self._open != kind:
            yield from self._close()
            self._open = kind
            self._index += 1
            block = {"type": kind, **fields}
            yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, kind: str, **fields: str) -> dict[str, Any]:
        delta = {"type": kind, **fields}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open == "thinking":
            yield self._delta("signature_delta", signature=_SIGNATURE)
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._index}

    def _set_stop_reason(self, delta: Delta) -> None:
        reason = self._reader.finish_reason(delta)
        if reason == "stop" and isinstance(delta.stop_reason, str):
            self.stop_reason, self.stop_sequence = "stop_sequence", delta.stop_reason
        else:
            self.stop_reason = _STOP_REASONS.get(reason or "", "end_turn")


def _filled(block: dict[str, Any], text: str) -> dict[str, Any]:
    match block["type"]:
        case "tool_use":
            return {**block, "input": _input(text)}
        case "thinking":
            return {**block, "thinking": text, "signature": _SIGNATURE}
        case _:
            return {**block, "text": text}


def _input(arguments: str) -> dict[str, Any]:
    """Parse arguments, which may be cut off; text that is not an object becomes `arguments`."""
    try:
        value = from_json(arguments or "{}", allow_inf_nan=False, allow_partial=True)
    except ValueError:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": arguments}


# Start of a block that coding agents put before their instructions. It differs in every request, so
# that prompts would never share a prefix in the cache.
_BILLING: Final = "x-anthropic-billing-header"
# Fields with the same name and meaning in both requests.
_COMMON: Final = ("max_tokens", "stream", "temperature", "top_p", "top_k", "cache_salt")
# Fields of a chat request that have other names here.
NAMES: Final = {
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
}


def chat_request(body: given.CountTokensRequest, service: ModelService) -> chat.ChatRequest:
    """Translate to a chat request; its contents are checked when it is prepared, like a chat's."""
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
    if isinstance(body, given.MessagesRequest):
        fields |= {name: getattr(body, name) for name in _COMMON}
        fields["stop"] = body.stop_sequences
    # All values were validated by the other protocol.
    return chat.ChatRequest.model_construct(**fields)


def _system(system: given.Texts | None) -> Iterator[chat.Message]:
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    text = "\n".join(text for text in texts if not text.startswith(_BILLING))
    if text:
        yield chat.PlainMessage(role="system", content=text)


def _messages(messages: Sequence[given.Message], keeps_thinking: bool) -> Iterator[chat.Message]:
    """Translate messages; adjacent messages of one role form one turn."""
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
    return [given.TextBlock(type="text", text=content)] if isinstance(content, str) else content


def _user(blocks: Sequence[tuple[str, given.UserBlock]]) -> Iterator[chat.Message]:
    for is_result, run in groupby(
        blocks, lambda placed: isinstance(placed[1], given.ToolResultBlock)
    ):
        if not is_result:
            yield chat.PlainMessage(role="user", content=_content([*run]))
            continue
        for where, block in run:
            assert isinstance(block, given.ToolResultBlock)
            inner = enumerate(_blocks(block.content or ""))
            content = _content([(f"{where}.content[{number}]", it) for number, it in inner])
            yield chat.ToolMessage(role="tool", content=content, tool_call_id=block.tool_use_id)


def _assistant(
    blocks: Sequence[given.AssistantBlock], keeps_thinking: bool
) -> chat.AssistantMessage:
    """Join texts without separators: an answer has several if there were calls between them."""
    calls = [
        chat.MessageToolCall(
            id=block.id,
            function=chat.CalledFunction(name=block.name, arguments=to_json(block.input).decode()),
        )
        for block in blocks
        if isinstance(block, given.ToolUseBlock)
    ]
    text = "".join(block.text for block in blocks if isinstance(block, given.TextBlock))
    thoughts = [block.thinking for block in blocks if isinstance(block, given.ThinkingBlock)]
    return chat.AssistantMessage(
        role="assistant",
        content=None if calls and not text else text,
        reasoning="\n".join(thoughts) or None if keeps_thinking else None,
        tool_calls=calls or None,
    )


def _content(blocks: Sequence[tuple[str, Any]]) -> Any:
    """Join texts with line breaks, as for the parts of a chat message; with images, return parts.

    Args:
        blocks: (name of the block's field, block).
    """
    if not any(isinstance(block, given.ImageBlock) for _, block in blocks):
        return "\n".join(block.text for _, block in blocks)
    return [
        chat.ImagePart.at(where, _url(block.source))
        if isinstance(block, given.ImageBlock)
        else chat.TextPart(type="text", text=block.text)
        for where, block in blocks
    ]


def _url(source: given.Base64Source | given.UrlSource) -> str:
    if isinstance(source, given.UrlSource):
        return source.url
    return f"data:{source.media_type};base64,{source.data}"


def _takes_beginning(messages: list[chat.Message]) -> bool:
    """Whether the last message is the beginning of the answer; an empty one is removed."""
    last = messages[-1]
    if not isinstance(last, chat.AssistantMessage) or last.tool_calls:
        return False
    assert isinstance(last.content, str)
    if last.content.strip():
        return True
    messages.pop()
    return False


def _tools(body: given.CountTokensRequest) -> dict[str, Any]:
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


def _tool(tool: given.Tool) -> chat.Tool:
    function = chat.Function.model_construct(  # the limits on names are stricter there
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return chat.Tool.model_construct(type="function", function=function)


def _thinking(body: given.CountTokensRequest, service: ModelService) -> dict[str, Any]:
    """The fields for `thinking`; without it, the template's default applies."""
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
