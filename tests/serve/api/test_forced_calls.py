"""Calls that a grammar forces, in every format: valid ones, and those of plain decoding."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jsonschema
import openai
import pytest

from slipstream import LLM, SamplingParams
from slipstream.core.structured import StructuredOutput
from slipstream.serve.tools.events import Arguments, CallBegun, CallEnded, Content
from slipstream.serve.tools.formats import FORMATS
from tests.serve.api.live import DEMO, call_api, serving
from tests.serve.api.tool_models import write_tool_tokenizer

BOOK = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "nights": {"$ref": "#/$defs/count"},
        "sea": {"type": "boolean"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]$"},
        "note": {"type": "string", "maxLength": 6},
        "rooms": {"type": "array", "items": {"$ref": "#/$defs/count"}, "maxItems": 2},
        "floor": {"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]},
    },
    "required": ["city", "nights", "sea", "code", "note", "rooms", "floor"],
    "additionalProperties": False,
    "$defs": {"count": {"type": "integer", "minimum": 1, "maximum": 9}},
}
PING = {
    "type": "object",
    "properties": {"x": {"enum": ["a b", "c"]}},
    "additionalProperties": False,
}
FUNCTIONS: Mapping[str, Mapping[str, Any]] = {"book": BOOK, "ping": PING}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in FUNCTIONS.items()
]
PROMPTS = ["Book a room in", "<tool_call>"]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(replace(DEMO, speculative_config=None))


def require_valid(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), FUNCTIONS[name])


@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls_follow_their_schemas(name: str, offline: LLM, plain: LLM) -> None:
    format, tokenizer = FORMATS[name], offline.tokenizer
    assert tokenizer is not None
    one = format.only_calls({"book": BOOK}, tokenizer, several=False)
    either = format.only_calls(FUNCTIONS, tokenizer, several=False)
    params = [
        SamplingParams(
            temperature=temperature,
            seed=3,
            max_tokens=300,
            structured=StructuredOutput(grammar=grammar),
        )
        for temperature, grammar in ((0, one), (1, either))
    ]
    outputs = offline.generate(PROMPTS, params)
    wanted = plain.generate(PROMPTS, params)
    for output, other in zip(outputs, wanted, strict=True):
        text = output.outputs[0].text
        assert text == other.outputs[0].text
        assert output.outputs[0].finish_reason == "stop"
        parser = format.parser(FUNCTIONS, [])
        events = [*parser.feed(text), *parser.finish()]
        assert not any(isinstance(event, Content) for event in events)
        assert sum(isinstance(event, CallEnded) for event in events) == 1
        called = "".join(event.name for event in events if isinstance(event, CallBegun))
        require_valid(called, "".join(it.text for it in events if isinstance(it, Arguments)))


@pytest.fixture(
    scope="module",
    params=[
        *[pytest.param(it, marks=pytest.mark.full) for it in ("qwen3_coder", "pythonic")],
        "glm45",
    ],
)
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("forced") / request.param
    write_tool_tokenizer(folder, "<tool_call>", special=request.param == "glm45")
    with (
        serving(replace(DEMO, tokenizer=str(folder)), tool_call_parser=request.param) as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_forced_calls_of_a_server(client: openai.OpenAI) -> None:
    chosen = {"type": "function", "function": {"name": "book"}}
    fields: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Book a room."}],
        "tools": TOOLS,
        "temperature": 0,
        "max_completion_tokens": 300,
    }
    create = client.chat.completions.create
    for choice in (chosen, "required"):
        asked = {**fields, "tool_choice": choice, "parallel_tool_calls": False}
        answer = call_api(create, **asked).choices[0]
        (call,) = answer.message.tool_calls
        assert (answer.message.content, answer.finish_reason) == (None, "tool_calls")
        require_valid(call.function.name, call.function.arguments)
        pieces = [
            it.choices[0].delta for it in call_api(create, stream=True, **asked) if it.choices
        ]
        told = [it for piece in pieces for it in piece.tool_calls or []]
        assert not any(piece.content for piece in pieces)
        assert "".join(it.function.name or "" for it in told) == call.function.name
        assert "".join(it.function.arguments for it in told) == call.function.arguments
        assert len(told) > 1


def test_what_cannot_be_forced_is_refused(client: openai.OpenAI) -> None:
    function = {"name": "f", "parameters": {"type": "object", "minProperties": 1}}
    tools = [{"type": "function", "function": function}]
    messages: list[Any] = [{"role": "user", "content": "x"}]
    fields = {"model": "demo", "messages": messages, "tools": tools, "max_completion_tokens": 2}
    with pytest.raises(openai.BadRequestError, match="minProperties"):
        call_api(client.chat.completions.create, tool_choice="required", **fields)
    assert call_api(client.chat.completions.create, **fields).choices


def test_stop_strings_leave_forced_calls_alone(client: openai.OpenAI) -> None:
    """They end the content, and there is none. The first ones are in <tool_call>."""
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Book a room."}],
        "tools": TOOLS[:1],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_completion_tokens": 300,
    }
    wanted = call_api(client.chat.completions.create, **asked).choices[0]
    stops = ["_call", "call>", "nights", "s", '"']
    choice = call_api(client.chat.completions.create, **asked, stop=stops).choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("tool_calls", None)
    assert choice.message.content is None
    called = choice.message.tool_calls[0].function
    assert called == wanted.message.tool_calls[0].function
    chunks = call_api(client.chat.completions.create, **asked, stop=stops, stream=True)
    pieces = [it.choices[0] for it in chunks if it.choices]
    told = [call.function.arguments for it in pieces for call in it.delta.tool_calls or []]
    assert "".join(told) == called.arguments
    assert pieces[-1].finish_reason == "tool_calls"
