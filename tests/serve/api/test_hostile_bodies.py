"""Nobody else waits while a hostile body is read."""

import json
from typing import Any

import httpx
import pytest

from benchmarks.hostile_bodies import (
    CHAT,
    COMPLETE,
    DETOKENIZE,
    MESSAGES,
    RESPOND,
    TOKENIZE,
    Canary,
)
from tests.serve.api.live import Live

USER = {"role": "user", "content": "hi"}
TURN = '{"max_tokens":1,"messages":[{"role":"user","content":'
SIZE = 4_000_000
LONGEST = 0.3  # seconds


@pytest.mark.parametrize(
    ("path", "start", "entry", "end"),
    [
        (CHAT, '{"messages":[', "{},", "{}]}"),
        (CHAT, '{"messages":[{"role":"user","content":[', "{},", "{}]}]}"),
        (CHAT, '{"messages":[{"role":"user","content":"a"}],"tools":[', "{},", "{}]}"),
        (MESSAGES, '{"max_tokens":1,"messages":[', "{},", "{}]}"),
        (MESSAGES, f"{TURN}[", "{},", "{}]}]}"),
        (MESSAGES, f"{TURN}[", '{"type":"text","text":"a"},', "]}]}"),
        (f"{MESSAGES}/count_tokens", f'{TURN}"', "a ", '"}]}'),
        (COMPLETE, '{"prompt":[', "[5],", "[5]]}"),
        (COMPLETE, '{"prompt":[', '"",', '""]}'),
        (COMPLETE, '{"prompt":"a","bad_words":[', "1,", "1]}"),
        (RESPOND, '{"input":[', "{},", "{}]}"),
        (TOKENIZE, '{"messages":[', '{"role":"user","content":"a"},', "]}"),
        (DETOKENIZE, '{"tokens":[', "5,", "5]}"),
        (TOKENIZE, '{"prompt":"', "a ", '"}'),
    ],
)
def test_health_is_answered_beside_a_hostile_body(
    live: Live, path: str, start: str, entry: str, end: str
) -> None:
    """It waited for 0.4 to 16 s; `benchmarks.serve_abuse` has the bound of 100 ms."""
    body = start + entry * (SIZE // len(entry)) + end
    answer, longest = post_beside_a_canary(live, path, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert longest < LONGEST


def test_a_long_text_is_tokenized_beside_the_event_loop(live: Live) -> None:
    body = json.dumps({"prompt": "a " * 400_000})
    answer, longest = post_beside_a_canary(live, TOKENIZE, body)
    assert answer.json()["count"] > 100_000
    assert longest < LONGEST


def post_beside_a_canary(live: Live, path: str, body: str) -> tuple[httpx.Response, float]:
    """The answer, and the longest wait of /health: of three tries the best, for the machine may
    have other things to do."""
    address, waits = httpx.URL(live.url), list[float]()
    headers = {"Content-Type": "application/json"}
    while len(waits) < 3 and (not waits or min(waits) > LONGEST):
        with Canary(address.host, address.port or 0) as canary:
            answer = httpx.post(f"{live.url}{path}", content=body, headers=headers, timeout=60)
        waits.append(canary.longest)
    return answer, min(waits)


DEEP: Any = json.loads("[" * 150 + "]" * 150)


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": {"enum": [DEEP]}},
        {"guided_json": json.dumps({"enum": [DEEP]})},
        {"guided_json": "[" * 5000},
        {"structured_outputs": {"json": {"properties": {"a": {"const": DEEP}}}}},
        {"chat_template_kwargs": {"messages": DEEP}},
        {"metadata": {"a": DEEP}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": DEEP}}}]},
        {"logit_bias": DEEP},
    ],
)
def test_what_is_nested_deep_is_no_fault_of_the_server(live: Live, fields: dict[str, Any]) -> None:
    body = {"messages": [USER], "max_tokens": 1, **fields}
    answer = httpx.post(f"{live.url}{CHAT}", json=body, timeout=60)
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize("depth", [150, 5000])
def test_the_input_of_a_tool_that_is_nested_deep(live: Live, depth: int) -> None:
    call = '{"type":"tool_use","id":"1","name":"f","input":{"a":%s}}'
    turn = '{"role":"assistant","content":[%s]},{"role":"user","content":"a"}'
    body = '{"max_tokens":1,"messages":[%s]}' % (turn % (call % ("[" * depth + "]" * depth)))
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{live.url}{MESSAGES}", content=body, headers=headers)
    assert answer.status_code in ((200, 400) if depth == 150 else (400,)), answer.text


@pytest.mark.parametrize("arguments", ["[" * 5000, '{"a":' * 250 + "1" + "}" * 250, "[1," * 40_000])
def test_arguments_that_are_nested_deep(live: Live, arguments: str) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    body = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}, USER]}
    answer = httpx.post(f"{live.url}{CHAT}", json=body)
    assert answer.status_code == 400
    assert "arguments" in answer.json()["error"]["message"]
