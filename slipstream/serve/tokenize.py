"""/tokenize and /detokenize: what the tokenizer makes of a text, and back."""

from starlette.requests import Request
from starlette.responses import Response

from slipstream.serve.bodies import read_body
from slipstream.serve.conversation import render
from slipstream.serve.errors import bad_request
from slipstream.serve.model import ServedModel
from slipstream.serve.protocol.bounds import MOST_TEXT_BYTES
from slipstream.serve.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)


class Tokens:
    """Answers the requests of both endpoints."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt or of messages."""
        body = await read_body(request, TokenizeRequest, self._model)
        return _json(await self._model.aside(self._tokenize, body))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body = await read_body(request, DetokenizeRequest, self._model)
        return _json(await self._model.aside(self._detokenize, body))

    def _tokenize(self, body: TokenizeRequest) -> str:
        tokenizer = self._model.tokenizer
        if body.prompt is not None:
            text, adds = body.prompt, body.add_special_tokens is not False
        else:
            text = render(self._model.template, body, body.tools)
            adds = body.add_special_tokens is True
        _require_short(text, "messages" if body.prompt is None else "prompt")
        tokens = tokenizer.encode(text, add_special_tokens=adds)
        answer = TokenizeResponse(
            count=len(tokens), max_model_len=self._model.max_model_len, tokens=tokens
        )
        if body.return_token_strs:
            answer.token_strs = [tokenizer.id_to_token(token) or "" for token in tokens]
        return answer.model_dump_json(exclude_unset=True)

    def _detokenize(self, body: DetokenizeRequest) -> str:
        tokenizer, most = self._model.tokenizer, self._model.engine.resolved.vocab_size
        largest = max(body.tokens, default=0)
        if largest >= most:
            raise bad_request(
                f"tokens holds {largest}, but token ids go from 0 to {most - 1}", "tokens"
            )
        text = tokenizer.decode(body.tokens, skip_special_tokens=False)
        return DetokenizeResponse(prompt=text).model_dump_json()


def _require_short(text: str, field: str) -> None:
    size = len(text.encode(errors="replace"))
    if size > MOST_TEXT_BYTES:
        raise bad_request(
            f"the text of {field} has {size} bytes, more than {MOST_TEXT_BYTES}; send it in parts",
            field,
        )


def _json(content: str) -> Response:
    return Response(content, media_type="application/json")
