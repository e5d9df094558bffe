"""Routes with their OpenAPI description: every body, every answer, every error."""

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from slipstream.serve.model_service import ModelService
from slipstream.serve.protocol.base import ModelRequest
from slipstream.serve.protocol.server import ErrorResponse
from slipstream.serve.request_parsing import read_body
from slipstream.serve.sse import cancel_on_disconnect

_TEMPLATE = "#/components/schemas/{model}"
_ERRORS = {
    400: "The request is invalid; the message names the field and the remedy.",
    401: "The API key is missing or wrong.",
    404: "There is no such model, or no such response.",
    409: "A profile is being taken already, or none is.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests wait; Retry-After says when to try again.",
    431: "The headers are too large.",
    500: "The request failed inside the server.",
    503: "The server is about to stop, or its engine has failed.",
    504: "The request did not finish within the server's time limit.",
}
_PARAMETER = re.compile(r"\{(\w+)")
_COMMON_ERRORS = (401, 408, 431, 503)
_BODY_ERRORS = (400, 413)


@dataclass(frozen=True)
class Route:
    """An endpoint.

    Attributes:
        handler: gets the body, if there is one, else the request. The first line of its docstring
            is the summary.
        answer: model of the response's body.
        body: model of the request's body, if it has one.
        errors: statuses besides those of all endpoints.
        chunk: model of the data of an event, if the response may be streamed.
        done: a stream may have an error in place of a chunk, and ends with [DONE].
        error: model of the body of an error.
    """

    method: str
    path: str
    handler: Callable[[Any], Awaitable[Response]]
    answer: type[BaseModel]
    body: type[ModelRequest] | None = None
    errors: Sequence[int] = ()
    chunk: type[BaseModel] | None = None
    done: bool = False
    error: type[BaseModel] = ErrorResponse


def add_routes(app: FastAPI, routes: Sequence[Route], service: ModelService) -> None:
    models: list[tuple[type[BaseModel], Any]] = []
    for route in routes:
        app.add_api_route(
            route.path,
            _endpoint(route, service),
            methods=[route.method],
            response_class=Response,
            response_model=None,
            summary=(route.handler.__doc__ or "").partition("\n")[0],
            operation_id=route.handler.__qualname__.strip("_").replace(".", "_").lower(),
            openapi_extra=_operation(route),
        )
        if route.method == "GET" and route.chunk is None:  # the HTTP server drops the body
            app.add_api_route(route.path, route.handler, methods=["HEAD"], include_in_schema=False)
        models += [(route.answer, "serialization"), (route.error, "serialization")]
        if route.chunk is not None:
            models.append((route.chunk, "serialization"))
        if route.body is not None:
            models.append((route.body, "validation"))
    _, definitions = models_json_schema(models, ref_template=_TEMPLATE)
    original = app.openapi

    def document() -> dict[str, Any]:
        content = original()
        schemas = content.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(definitions["$defs"])
        return content

    app.openapi = document  # type: ignore[method-assign]


def json_response(content: BaseModel) -> Response:
    """A response with the fields of the body that are set."""
    return Response(content.model_dump_json(exclude_unset=True), media_type="application/json")


def _endpoint(route: Route, service: ModelService) -> Callable[[Request], Awaitable[Response]]:
    """Read the body before the handler runs; work for a stream ends when its client leaves."""
    kind = route.body
    if kind is None:
        return route.handler

    async def handle(request: Request) -> Response:
        work = route.handler(await read_body(request, kind, service))
        return await (work if route.chunk is None else cancel_on_disconnect(request.receive, work))

    return handle


def _operation(route: Route) -> dict[str, Any]:
    ok: dict[str, Any] = {"application/json": _content(route.answer)}
    if route.chunk is not None:
        ok["text/event-stream"] = {"schema": _event(route.chunk, route)}
    statuses = {*route.errors, *_COMMON_ERRORS, *(_BODY_ERRORS if route.body is not None else ())}
    operation: dict[str, Any] = {
        "responses": {
            "200": {"description": "The answer.", "content": ok},
            **{str(status): _error(status, route.error) for status in sorted(statuses)},
        }
    }
    named = _PARAMETER.findall(route.path)
    if named:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in named
        ]
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": _content(route.body)},
        }
    return operation


def _content(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": _TEMPLATE.format(model=model.__name__)}}


def _event(chunk: type[BaseModel], route: Route) -> dict[str, Any]:
    content = _content(chunk)["schema"]
    if route.done:
        content = {"anyOf": [content, _content(route.error)["schema"]]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    if route.done:
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _error(status: int, body: type[BaseModel]) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": _ERRORS[status],
        "content": {"application/json": _content(body)},
    }
    if status == 429:
        response["headers"] = {
            "Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}
        }
    return response
