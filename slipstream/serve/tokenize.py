"""/tokenize and /detokenize: what the tokenizer makes of a text, and back."""

from starlette.requests import Request
from starlette.responses import Response

from slipstream.serve.bodies import read_body
from slipstream.serve.conversation import render
from slipstream.serve.errors import bad_request
from slipstream.serve.model import ServedModel
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
        body = await read_body(request, TokenizeRequest)
        self._model.require(body.model)
        answer = await self._model.aside(self._tokenize, body)
        return _json(answer.model_dump_json(exclude_unset=True))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body = await read_body(request, DetokenizeRequest)
        self._model.require(body.model)
        answer = await self._model.aside(self._detokenize, body)
        return _json(answer.model_dump_json())

    def _tokenize(self, body: TokenizeRequest) -> TokenizeResponse:
        tokenizer = self._model.tokenizer
        if body.prompt is not None:
            text, adds = body.prompt, body.add_special_tokens is not False
        else:
            text = render(self._model.template, body, body.tools)
            adds = body.add_special_tokens is True
        tokens = tokenizer.encode(text, add_special_tokens=adds)
        answer = TokenizeResponse(
            count=len(tokens), max_model_len=self._model.max_model_len, tokens=tokens
        )
        if body.return_token_strs:
            answer.token_strs = [tokenizer.id_to_token(token) or "" for token in tokens]
        return answer

    def _detokenize(self, body: DetokenizeRequest) -> DetokenizeResponse:
        tokenizer, most = self._model.tokenizer, self._model.engine.resolved.vocab_size
        for token in body.tokens:
            if token >= most:
                raise bad_request(
                    f"tokens holds {token}, but token ids go from 0 to {most - 1}", "tokens"
                )
        return DetokenizeResponse(prompt=tokenizer.decode(body.tokens, skip_special_tokens=False))


def _json(content: str) -> Response:
    return Response(content, media_type="application/json")
