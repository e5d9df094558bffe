"""/v1/responses: answers conversations and keeps the answers."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from slipstream.serve.chat import PreparedChat, prepare
from slipstream.serve.errors import ApiError, bad_request, renamed
from slipstream.serve.model_service import TOO_LONG, ModelService
from slipstream.serve.openapi import Route, json_response
from slipstream.serve.protocol.chat import ChatRequest, Message
from slipstream.serve.protocol.response_object import DeletedResponse, ResponseEvent, ResponseObject
from slipstream.serve.protocol.responses import ResponsesRequest
from slipstream.serve.responses.answer import ResponsesAnswer
from slipstream.serve.responses.messages import MessageBuilder
from slipstream.serve.responses.request import (
    NAMES,
    chat_request,
    check,
    conversation,
    from_turn,
    later_turns,
)
from slipstream.serve.responses.store import ResponseStore


class ResponsesEndpoints:
    """Handles /v1/responses and its sub-paths."""

    def __init__(self, service: ModelService) -> None:
        limits = service.thread.limits
        self._service = service
        self._store = ResponseStore(limits.max_stored_responses, limits.max_stored_bytes)

    def routes(self, errors: Sequence[int]) -> list[Route]:
        """The routes; `errors` documents the errors of generating endpoints."""
        path = "/v1/responses/{response_id}"
        return [
            Route(
                *("POST", "/v1/responses", self.create, ResponseObject, ResponsesRequest, errors),
                chunk=ResponseEvent,
            ),
            Route("GET", path, self.retrieve, ResponseObject, errors=(400, 404)),
            Route("DELETE", path, self.delete, DeletedResponse, errors=(400, 404)),
            Route("POST", f"{path}/cancel", self.cancel, ResponseObject, errors=(400, 404)),
        ]

    async def retrieve(self, request: Request) -> Response:
        """A response that is stored"""
        _refuse_query(request)
        stored = self._store.get(request.path_params["response_id"])
        return Response(stored.document, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """Delete a response that is stored"""
        _refuse_query(request)
        name = request.path_params["response_id"]
        self._store.delete(name)
        return json_response(DeletedResponse(id=name, object="response", deleted=True))

    async def cancel(self, request: Request) -> Response:
        """Refuse to cancel: no response runs in the background"""
        self._store.get(request.path_params["response_id"])
        raise bad_request(
            "this response is complete; only one in the background could be cancelled, and this "
            "server has none: close the connection to end an answer"
        )

    async def create(self, body: ResponsesRequest) -> Response:
        """Answer a conversation in items, whole or streamed."""
        service = self._service
        service.thread.check_room(1)
        self._check(body)
        earlier = None
        if body.previous_response_id is not None:
            name = body.previous_response_id
            earlier = self._store.get(name, "previous_response_id")
        run, before = service.pool_for(body.input), None
        if earlier is not None:
            before = earlier.messages
            run = service.image_workers if earlier.has_images else run
        messages, chat_body, chat = await run(self._prepare, body, before)
        reader = chat.reader(service, chat_body)
        store = None if body.store is False else self._store
        answer = ResponsesAnswer(service, body, chat.prompt, chat.params, reader, messages, store)
        return await answer.response(chat.params)

    def _check(self, body: ResponsesRequest) -> None:
        check(body)
        if body.store and not self._store.keeps:
            raise bad_request(
                "this server keeps no responses; leave store out, or start it with a larger "
                "--max-stored-responses",
                "store",
            )

    def _prepare(
        self, body: ResponsesRequest, earlier: bytes | None
    ) -> tuple[MessageBuilder, ChatRequest, PreparedChat]:
        """Check, render and tokenize; slow for large requests."""
        whole = conversation(self._service, body, earlier)
        try:
            return whole, *self._prepare_chat(body, whole.messages)
        except ApiError as error:
            if error.code != TOO_LONG or body.truncation != "auto":
                raise
            return whole, *self._prepare_shorter(body, whole.messages, error)

    def _prepare_chat(
        self, body: ResponsesRequest, messages: Sequence[Message]
    ) -> tuple[ChatRequest, PreparedChat]:
        chat_body = chat_request(body, messages)
        try:
            return chat_body, prepare(self._service, chat_body)
        except ApiError as error:
            raise renamed(error, NAMES) from None

    def _prepare_shorter(
        self, body: ResponsesRequest, messages: Sequence[Message], error: ApiError
    ) -> tuple[ChatRequest, PreparedChat]:
        """Leave out the oldest turns until the prompt fits; raises the error if one turn alone does
        not fit."""
        starts, fitting = later_turns(messages), None
        low, high = 0, len(starts)
        while low < high:
            middle = (low + high) // 2
            try:
                shorter = from_turn(messages, starts[middle])
                fitting, high = self._prepare_chat(body, shorter), middle
            except ApiError as refused:
                if refused.code != TOO_LONG:
                    raise
                low, error = middle + 1, refused
        if fitting is None:
            raise error
        return fitting


def _refuse_query(request: Request) -> None:
    for name in request.query_params:
        raise bad_request(
            f"{name[:100]!r} has no meaning here: the response is given whole, as it was made",
            name[:100],
        )
