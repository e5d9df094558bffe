"""The OpenAPI document and the server agree, whatever is sent."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from slipstream.serve.limits import ServeLimits
from tests.serve.api.live import DEMO, Live, serving

# That everything the schema allows be accepted is left out: a schema cannot say that two fields
# contradict each other, that a model exists, or that a text fits.
CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]
# With these each optional field is sent once (`likely`); `SLIPSTREAM_EXAMPLES=500` looks further.
EXAMPLES = int(os.environ.get("SLIPSTREAM_EXAMPLES", "7"))
# Some answers may be long where nothing bounds them.
SHORT = replace(DEMO, max_model_len=24)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(SHORT, limits=ServeLimits(max_waiting=8)) as live:
        yield live


PATHS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/ping"),
    ("POST", "/ping"),
    ("GET", "/load"),
    ("GET", "/metrics"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/version"),
]

WITH_BODY = {
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
}


def likely(body: dict[str, Any], turn: int) -> dict[str, Any]:
    """A part of the fields: all of them together contradict each other; a random model is none."""
    optional = sorted(set(body) - {"prompt", "messages", "input", "tokens", "model"})
    dropped = {name for place, name in enumerate(optional) if (place + turn) % 7}
    return {name: value for name, value in body.items() if name not in dropped | {"model"}}


@pytest.fixture(scope="module")
def document(live: Live) -> Any:
    return schemathesis.openapi.from_url(f"{live.url}/openapi.json")


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        (method, path, mode)
        for method, path in PATHS
        for mode in GenerationMode
        if path in WITH_BODY or mode is GenerationMode.POSITIVE  # a body can be wrong
    ],
)
def test_every_answer_conforms(document: Any, method: str, path: str, mode: GenerationMode) -> None:
    operation = document[path][method]
    takes_something = operation.body or operation.path_parameters
    seen: list[int] = []

    @settings(
        max_examples=EXAMPLES if takes_something else 2,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body = likely(case.body, len(seen))
            if path == "/v1/messages":
                case.body["max_tokens"] = 1 + len(seen) % 3
        answer = case.call_and_validate(checks=CHECKS, timeout=60)
        seen.append(answer.status_code)

    run()
    print(method, path, mode, {status: seen.count(status) for status in set(seen)})
    assert seen


USER = [{"role": "user", "content": "def f"}]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "def f", "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": USER, "max_tokens": 4}),
        ("/v1/messages", {"messages": USER, "max_tokens": 4}),
        ("/v1/responses", {"input": "def f", "max_output_tokens": 4}),
    ],
)
def test_every_event_of_a_stream_conforms(document: Any, path: str, fields: Any) -> None:
    """The last one, too, whose data may be [DONE].

    A reader slower than the engine is sent several tokens in one event, so one may be all.
    """
    case = document[path]["POST"].Case(body={**fields, "stream": True})
    answer = case.call_and_validate(checks=CHECKS, timeout=60)
    assert answer.headers["content-type"][0].startswith("text/event-stream")
    assert answer.content.count(b"data: {") >= 1


def test_the_document_has_every_endpoint(live: Live) -> None:
    document = httpx.get(f"{live.url}/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/health",
        "/ping",
        "/load",
        "/metrics",
        "/reset_prefix_cache",
        "/version",
    }
    body = document["components"]["schemas"]["ChatRequest"]
    assert body["additionalProperties"] == {"type": "null"}
    assert {"messages", "tools", "speculative", "return_speculation"} <= set(body["properties"])


def test_nothing_is_left_running(live: Live) -> None:
    assert live.model.thread.num_open == 0
    live.engine.scheduler.check_invariants()
