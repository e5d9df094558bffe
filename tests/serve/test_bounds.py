"""Requests that hold too much are refused before they cost anything."""

import json
import random
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hostile_bodies import (
    CHAT,
    COMPLETE,
    COUNT_TOKENS,
    DETOKENIZE,
    MESSAGES,
    RESPOND,
    TOKENIZE,
    hostile_bodies,
)
from slipstream.serve.errors import ApiError
from slipstream.serve.limits import ServeLimits
from slipstream.serve.protocol import bounds
from slipstream.serve.protocol.base import ModelRequest
from slipstream.serve.protocol.bounds import count_values
from slipstream.serve.protocol.chat import ChatRequest
from slipstream.serve.protocol.completions import CompletionRequest
from slipstream.serve.protocol.messages import CountTokensRequest, MessagesRequest
from slipstream.serve.protocol.responses import ResponsesRequest
from slipstream.serve.protocol.server import DetokenizeRequest, TokenizeRequest
from slipstream.serve.request_parsing import parse_body

MOST = ServeLimits.max_json_values
KINDS: dict[str, type[ModelRequest]] = {
    CHAT: ChatRequest,
    COMPLETE: CompletionRequest,
    RESPOND: ResponsesRequest,
    MESSAGES: MessagesRequest,
    COUNT_TOKENS: CountTokensRequest,
    TOKENIZE: TokenizeRequest,
    DETOKENIZE: DetokenizeRequest,
}
MESSAGE = {"role": "user", "content": "hi"}
CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}


def refusal(content: bytes, kind: type[ModelRequest], most: int = MOST) -> ApiError:
    with pytest.raises(ApiError) as refused:
        parse_body(content, kind, most)
    return refused.value


@pytest.mark.parametrize(
    ("kind", "field", "entries", "most"),
    [
        (ChatRequest, "messages", [MESSAGE] * 4097, 4096),
        (ChatRequest, "messages", [{}] * 4097, 4096),
        (ChatRequest, "tools", [{}] * 1025, 1024),
        (ChatRequest, "tools", [{"type": "function", "function": {}}] * 1025, 1024),
        (ChatRequest, "metadata", {str(n): n for n in range(1025)}, 1024),
        (ChatRequest, "modalities", ["text"] * 1025, 1024),
        (ChatRequest, "chat_template_kwargs", {str(n): n for n in range(1025)}, 1024),
        (ResponsesRequest, "input", [MESSAGE] * 4097, 4096),
        (ResponsesRequest, "input", [{}] * 4097, 4096),
        (ResponsesRequest, "tools", [{"type": "x"}] * 1025, 1024),
        (ResponsesRequest, "tools", [{"type": "function", "parameters": [0] * 40000}], 32768),
        (ResponsesRequest, "include", ["a"] * 1025, 1024),
        (ResponsesRequest, "metadata", {str(n): n for n in range(1025)}, 1024),
        (CompletionRequest, "prompt", ["a"] * 2049, 2048),
        (CompletionRequest, "prompt", [[5]] * 2049, 2048),
        (CompletionRequest, "prompt", [{}] * 2049, 2048),
        (CompletionRequest, "bad_words", ["a"] * 1025, 1024),
        (CompletionRequest, "stop", ["a"] * 65, 64),
        (CompletionRequest, "stop_token_ids", [1] * 1025, 1024),
        (CompletionRequest, "logit_bias", {str(n): 1 for n in range(16385)}, 16384),
        (CompletionRequest, "guided_choice", ["a"] * 16385, 16384),
        (CompletionRequest, "guided_json", {"enum": ["a"] * 20000}, 32768),
        (CompletionRequest, "guided_json", json.dumps([1] * 40000), 32768),
        (ChatRequest, "tools", [{"type": "function", "function": {"x": [0] * 40000}}], 32768),
        (CompletionRequest, "guided_regex", "a" * 32769, 32768),
        (CompletionRequest, "bad_words", ["a" * 1001], 1000),
    ],
)
def test_every_list_and_every_text_that_is_worked_on_has_a_bound(
    kind: type[ModelRequest], field: str, entries: Any, most: int
) -> None:
    needed: dict[str, Any] = {"messages": [MESSAGE]}
    if kind is not ChatRequest:
        needed = {"prompt": "a"} if kind is CompletionRequest else {"input": "a"}
    error = refusal(json.dumps({**needed, field: entries}).encode(), kind)
    assert (error.status, error.param) == (400, field)
    assert re.search(rf"\b{most}\b", error.message)


