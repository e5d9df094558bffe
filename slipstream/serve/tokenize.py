"""/tokenize, /detokenize and /tokenizer_info."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from slipstream.serve.conversation import note_ignored, render
from slipstream.serve.conversation_images import read_images
from slipstream.serve.errors import bad_request
from slipstream.serve.model_service import ModelService
from slipstream.serve.openapi import json_response
from slipstream.serve.protocol import server
from slipstream.serve.protocol.bounds import MOST_TEXT_BYTES

if TYPE_CHECKING:
    from PIL.Image import Image


class TokenizeEndpoints:
    """Handles POST /tokenize and /detokenize, and GET /tokenizer_info."""

    def __init__(self, service: ModelService) -> None:
        self._service = service

    async def tokenize(self, body: server.TokenizeRequest) -> Response:
        """Token ids of a prompt or of messages"""
        service = self._service
        run = service.pool_for(body.messages, body.chat_template)
        return await run(self._tokenize, body)

    async def detokenize(self, body: server.DetokenizeRequest) -> Response:
        """The text of token ids"""
        return await self._service.workers(self._detokenize, body)

    async def info(self, _: Request) -> Response:
        """Special tokens and the chat template"""
        return await self._service.workers(self._info)

    def _info(self) -> Response:
        tokenizer = self._service.tokenizer
        named, kind = tokenizer.special_tokens, tokenizer.settings.get("tokenizer_class")
        return json_response(
            server.TokenizerInfo(
                tokenizer_class=kind if isinstance(kind, str) else None,
                eos_token=named.get("eos_token"),
                bos_token=named.get("bos_token"),
                unk_token=named.get("unk_token"),
                pad_token=named.get("pad_token"),
                chat_template=self._service.template.default,
            )
        )

    def _tokenize(self, body: server.TokenizeRequest) -> Response:
        ignored: list[str] = []
        images: list[Image] = []
        service, tokenizer = self._service, self._service.tokenizer
        if body.messages is not None:
            if body.chat_template is not None:
                service = service.with_template(body.chat_template)
            images = read_images(service, body.messages, body.mm_processor_kwargs)
            given = render(service, body.messages, body, body.tools, ignored)
            field, adds_special = "messages", body.add_special_tokens is True
        else:
            assert body.prompt is not None, "one of the two is given"
            given, field = body.prompt, "prompt"
            adds_special = body.add_special_tokens is not False
        options = body.mm_processor_kwargs or {}
        tokens = tokens_with(service, given, images, adds_special, field, options)
        answer = server.TokenizeResponse(
            count=len(tokens), max_model_len=self._service.max_model_len, tokens=tokens
        )
        if body.return_token_strs:
            answer.token_strs = [tokenizer.id_to_token(token) or "" for token in tokens]
        return note_ignored(json_response(answer), ignored)

    def _detokenize(self, body: server.DetokenizeRequest) -> Response:
        tokenizer, vocab_size = self._service.tokenizer, self._service.engine.resolved.vocab_size
        largest = max(body.tokens, default=0)
        if largest >= vocab_size:
            raise bad_request(
                f"tokens holds {largest}, but token ids go from 0 to {vocab_size - 1}", "tokens"
            )
        text = tokenizer.decode(body.tokens, skip_special_tokens=False)
        return json_response(server.DetokenizeResponse(prompt=text))


def tokens_with(
    service: ModelService,
    prompt: str | list[int],
    images: Sequence["Image"],
    adds_special: bool,
    field: str = "messages",
    options: Mapping[str, Any] = MappingProxyType({}),
) -> list[int]:
    """The tokens of a prompt and of its images, which are not read.

    Args:
        options: of the image processor.

    Raises:
        ApiError, UsageError: the text is too large, or images do not fit its placeholders.
    """
    reader = service.engine.images
    if isinstance(prompt, str):
        _require_small(prompt, field)
        text = reader.written(prompt) if images else prompt
        prompt = service.tokenizer.encode(text, add_special_tokens=adds_special)
    return reader.spread(prompt, images, options) if images else prompt


def _require_small(text: str, field: str) -> None:
    """Raise ApiError for a text that would keep a thread for too long."""
    size = len(text.encode(errors="replace"))
    if size > MOST_TEXT_BYTES:
        raise bad_request(
            f"the text of {field} has {size} bytes, more than {MOST_TEXT_BYTES}; send it in parts",
            field,
        )
