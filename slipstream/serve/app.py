"""The FastAPI application: routes, error handlers and the OpenAPI document."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from slipstream import __version__
from slipstream.serve.adapters import AdapterEndpoints
from slipstream.serve.chat import ChatEndpoint
from slipstream.serve.completions import CompletionEndpoint
from slipstream.serve.errors import CLIENT_ERRORS, MESSAGES_PATH, ApiError, as_api_error
from slipstream.serve.messages.endpoint import MessagesEndpoints
from slipstream.serve.metrics import ServerMetrics
from slipstream.serve.middleware import LoadCount
from slipstream.serve.model_service import ModelService
from slipstream.serve.openapi import Route, add_routes, json_response
from slipstream.serve.profiling import ProfilingEndpoints
from slipstream.serve.protocol import chat, completions, messages, server
from slipstream.serve.responses.endpoint import ResponsesEndpoints
from slipstream.serve.sse import ClientDisconnectedError
from slipstream.serve.tokenize import TokenizeEndpoints

_CLIENT_CLOSED = 499  # for the log only
_GENERATION_ERRORS = (404, 415, 429, 500, 503, 504)
# Paths of llama-server and Ollama, and what to use in their place.
_COUNTERPARTS = {
    "/completion": "/v1/completions",
    "/props": "/v1/models",
    "/api/chat": "/v1/chat/completions",
    "/api/generate": "/v1/completions",
    "/api/tags": "/v1/models",
}


def create_app(
    service: ModelService,
    metrics: ServerMetrics | None = None,
    pages: Sequence[BaseRoute] = (),
) -> FastAPI:
    """Create the application; the caller has to start the engine's thread.

    Args:
        metrics: served at /metrics; None: there is no such path.
        pages: further routes, which are left out of the OpenAPI document.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="Slipstream",
        version=__version__,
        summary="The OpenAI protocol over one engine with speculative decoding.",
        lifespan=lifespan,
        # FastAPI's documentation pages are off: they load scripts from other hosts.
        openapi_url=None if service.options.disable_fastapi_docs else "/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a wrong path gets a 404 in the protocol's form
    )
    _add_error_handlers(app)
    load = LoadCount()
    routes = _routes(service, load)
    add_routes(app, routes, service)
    generating = frozenset(route.path for route in routes if route.chunk is not None)
    app.add_middleware(load.middleware, generating)
    if metrics is not None:
        _add_metrics(app, metrics)
    app.router.routes.extend(pages)
    return app


def _routes(service: ModelService, load: LoadCount) -> list[Route]:
    tokens, info = TokenizeEndpoints(service), _InfoEndpoints(service, load)
    conversations, profiles = MessagesEndpoints(service), service.options.enable_profiling
    routes = [
        Route(
            *("POST", "/v1/completions", CompletionEndpoint(service).answer),
            *(completions.Completion, completions.CompletionRequest, _GENERATION_ERRORS),
            chunk=completions.CompletionChunk,
            done=True,
        ),
        Route(
            *("POST", "/v1/chat/completions", ChatEndpoint(service).answer),
            *(chat.ChatCompletion, chat.ChatRequest, _GENERATION_ERRORS),
            chunk=chat.ChatChunk,
            done=True,
        ),
        Route(
            *("POST", MESSAGES_PATH, conversations.answer),
            *(messages.MessagesAnswer, messages.MessagesRequest, _GENERATION_ERRORS),
            chunk=messages.MessagesEvent,
            error=messages.MessagesError,
        ),
        Route(
            *("POST", f"{MESSAGES_PATH}/count_tokens", conversations.count_tokens),
            *(messages.TokenCount, messages.CountTokensRequest, (404, 415)),
            error=messages.MessagesError,
        ),
        *ResponsesEndpoints(service).routes(_GENERATION_ERRORS),
        *AdapterEndpoints(service).routes(),
        Route("GET", "/v1/models", info.models, server.ModelList),
        Route("GET", "/v1/models/{model:path}", info.model, server.ModelCard, errors=(404,)),
        Route(
            *("POST", "/tokenize", tokens.tokenize),
            *(server.TokenizeResponse, server.TokenizeRequest, (404, 415)),
        ),
        Route(
            *("POST", "/detokenize", tokens.detokenize),
            *(server.DetokenizeResponse, server.DetokenizeRequest, (404, 415)),
        ),
        Route("GET", "/tokenizer_info", tokens.info, server.TokenizerInfo, errors=(400,)),
        Route("GET", "/health", info.health, server.Health, errors=(503,)),
        Route("GET", "/ping", info.ping, server.Health, errors=(503,)),
        Route("POST", "/ping", info.post_ping, server.Health, errors=(503,)),
        Route("GET", "/load", info.load, server.Load),
        Route("POST", "/reset_prefix_cache", info.reset_prefix_cache, server.PrefixCacheReset),
        Route("GET", "/version", info.version, server.Version),
    ]
    if profiles is not None:
        profiling = ProfilingEndpoints(service.thread, profiles)
        routes += [
            Route("POST", "/start_profile", profiling.start, server.Profiling, errors=(409, 500)),
            Route("POST", "/stop_profile", profiling.stop, server.Profiling, errors=(409, 500)),
        ]
    return routes


