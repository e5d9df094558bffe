"""Thinking in the Messages protocol."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from slipstream.core.structured import StructuredOutput
from slipstream.serve.output.thinking import ThinkingFormat
from tests.serve.api.live import DEMO, Live, messages_of, serving
from tests.serve.api.test_messages import GREEDY, USER, WEATHER, create, same, streamed
from tests.serve.api.thinking_models import MARKS, write_thinking_tokenizer

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    tokenizer = write_thinking_tokenizer(tmp_path_factory.mktemp("thinking") / "tokenizer")
    with serving(replace(DEMO, tokenizer=str(tokenizer))) as live:
        yield live


@pytest.fixture(scope="module")
def messages(thinker: Live) -> Iterator[Any]:
    with messages_of(thinker) as messages:
        yield messages


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the model write this, whatever it is asked for."""

    def set_text(text: str) -> None:
        tokens = {mark: f"<[{token}]>" for token, mark in MARKS.items()}
        words = [tokens.get(it) or json.dumps(it) for it in re.split("(</?think>)", text) if it]
        wanted = StructuredOutput(grammar="start: " + " ".join(words))
        monkeypatch.setattr(ThinkingFormat, "framed", lambda *_: wanted)

    return set_text


def test_blocks_come_in_their_order(
    messages: Any, thinker: Live, writes: Callable[[str], None]
) -> None:
    writes(f"<think>\nRome it is.\n</think>\n\nI ask.\n{CALL}")
    fields: Any = {"tools": [WEATHER], "max_tokens": 120}
    answer = create(messages, **fields)
    thought, text, call = answer.content
    assert (thought.type, thought.thinking) == ("thinking", "Rome it is.")
    assert thought.signature
    assert (text.type, text.text.strip()) == ("text", "I ask.")
    assert (call.type, call.input, answer.stop_reason) == ("tool_use", {"city": "Rome"}, "tool_use")
    events, message = streamed(messages, **fields)
    assert same(message, answer)
    starts = [event.index for event in events if event.type == "content_block_start"]
    assert starts == [event.index for event in events if event.type == "content_block_stop"]
    assert starts == [0, 1, 2]
    # Reasoning is passed to the template again.
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    said = [
        USER,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    counted = messages.count_tokens(model="demo", messages=said).input_tokens
    function = {"name": call.name, "arguments": json.dumps(call.input)}
    answered = {
        "role": "assistant",
        "content": text.text,
        "reasoning": thought.thinking,
        "tool_calls": [{"id": call.id, "function": function}],
    }
    told = [USER, answered, {"role": "tool", "content": "sunny", "tool_call_id": call.id}]
    assert counted == tokens(thinker, told)
    del answered["reasoning"]
    assert counted > tokens(thinker, told)


def tokens(live: Live, said: Any, **fields: Any) -> int:
    answer = httpx.post(f"{live.url}/tokenize", json={"messages": said, **fields})
    return int(answer.json()["count"])


def test_thinking_is_left_out_unless_it_is_wanted(
    messages: Any, thinker: Live, writes: Callable[[str], None]
) -> None:
    writes("<think>\nRome it is.\n</think>\n\nSunny.")
    assert [block.type for block in create(messages).content] == ["thinking", "text"]
    omitted: Any = {"type": "adaptive", "display": "omitted"}
    [block] = create(messages, thinking=omitted).content
    assert (block.type, block.text.strip()) == ("text", "Sunny.")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    never: Any = {"type": "disabled"}
    counted = messages.count_tokens(model="demo", messages=[USER], thinking=never).input_tokens
    assert counted == tokens(thinker, [USER], **off) > tokens(thinker, [USER])


def test_thinking_has_a_budget(messages: Any, thinker: Live) -> None:
    fields: Any = {"extra_body": {**GREEDY, "chat_template_kwargs": {"opens": True}}}
    free = create(messages, **fields).content[0].thinking
    thinking = {"type": "enabled", "budget_tokens": 5}
    answer = create(messages, thinking=thinking, **fields)
    thought = answer.content[0]
    assert thought.type == "thinking"
    assert len(thinker.model.tokenizer.encode(thought.thinking)) <= 5
    assert free.startswith(thought.thinking.strip())
    assert len(free) > len(thought.thinking)
    assert same(streamed(messages, thinking=thinking, **fields)[1], answer)


def test_a_budget_needs_thinking_that_can_be_told_apart(live: Live) -> None:
    thinking = {"type": "enabled", "budget_tokens": 5}
    body = {"max_tokens": 9, "messages": [USER], "thinking": thinking}
    answer = httpx.post(f"{live.url}/v1/messages", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("thinking.budget_tokens needs")
