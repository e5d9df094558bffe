"""Streams of /v1/responses, read with every rule of their order."""

import json
from collections.abc import Iterator
from typing import Any

import httpx

from slipstream.serve.protocol.response_object import ResponseEvent
from tests.serve.api.live import Live


def check_stream(live: Live, **fields: Any) -> dict[str, Any]:
    """The response at the end of a stream, after checking that each event fits the earlier ones."""
    body = {"temperature": 0, "stream": True, **fields}
    answer = httpx.post(f"{live.url}/v1/responses", json=body, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream")
    first, second, *events, last = list(events_of(answer.text))
    assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
    assert first["response"] == second["response"]
    assert first["response"]["status"] == "in_progress"
    items: list[dict[str, Any]] = []
    text, done = "", True
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert done
            assert event["item"]["status"] == "in_progress"
            text, done, name = "", False, event["item"]["id"]
        assert event["output_index"] == len(items)
        assert event.get("item_id", name) == name
        if kind.endswith(".delta"):
            text += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == text
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == text
        elif kind == "content_part.done":
            assert event["part"]["text"] == text
        elif kind == "output_item.done":
            done = True
            items.append(event["item"])
    assert done
    assert last["type"] == f"response.{last['response']['status']}"
    assert last["response"]["output"] == items
    response: dict[str, Any] = last["response"]
    return response


def events_of(text: str) -> Iterator[dict[str, Any]]:
    for number, part in enumerate(text.strip().split("\n\n")):
        name, data = part.split("\n")
        event: dict[str, Any] = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        ResponseEvent.model_validate(event)
        yield event
