"""What a chat template does not read is told instead of ignored."""

from collections.abc import Sequence
from typing import Any

import pytest

from slipstream.core.errors import UsageError
from slipstream.serve.conversation import require_coverage
from slipstream.serve.errors import ApiError

USER = {"role": "user", "content": "what time is it"}
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": {}}}
ASKS = {"role": "assistant", "tool_calls": [CALL]}
TOLD = {"role": "tool", "tool_call_id": "c1", "content": "noon"}


def contents(messages: Sequence[dict[str, Any]]) -> str:
    return "".join(message.get("content") or "" for message in messages)


def everything(messages: Sequence[dict[str, Any]]) -> str:
    return str(list(messages))


def check(render: Any, messages: list[dict[str, Any]]) -> list[str]:
    before = str(messages)
    unread = require_coverage(render, messages, render(messages))
    assert str(messages) == before
    return unread


def test_names_that_are_not_read_are_told() -> None:
    messages = [{**USER, "name": "bob"}, {**TOLD, "name": "other"}, USER]
    assert check(contents, messages) == ["messages[0].name", "messages[1].name"]
    assert check(everything, messages) == []


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([USER, ASKS, TOLD], r"messages\[1\]\.tool_calls\[0\] would"),
        ([{**USER, "name": "a"}, ASKS, TOLD], r"messages\[1\]\.tool_calls\[0\] would"),
    ],
)
def test_what_is_not_read_is_named(messages: list[dict[str, Any]], named: str) -> None:
    with pytest.raises(ApiError, match=named) as raised:
        check(contents, messages)
    assert (raised.value.status, raised.value.param) == (400, "messages")
    check(everything, messages)


def test_a_message_that_is_left_out_is_named() -> None:
    def of_users(messages: Sequence[dict[str, Any]]) -> str:
        return contents([it for it in messages if it["role"] == "user"])

    check(of_users, [USER, USER])
    for content in ("be brief", [{"type": "text", "text": "be brief"}]):
        with pytest.raises(ApiError, match=r"messages\[0\]\.content"):
            require_coverage(
                of_users, [{"role": "system", "content": content}, USER], "what time is it"
            )


def test_a_content_that_is_written_otherwise_is_read() -> None:
    def trimmed(messages: Sequence[dict[str, Any]]) -> str:
        return contents(messages).rpartition("</think>")[2].upper()

    check(trimmed, [USER, {"role": "assistant", "content": "<think>hm</think>noon"}])


def test_the_name_of_a_tool_is_known_from_its_call() -> None:
    def calls_and_contents(messages: Sequence[dict[str, Any]]) -> str:
        return contents(messages) + str([it.get("tool_calls") for it in messages])

    check(calls_and_contents, [USER, ASKS, {**TOLD, "name": "now"}])


def test_a_template_that_refuses_marks_reads() -> None:
    def fussy(messages: Sequence[dict[str, Any]]) -> str:
        if messages[0].get("name") != "bob":
            raise UsageError("who are you?")
        return contents(messages)

    check(fussy, [{**USER, "name": "bob"}])
