"""/v1/messages: answer conversations in the Messages protocol, and count their tokens."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

from pydantic_core import to_json
from starlette.responses import Response

from slipstream.serve.answer import Answer
from slipstream.serve.chat import PreparedChat, prepare
from slipstream.serve.conversation import render
from slipstream.serve.conversation_images import read_images
from slipstream.serve.errors import MESSAGES_PATH, ApiError, renamed
from slipstream.serve.messages.translation import NAMES, BlockWriter, chat_request
from slipstream.serve.model_service import ModelService
from slipstream.serve.openapi import json_response
from slipstream.serve.protocol.chat import ChatRequest
from slipstream.serve.protocol.messages import (
    CountTokensRequest,
    MessagesRequest,
    TokenCount,
)
from slipstream.serve.sse import stream_error
from slipstream.serve.tokenize import tokens_with
from slipstream.serve.tools.tool_choice import choose_tools

_PING: Final = {"type": "ping"}


class MessagesEndpoints:
    """Handles POST /v1/messages and /v1/messages/count_tokens."""

    def __init__(self, service: ModelService) -> None:
        self._service = service

    async def count_tokens(self, body: CountTokensRequest) -> Response:
        """Count the tokens of a conversation in the Messages protocol"""
        return await self._service.pool_for(body.messages)(self._count, body)

    async def answer(self, body: MessagesRequest) -> Response:
        """Answer a conversation in the Messages protocol, whole or streamed"""
        service = self._service
        service.thread.check_room(1)
        chat_body, chat = await service.pool_for(body.messages)(self._prepare, body)
        writer = BlockWriter(chat.reader(service, chat_body))
        return await _MessagesAnswer(service, chat_body, [chat.prompt], [writer]).response(
            chat.params
        )

    def _prepare(self, body: MessagesRequest) -> tuple[ChatRequest, PreparedChat]:
        """Check, render and tokenize; slow for large requests."""
        chat_body = chat_request(body, self._service)
        try:
            return chat_body, prepare(self._service, chat_body, ends_early=True)
        except ApiError as error:
            raise renamed(error, NAMES) from None

    def _count(self, body: CountTokensRequest) -> Response:
        chat_body = chat_request(body, self._service)
        tools = choose_tools(chat_body, self._service)
        images = read_images(self._service, chat_body.messages)
        prompt = render(self._service, chat_body.messages, chat_body, tools.in_prompt, [])
        tokens = tokens_with(self._service, prompt, images, adds_special=False)
        return json_response(TokenCount(input_tokens=len(tokens)))


class _MessagesAnswer(Answer[BlockWriter]):
    id_prefix = "msg_"
    _body: ChatRequest

    def _document(self) -> bytes:
        [writer] = self._choices
        return to_json({**self._opening(), "content": writer.whole(), **self._ending()})

    async def _events(self) -> AsyncGenerator[bytes, None]:
        [writer] = self._choices
        begun = False
        try:
            async with aclosing(self._updates()) as updates:
                async for place, update in updates:
                    events: list[dict[str, Any]] = []
                    if not begun:  # the hits in the prefix cache are known now
                        begun = True
                        events += [{"type": "message_start", "message": self._opening()}, _PING]
                    for _, delta in self._deltas(place, update):
                        events += writer.events(delta)
                    if events:
                        yield b"".join(map(_event, events))
            counts = self._counts()
            yield _event({"type": "message_delta", "delta": self._ending(), "usage": counts})
            yield _event({"type": "message_stop"})
        except Exception as error:
            yield b"event: error\ndata: " + stream_error(error).body(MESSAGES_PATH) + b"\n\n"

    def _opening(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._service.answers_as(self._body.model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._counts(),
        }

    def _ending(self) -> dict[str, str | None]:
        [writer] = self._choices
        reason, most = writer.stop_reason, self._body.max_tokens or 0
        if reason == "max_tokens" and self._usage().completion_tokens < most:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": writer.stop_sequence}

    def _counts(self) -> dict[str, int]:
        """Token counts so far; `input_tokens` excludes those found in the prefix cache."""
        usage = self._usage()
        details = usage.prompt_tokens_details
        cached = 0 if details is None else details.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
        }


def _event(event: Mapping[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: ".encode() + to_json(event) + b"\n\n"