class _InfoEndpoints:
    """Endpoints that describe the server or manage it."""

    def __init__(self, service: ModelService, load: LoadCount) -> None:
        self._service, self._load = service, load

    async def models(self, _: Request) -> Response:
        """The names of the served model"""
        return json_response(server.ModelList(object="list", data=self._service.cards()))

    async def model(self, request: Request) -> Response:
        """One name of the served model"""
        name = request.path_params["model"]
        self._service.require_name(name)
        return json_response(next(card for card in self._service.cards() if card.id == name))

    async def health(self, _: Request) -> Response:
        """Whether requests are accepted"""
        thread = self._service.thread
        if not thread.alive:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the engine does not run")
        if thread.draining:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is about to stop")
        return json_response(server.Health(status="ok"))

    async def ping(self, request: Request) -> Response:
        """Whether requests are accepted, as /health says"""
        return await self.health(request)

    async def post_ping(self, request: Request) -> Response:
        """Whether requests are accepted, as /health says"""
        return await self.health(request)

    async def load(self, _: Request) -> Response:
        """How many generating requests are being answered"""
        return json_response(server.Load(server_load=self._load.num_requests))

    async def reset_prefix_cache(self, _: Request) -> Response:
        """Forget the prompts that were computed before"""
        service = self._service
        await service.thread.between_steps(service.engine.reset_prefix_cache)
        return json_response(server.PrefixCacheReset(success=True))

    async def version(self, _: Request) -> Response:
        """The version of Slipstream"""
        return json_response(server.Version(version=__version__))


def _add_metrics(app: FastAPI, metrics: ServerMetrics) -> None:
    @app.head("/metrics", include_in_schema=False)
    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"description": "The metrics.", "content": {"text/plain": {}}}},
    )
    async def show_metrics() -> Response:
        """Counts and times for Prometheus."""
        text = await asyncio.to_thread(metrics.render)
        return Response(text, headers={"Content-Type": metrics.content_type})


def _add_error_handlers(app: FastAPI) -> None:
    """Answer every error in the form of the protocol that the request uses."""

    async def answer_error(request: Request, error: Exception) -> Response:
        return as_api_error(error).response(request.scope["path"])

    async def answer_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.scope["path"]
        remedy = "/openapi.json lists what there is"
        if path in _COUNTERPARTS:
            remedy = f"use {_COUNTERPARTS[path]}, of the OpenAI protocol"
        message = f"{request.method} {path}: {error.detail}; {remedy}"
        return ApiError(error.status_code, message, headers=error.headers).response(path)

    async def answer_nobody(_: Request, __: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED)

    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        **dict.fromkeys(CLIENT_ERRORS, answer_error),
        HTTPException: answer_http_error,
        ClientDisconnectedError: answer_nobody,
        Exception: answer_error,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
