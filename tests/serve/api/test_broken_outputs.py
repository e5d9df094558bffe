"""Outputs that the engine had to break off are errors, never texts with NaN."""

import json
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipstream.core.request import FinishReason
from slipstream.engine import scheduler
from slipstream.engine.stop_conditions import NOT_FINITE, append_output
from slipstream.serve.errors import ApiError
from slipstream.serve.logprobs_format import finite
from slipstream.serve.metrics import ServerMetrics
from slipstream.serve.sse import ChunkWriter
from tests.serve.api.live import Live

USER = {"role": "user", "content": "hi"}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "temperature": 0},
    "/v1/chat/completions": {"messages": [USER], "temperature": 0},
}


@pytest.fixture
def broken(live: Live, monkeypatch: pytest.MonkeyPatch) -> Live:
    """Outputs end at their fourth token as those of a model with broken weights do."""
    append = append_output

    def end(request: Any, *arguments: Any) -> Any:
        ending = append(request, *arguments)
        if request.num_output_tokens >= 4:
            return FinishReason.ERROR, NOT_FINITE
        return ending

    monkeypatch.setattr(scheduler, "append_output", end)
    return live


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"guided_regex": "[a-z]{20}"}])
def test_a_broken_output_is_answered_with_500(
    broken: Live, path: str, fields: dict[str, Any]
) -> None:
    body = {**PATHS[path], "max_tokens": 20, **fields}
    answer = httpx.post(f"{broken.url}{path}", json=body, timeout=60)
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert (error["message"], error["code"]) == (NOT_FINITE, "generation_failed")
    assert error["type"] == "server_error"


@pytest.mark.parametrize("path", PATHS)
def test_a_broken_stream_ends_with_the_error(broken: Live, path: str) -> None:
    body = {**PATHS[path], "max_tokens": 20, "stream": True, "logprobs": 1}
    if "chat" in path:
        body["logprobs"] = True
    answer = httpx.post(f"{broken.url}{path}", json=body, timeout=60)
    *chunks, failure, done = [
        event.removeprefix("data: ") for event in answer.text.strip().split("\n\n")
    ]
    assert done == "[DONE]"
    assert json.loads(failure)["error"]["message"] == NOT_FINITE
    for chunk in chunks:
        json.loads(chunk, parse_constant=pytest.fail)


def test_a_broken_response_fails(broken: Live) -> None:
    body = {"input": "a", "max_output_tokens": 20, "temperature": 0}
    assert httpx.post(f"{broken.url}/v1/responses", json=body).status_code == 500
    answer = httpx.post(f"{broken.url}/v1/responses", json={**body, "stream": True})
    last = json.loads(answer.text.strip().rpartition("data: ")[2])
    assert last["type"] == "response.failed"
    failed = last["response"]
    assert failed["error"] == {"code": "server_error", "message": NOT_FINITE}
    assert failed["status"] == "failed"
    stored = httpx.get(f"{broken.url}/v1/responses/{failed['id']}")
    assert stored.status_code == 404


def test_a_broken_output_is_counted(broken: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = ServerMetrics(broken.engine, "demo")
    monkeypatch.setattr(broken.model.thread, "_observers", (metrics,))
    body = {"prompt": "a", "max_tokens": 20, "n": 2}
    assert httpx.post(f"{broken.url}/v1/completions", json=body).status_code == 500
    counts = {
        sample.labels["finished_reason"]: sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.name == "slipstream:request_success_total"
    }
    assert counts["error"] == 1
    assert sum(counts.values()) == 1


def test_no_json_has_bare_nan() -> None:
    event = ChunkWriter({"id": "x"}, with_usage=True).chunk(
        [{"logprob": float("nan"), "other": float("inf")}], {"length": float("-inf")}
    )
    json.loads(event.removeprefix(b"data: "), parse_constant=pytest.fail)
    assert finite(float("-inf")) == -9999
    with pytest.raises(ApiError, match="not a number") as refused:
        finite(float("nan"))
    assert refused.value.status == 500
