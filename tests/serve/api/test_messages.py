"""/v1/messages with the client of its protocol."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from time import sleep
from typing import Any

import httpx
import openai
import pytest

from slipstream.serve.answer_reader import Increment
from slipstream.serve.limits import RequestFailedError
from slipstream.serve.messages.translation import BlockWriter
from slipstream.serve.tools.events import AnswerEvent, Arguments, CallBegun, CallEnded, Content
from slipstream.serve.updates import Delta
from tests.serve.api.live import DEMO, Live, messages_of, serving
from tests.serve.api.tool_models import write_tool_tokenizer

USER: Any = {"role": "user", "content": "Write a function that adds two numbers."}
GREEDY = {"temperature": 0, "top_p": 1.0, "top_k": 0}  # which the client no longer names
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"name": "get_weather", "description": "Weather.", "input_schema": CITY}
NOW: Any = {"name": "now", "input_schema": {"type": "object", "additionalProperties": False}}


@pytest.fixture(scope="module")
def messages(live: Live) -> Iterator[Any]:
    with messages_of(live) as messages:
        yield messages


def create(messages: Any, *said: Any, **fields: Any) -> Any:
    given = {"model": "demo", "max_tokens": 24, "extra_body": GREEDY, **fields}
    return messages.create(messages=[*said] or [USER], **given)


def chat(client: openai.OpenAI, *said: Any, **fields: Any) -> Any:
    given = {"model": "demo", "max_tokens": 24, "temperature": 0, **fields}
    return client.chat.completions.create(messages=[*said], **given)


def streamed(messages: Any, *said: Any, **fields: Any) -> tuple[Any, Any]:
    """The events, and the message that the client builds from them."""
    given = {"model": "demo", "max_tokens": 24, "extra_body": GREEDY, **fields}
    with messages.stream(messages=[*said] or [USER], **given) as stream:
        events = [*stream]
        return events, stream.get_final_message()


def same(first: Any, second: Any) -> bool:
    """Equal but for what is new in every answer."""
    documents = [json.loads(it.to_json(exclude_none=True)) for it in (first, second)]
    for document in documents:
        del document["id"], document["usage"]
        for block in document["content"]:
            block.pop("id", None)
    return bool(documents[0] == documents[1])


def test_the_text_is_that_of_a_chat(messages: Any, client: openai.OpenAI) -> None:
    whole = create(messages, system="Be brief.")
    expected = chat(client, {"role": "system", "content": "Be brief."}, USER)
    [block] = whole.content
    assert (block.type, block.text) == ("text", expected.choices[0].message.content)
    assert (whole.role, whole.model, whole.id[:4]) == ("assistant", "demo", "msg_")
    assert (whole.stop_reason, whole.stop_sequence) == ("max_tokens", None)
    usage = whole.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == expected.usage.prompt_tokens
    assert usage.output_tokens == 24
    counted = messages.count_tokens(model="demo", messages=[USER], system="Be brief.")
    assert counted.input_tokens == expected.usage.prompt_tokens


def test_what_the_cache_holds_is_told(messages: Any) -> None:
    long = "Add the numbers. " * 20
    fresh = create(messages, system=long, max_tokens=1).usage
    assert fresh.cache_read_input_tokens == 0
    again = create(messages, system=long, max_tokens=1).usage
    assert again.cache_read_input_tokens >= 16
    assert again.input_tokens + again.cache_read_input_tokens == fresh.input_tokens
    salted = create(messages, system=long, extra_body={**GREEDY, "cache_salt": "own"}).usage
    assert salted.cache_read_input_tokens == 0


def test_blocks_of_text_are_a_text(messages: Any, client: openai.OpenAI) -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    blocks = [{"type": "text", "text": "Say", **cached}, {"type": "text", "text": "hello"}]
    answer = create(
        messages,
        {"role": "user", "content": blocks},
        {"role": "user", "content": "again"},
        system=[{"type": "text", "text": "x-anthropic-billing-header: 1"}, blocks[0]],
        metadata={"user_id": "somebody"},
        service_tier="auto",
        extra_headers={"anthropic-beta": "prompt-caching-2024-07-31"},
        extra_query={"beta": "true"},
    )
    system = {"role": "system", "content": "Say"}
    expected = chat(client, system, {"role": "user", "content": "Say\nhello\nagain"})
    assert answer.content[0].text == expected.choices[0].message.content


def test_a_streamed_message_is_the_whole_one(messages: Any) -> None:
    whole = create(messages)
    events, message = streamed(messages)
    assert same(message, whole)
    raw = [event.type for event in events if event.type != "text"]
    first, last = raw.index("content_block_delta"), raw.index("content_block_stop")
    assert raw[:first] == ["message_start", "content_block_start"]
    assert {*raw[first:last]} == {"content_block_delta"}
    assert raw[last:] == ["content_block_stop", "message_delta", "message_stop"]
    assert message.usage.output_tokens == whole.usage.output_tokens
    start = events[0].message
    assert start.id == message.id
    read = whole.usage.cache_read_input_tokens + whole.usage.input_tokens
    assert start.usage.input_tokens + start.usage.cache_read_input_tokens == read


def test_a_stream_has_pings(live: Live) -> None:
    body = {"model": "demo", "max_tokens": 2, "messages": [USER], "stream": True}
    answer = httpx.post(f"{live.url}/v1/messages", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [part.split("\n") for part in answer.text.removesuffix("\n\n").split("\n\n")]
    kinds = [name.removeprefix("event: ") for name, _ in events]
    assert kinds == [json.loads(data.removeprefix("data: "))["type"] for _, data in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-1] == "message_stop"


def test_stop_sequences_are_told(messages: Any) -> None:
    text = create(messages).content[0].text
    stop = text[10:13]
    answer = create(messages, stop_sequences=["never in it", stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]
    assert same(streamed(messages, stop_sequences=["never in it", stop])[1], answer)


def test_an_answer_can_be_begun(messages: Any, client: openai.OpenAI) -> None:
    begun: Any = {"role": "assistant", "content": "def add("}
    answer = create(messages, USER, begun)
    extra = {"continue_final_message": True}
    expected = chat(client, USER, begun, extra_body=extra).choices[0].message.content
    assert answer.content[0].text == expected
    silent: Any = {"role": "assistant", "content": [{"type": "text", "text": " "}]}
    assert same(create(messages, USER, silent), create(messages))


def test_an_answer_ends_where_the_model_does() -> None:
    with serving(replace(DEMO, max_model_len=64)) as small, messages_of(small) as messages:
        answer = create(messages, max_tokens=2000)
        assert answer.stop_reason == "model_context_window_exceeded"
        assert answer.usage.input_tokens + answer.usage.output_tokens == 64
        assert same(streamed(messages, max_tokens=2000)[1], answer)
        most = answer.usage.output_tokens
        assert create(messages, max_tokens=most).stop_reason == "max_tokens"


def test_the_form_of_the_answer(messages: Any) -> None:
    config = {"format": {"type": "json_schema", "schema": CITY}}
    text = create(messages, output_config=config).content[0].text
    assert json.loads(text)["city"] in ("Rome", "Oslo")


def test_a_client_that_leaves_ends_its_request(live: Live, messages: Any) -> None:
    with messages.stream(model="demo", max_tokens=1500, messages=[USER]) as stream:
        for event in stream:
            if event.type == "content_block_delta":
                break
        assert live.model.thread.num_open == 1
    for _ in range(200):
        if not live.model.thread.num_open:
            break
        sleep(0.02)
    assert live.model.thread.num_open == 0


def test_a_stream_that_fails_says_so(messages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from anthropic import APIStatusError

    events, calls = BlockWriter.events, count()

    def failing(self: BlockWriter, delta: Any) -> Any:
        if next(calls) == 2:
            raise RequestFailedError
        return events(self, delta)

    monkeypatch.setattr(BlockWriter, "events", failing)
    with pytest.raises(APIStatusError) as caught:
        streamed(messages)
    assert caught.value.body["error"]["type"] == "api_error"


# ---------------------------------------------------------------------- tools


@pytest.fixture(scope="module")
def tools_live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("tools") / "hermes"
    write_tool_tokenizer(folder, "<tool_call>", special=False)
    with serving(replace(DEMO, tokenizer=str(folder))) as live:
        yield live


@pytest.fixture(scope="module")
def with_tools(tools_live: Live) -> Iterator[Any]:
    with messages_of(tools_live) as messages:
        yield messages


def test_a_tool_is_called_and_its_result_read(with_tools: Any, tools_live: Live) -> None:
    fields: Any = {"tools": [NOW, WEATHER], "max_tokens": 80}
    choice = {"type": "tool", "name": "get_weather"}
    answer = create(with_tools, tool_choice=choice, **fields)
    [call] = answer.content
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert call.input["city"] in ("Rome", "Oslo")
    events, message = streamed(with_tools, tool_choice=choice, **fields)
    assert same(message, answer)
    pieces = [event.partial_json for event in events if event.type == "input_json"]
    assert json.loads("".join(pieces)) == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "is_error": False}
    told: Any = [{**result, "content": [{"type": "text", "text": "sunny"}]}]
    told.append({"type": "text", "text": "And tomorrow?"})
    said = [
        USER,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": told},
    ]
    assert create(with_tools, *said, tools=fields["tools"]).content
    arguments = json.dumps(call.input)
    expected = [
        USER,
        {
            "role": "assistant",
            "tool_calls": [
                {"id": call.id, "function": {"name": call.name, "arguments": arguments}}
            ],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        {"role": "user", "content": "And tomorrow?"},
    ]
    tools = [
        {"type": "function", "function": {"name": "now", "parameters": NOW["input_schema"]}},
        {
            "type": "function",
            "function": {"name": "get_weather", "description": "Weather.", "parameters": CITY},
        },
    ]
    body = {"messages": expected, "tools": tools}
    tokens = httpx.post(f"{tools_live.url}/tokenize", json=body).json()["count"]
    counted = with_tools.count_tokens(model="demo", messages=said, tools=fields["tools"])
    assert counted.input_tokens == tokens


class Told:
    """Reads these events in place of an output."""

    ended = False

    def __init__(self, *events: AnswerEvent) -> None:
        self._events = [*events]

    def take(self, delta: Delta) -> Increment:
        self.ended = len(self._events) == 1
        return Increment([self._events.pop(0)], delta)

    def finish_reason(self, delta: Delta) -> str:
        return "tool_calls"

    def new_call_id(self) -> str:
        return "id"


@pytest.mark.parametrize(
    ("pieces", "read"),
    [
        (('{"a": ', '"b"}'), {"a": "b"}),
        ((), {}),
        (('{"a": "b", "c": [1, 2',), {"a": "b", "c": [1, 2]}),
        (("hello",), {"arguments": "hello"}),
        (("[1]",), {"arguments": "[1]"}),
    ],
)
def test_arguments_become_the_input(pieces: tuple[str, ...], read: dict[str, Any]) -> None:
    told: Any = Told(CallBegun("f"), *map(Arguments, pieces), CallEnded(), Content("a"))
    writer, nothing = BlockWriter(told), Delta(0, "", [], None, [], None, None)
    while not writer.ended:
        writer.collect(nothing)
    writer.collect(nothing)  # after the end nothing is read
    call = {"type": "tool_use", "id": "id", "name": "f", "input": read}
    assert writer.whole() == [call, {"type": "text", "text": "a"}]
    assert writer.stop_reason == "tool_use"


def test_choices_of_tools(with_tools: Any) -> None:
    any_one = {"type": "any", "disable_parallel_tool_use": True}
    [call] = create(with_tools, tools=[WEATHER], tool_choice=any_one, max_tokens=80).content
    assert call.name == "get_weather"
    plain = with_tools.count_tokens(model="demo", messages=[USER]).input_tokens
    none = {"tools": [WEATHER], "tool_choice": {"type": "none"}}
    assert with_tools.count_tokens(model="demo", messages=[USER], **none).input_tokens == plain
    cut = create(with_tools, tools=[WEATHER], tool_choice=any_one, max_tokens=12)
    assert cut.stop_reason == "max_tokens"


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("fields", "status", "kind", "named"),
    [
        ({"model": "nobody"}, 404, "not_found_error", "there is no model"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 2**31}, 400, "invalid_request_error", "max_tokens"),
        ({"system": "a " * 5000}, 400, "invalid_request_error", "max_model_len is 2048"),
        ({"tool_choice": "any"}, 400, "invalid_request_error", 'must be {"type": "auto"}'),
        ({"system": {}}, 400, "invalid_request_error", "a text or a list of blocks of type text"),
        ({"unknown": 1}, 400, "invalid_request_error", "unknown field unknown"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "user", "content": []}]}, 400, "invalid_request_error", "content"),
        ({"messages": [{"role": "assistant", "content": []}]}, 400, "invalid_request_error", ""),
        ({"messages": [{"role": "tool", "content": ""}]}, 400, "invalid_request_error", "role"),
        ({"tools": [{"name": "f"}]}, 400, "invalid_request_error", "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "goes with tools"),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "name goes with"),
        ({"thinking": {"type": "enabled"}}, 400, "invalid_request_error", "budget_tokens"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 24}},
            400,
            "invalid_request_error",
            "less than max_tokens",
        ),
    ],
)
def test_errors_have_the_form_of_the_protocol(
    live: Live, fields: dict[str, Any], status: int, kind: str, named: str
) -> None:
    body = {"model": "demo", "max_tokens": 24, "messages": [USER], **fields}
    answer = httpx.post(f"{live.url}/v1/messages", json=body)
    told = answer.json()
    assert (answer.status_code, told["type"], told["error"]["type"]) == (status, "error", kind)
    assert named in told["error"]["message"]
    assert {*told} == {"type", "error"}


def test_other_methods_and_bodies(live: Live) -> None:
    url = f"{live.url}/v1/messages"
    for answer in (httpx.get(url), httpx.post(url, content=b"x"), httpx.get(f"{url}/count_tokens")):
        assert answer.json()["type"] == "error"
    assert httpx.get(f"{live.url}/v1/messagesx").json()["error"]["code"] is None


@pytest.mark.parametrize(
    ("role", "block", "named"),
    [
        ("user", {"type": "image", "source": {}}, "messages[0].content[0].source.type must be"),
        ("user", {"type": "document", "source": {}}, "document is not supported"),
        ("user", {"type": "tool_use", "id": "1", "name": "f", "input": {}}, "type must be one of"),
        ("user", {"type": "text", "text": 1}, "messages[0].content[0].text:"),
        ("user", {"type": "text", "text": "a", "more": 1}, "messages[0].content[0].more"),
        ("user", {"type": "tool_result"}, "messages[0].content[0].tool_use_id is missing"),
        ("user", 5, "messages[0].content[0]"),
        ("assistant", {"type": "redacted_thinking", "data": ""}, "redacted_thinking is not supp"),
        ("assistant", {"type": "tool_use", "id": "1", "name": "f", "input": []}, "[0].input:"),
        ("assistant", {"type": "thinking", "thinking": None}, "messages[0].content[0].thinking:"),
    ],
)
def test_wrong_blocks_are_named(live: Live, role: str, block: Any, named: str) -> None:
    body = {"max_tokens": 1, "messages": [{"role": role, "content": [block]}]}
    answer = httpx.post(f"{live.url}/v1/messages", json=body)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
