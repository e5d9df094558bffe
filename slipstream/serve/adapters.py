"""LoRA adapters: the flag --lora-modules, and the endpoints that load and unload them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

from starlette.responses import Response

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.engine.engine import Engine
from slipstream.serve.errors import ApiError, bad_request
from slipstream.serve.model_service import ModelService
from slipstream.serve.openapi import Route, json_response
from slipstream.serve.protocol.server import AdapterChange, LoadAdapter, UnloadAdapter

_FLAG = "--lora-modules"


@dataclass(frozen=True)
class NamedPath:
    """An adapter to load at the start, with the drafter's adapter if there is one."""

    name: str
    path: str
    draft_path: str | None = None


def parse_modules(given: Sequence[str]) -> list[NamedPath]:
    """Parse the values of --lora-modules: name=path, or JSON such as {"name": ..., "path": ...,
    "draft_path": ...}, in which draft_path is optional. Raises UsageError."""
    return [_parse_module(text) for text in given]


def _parse_module(text: str) -> NamedPath:
    name, _, path = text.partition("=")
    values: dict[str, object] = {"name": name, "path": path}
    if text.startswith("{"):
        try:
            values = json.loads(text)
        except ValueError as error:
            raise UsageError(f"{_FLAG} is not JSON: {error}; it was {text!r}") from None
        # The base model's name is ignored: a server has only one base model.
        values = {name: it for name, it in values.items() if name != "base_model_name"}
        if values.keys() - {"draft_path"} != {"name", "path"}:
            raise UsageError(
                f"{_FLAG} takes an object with name and path, and perhaps draft_path, not {text}"
            )
    if not all(isinstance(it, str) and it for it in values.values()):
        raise UsageError(f"{_FLAG} takes NAME=FOLDER, not {text!r}")
    return NamedPath(**{name: str(it) for name, it in values.items()})


def load_modules(engine: Engine, names: Sequence[str], modules: Sequence[NamedPath]) -> None:
    """Load the adapters of --lora-modules, before the server starts."""
    for module in modules:
        if module.name in names:
            raise UsageError(f"{_FLAG}: {module.name!r} is the model's own name; choose another")
        factors = engine.adapters.read(module.path, module.draft_path)
        engine.adapters.add(module.name, factors, module.draft_path is not None)


class AdapterEndpoints:
    """Handles POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""

    def __init__(self, service: ModelService) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [
            Route(
                *("POST", "/v1/load_lora_adapter", self.load, AdapterChange, LoadAdapter),
                errors=(415,),
            ),
            Route(
                *("POST", "/v1/unload_lora_adapter", self.unload, AdapterChange, UnloadAdapter),
                errors=(404, 415),
            ),
        ]

    async def load(self, body: LoadAdapter) -> Response:
        """Let requests ask for the adapter in a folder of the server's machine, by a name"""
        self._require_trust()
        service, name = self._service, body.lora_name
        adapters = service.engine.adapters
        if name in service.names or name in adapters.names:
            raise bad_request(
                f"there is a model {name!r} already; choose another name, or unload it first",
                "lora_name",
            )
        try:
            read = partial(adapters.read, body.lora_path, body.draft_lora_path)
            adapters.add(name, await service.workers(read), body.draft_lora_path is not None)
        except CheckpointError as error:
            raise bad_request(str(error), "lora_path") from None
        return json_response(AdapterChange(id=name, object="adapter", loaded=True))

    async def unload(self, body: UnloadAdapter) -> Response:
        """Take no more requests for an adapter; those that run with it end with it"""
        self._require_trust()
        adapters = self._service.engine.adapters
        if body.lora_name not in adapters.names:
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"there is no adapter {body.lora_name[:100]!r} here",
                param="lora_name",
                code="model_not_found",
            )
        adapters.remove(body.lora_name)
        return json_response(AdapterChange(id=body.lora_name, object="adapter", loaded=False))

    def _require_trust(self) -> None:
        if not self._service.answers.trust_request_lora:
            raise bad_request(
                "adapters are loaded and unloaded by requests only where the server was started "
                "with --trust-request-lora; give them as --lora-modules"
            )
        if self._service.options.replica:
            raise bad_request(
                "one of several replicas would have it alone; give adapters as --lora-modules"
            )
