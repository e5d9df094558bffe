"""The FastAPI application: routes, errors and the OpenAPI document."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from slipstream import __version__
from slipstream.serve.chat import Chats
from slipstream.serve.completions import Completions
from slipstream.serve.document import Route, add_document
from slipstream.serve.errors import TOLD, ApiError, as_api_error
from slipstream.serve.frames import ClientGoneError
from slipstream.serve.metrics import ServerMetrics
from slipstream.serve.model import ServedModel
from slipstream.serve.profiling import Profiles
from slipstream.serve.protocol.chat import ChatChunk, ChatCompletion, ChatRequest
from slipstream.serve.protocol.completions import Completion, CompletionChunk, CompletionRequest
from slipstream.serve.protocol.server import Health, ModelCard, ModelList, Profiling, Version
from slipstream.serve.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from slipstream.serve.tokenize import Tokens

_CLIENT_CLOSED = 499  # nobody reads it; for the log
_GENERATES = (404, 415, 429, 500, 503, 504)


def create_app(
    model: ServedModel,
    metrics: ServerMetrics | None = None,
    pages: Sequence[BaseRoute] = (),
    profiles: Path | None = None,
) -> FastAPI:
    """The application around a model; whoever runs it starts the engine's thread.

    Args:
        metrics: shown at /metrics.
        pages: further routes, which are no part of the document.
        profiles: whoever asks may profile the engine, and traces go into this folder.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        model.close()

    app = FastAPI(
        title="Slipstream",
        version=__version__,
        summary="The OpenAI protocol over one engine with speculative decoding.",
        lifespan=lifespan,
        # Their pages load scripts from elsewhere; the document itself is at /openapi.json.
        docs_url=None,
        redoc_url=None,
    )
    _add_errors(app)
    add_document(app, _routes(model) + _profiling_routes(model, profiles))
    if metrics is not None:
        _add_metrics(app, metrics)
    app.router.routes.extend(pages)
    return app


def _routes(model: ServedModel) -> list[Route]:
    """The endpoints of the protocol."""
    tokens, facts = Tokens(model), _Facts(model)
    return [
        Route(
            "POST",
            "/v1/completions",
            Completions(model).answer,
            Completion,
            CompletionRequest,
            errors=_GENERATES,
            chunk=CompletionChunk,
        ),
        Route(
            "POST",
            "/v1/chat/completions",
            Chats(model).answer,
            ChatCompletion,
            ChatRequest,
            errors=_GENERATES,
            chunk=ChatChunk,
        ),
        Route("GET", "/v1/models", facts.models, ModelList),
        Route("GET", "/v1/models/{model:path}", facts.model, ModelCard, errors=(404,)),
        Route("POST", "/tokenize", tokens.tokenize, TokenizeResponse, TokenizeRequest, (404, 415)),
        Route(
            "POST",
            "/detokenize",
            tokens.detokenize,
            DetokenizeResponse,
            DetokenizeRequest,
            (404, 415),
        ),
        Route("GET", "/health", facts.health, Health, errors=(503,)),
        Route("GET", "/version", facts.version, Version),
    ]


def _profiling_routes(model: ServedModel, folder: Path | None) -> list[Route]:
    if folder is None:
        return []
    profiles = Profiles(model.thread, folder)
    return [
        Route("POST", "/start_profile", profiles.start, Profiling, errors=(409, 500)),
        Route("POST", "/stop_profile", profiles.stop, Profiling, errors=(409, 500)),
    ]


class _Facts:
    """Answers without the engine."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def models(self, _: Request) -> Response:
        """The names under which the model is served."""
        return _json(ModelList(object="list", data=self._model.cards()))

    async def model(self, request: Request) -> Response:
        """One of them."""
        name = request.path_params["model"]
        self._model.require(name)
        return _json(next(card for card in self._model.cards() if card.id == name))

    async def health(self, _: Request) -> Response:
        """Whether requests are taken."""
        thread = self._model.thread
        if not thread.alive:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the engine does not run")
        if thread.draining:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is about to stop")
        return _json(Health(status="ok"))

    async def version(self, _: Request) -> Response:
        """Of Slipstream."""
        return _json(Version(version=__version__))


def _add_metrics(app: FastAPI, metrics: ServerMetrics) -> None:
    """/metrics is for Prometheus, which has a form of its own."""

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"description": "The metrics.", "content": {"text/plain": {}}}},
    )
    async def show_metrics() -> Response:
        """Counts and times for Prometheus."""
        return Response(metrics.render(), headers={"Content-Type": metrics.content_type})


def _json(content: Any) -> Response:
    return Response(content.model_dump_json(), media_type="application/json")


def _add_errors(app: FastAPI) -> None:
    """Every error in the protocol's form."""

    async def told(_: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def of_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        told = (
            f"{request.method} {request.url.path}: {error.detail}; /openapi.json has what there is"
        )
        return ApiError(error.status_code, told, headers=error.headers).response()

    async def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED)

    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        **dict.fromkeys(TOLD, told),
        HTTPException: of_http,
        ClientGoneError: gone,
        Exception: told,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