def test_too_many_prompts_are_called_so() -> None:
    error = refusal(json.dumps({"prompt": ["a"] * 2049}).encode(), CompletionRequest)
    assert error.message == (
        "prompt: has 2049 prompts, more than 2048; send them in several requests"
    )


@pytest.mark.parametrize("field", ["content", "tool_calls"])
def test_the_parts_of_a_message_have_a_bound(field: str) -> None:
    entries = [{"type": "text", "text": "a"} if field == "content" else CALL] * 1025
    role = "user" if field == "content" else "assistant"
    body = {"messages": [{"role": role, field: entries}]}
    error = refusal(json.dumps(body).encode(), ChatRequest)
    assert error.message == f"messages[0].{field}: has 1025 entries, more than 1024; send fewer"


def test_a_body_with_too_many_values_is_not_parsed() -> None:
    error = refusal(b'{"prompt": [' + b"1," * 100, CompletionRequest, most=100)
    assert error.code == "too_many_values"
    assert "100 values" in error.message
    assert "--max-json-values" in error.message
    assert parse_body(b'{"prompt": "' + b"[1,2]" * 100 + b'"}', CompletionRequest, 10)


def test_hostile_bodies_are_read_within_a_second() -> None:
    """Each once took 1 to 16 s; processor time is measured, as machines may be busy."""
    slow = []
    for body in hostile_bodies():
        began = time.thread_time()
        with suppress(ApiError):
            parse_body(body.content, KINDS[body.path], MOST)
        if time.thread_time() - began > 1:
            slow.append(body.name)
    assert slow == []


@pytest.mark.parametrize(
    ("document", "count"),
    [
        (b"", 0),
        (b"[1, 2, 3]", 2 + 2),
        (b'["a", "b"]', 2 + 1 + 2),
        (b'{"a": 1}', 2 + 2 + 1),
        (b"[[]" * 5, 20),
        (rb'{"a\"[[[[,:": "]]]\\\\,,"}', 2 + 2 + 2),
        (rb'["\\", [["\"[["]]]', 6 + 1 + 2),
        (b'"[[[[,,', 0),
    ],
)
def test_values_in_strings_are_not_counted(document: bytes, count: int) -> None:
    assert count_values(document) == count


def test_the_count_agrees_with_a_parser() -> None:
    chance = random.Random(7)
    for _ in range(200):
        value = random_value(chance, 6)
        document = json.dumps(value, ensure_ascii=chance.random() < 0.5).encode()
        assert count_values(document) == count_of(value)


def random_value(chance: random.Random, left: int) -> Any:
    kind = chance.randrange(4) if left else 0
    if kind < 2:
        return "".join(chance.choice('ab"\\[]{},:ü\n') for _ in range(chance.randrange(8)))
    values = [random_value(chance, left - 1) for _ in range(chance.randrange(4))]
    if kind == 2:
        return values
    return {f'k"{index}[': value for index, value in enumerate(values)}


def count_of(value: Any) -> int:
    if isinstance(value, str):
        return 1
    commas, inner = max(len(value) - 1, 0), value.values() if isinstance(value, dict) else value
    members = 3 * len(value) if isinstance(value, dict) else 0
    return 2 + commas + members + sum(map(count_of, inner))


def test_the_bounds_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    numbers = {value for name, value in vars(bounds).items() if name.startswith("MOST_")}
    assert [number for number in numbers if f"{number:,}" not in page] == []
