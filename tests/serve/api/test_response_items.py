"""/v1/responses with models that think and call tools: items, their history, their limits."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from tests.serve.api.harmony_models import write_harmony_tokenizer, write_without_end_tokens
from tests.serve.api.live import DEMO, Live, call_api, serving
from tests.serve.api.response_streams import check_stream
from tests.serve.api.test_harmony import CALL, NEXT, SAY, THINK, script
from tests.serve.api.test_harmony import scripted as scripted
from tests.serve.api.thought_chats import CITY
from tests.serve.api.tool_models import write_tool_tokenizer

INPUT = "Weather in Rome?"
USER = {"role": "user", "content": INPUT}
WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": CITY}
CHAT_TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("harmony")
    tokenizer = str(write_harmony_tokenizer(folder / "tokenizer"))
    model = str(write_without_end_tokens(folder / "model"))
    with serving(replace(DEMO, model=model, tokenizer=tokenizer)) as live:
        yield live


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("tools") / "hermes"
    write_tool_tokenizer(folder, "<tool_call>", special=False)
    with serving(replace(DEMO, tokenizer=str(folder))) as live:
        yield live


def client_of(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


def create(live: Live, input: Any = INPUT, **fields: Any) -> Any:
    given = {"model": "demo", "temperature": 0, "max_output_tokens": 80, **fields}
    with client_of(live) as client:
        return call_api(client.responses.create, input=input, **given)


def chat(live: Live, messages: list[Any], **fields: Any) -> Any:
    given = {"model": "demo", "temperature": 0, "max_tokens": 80, **fields}
    with client_of(live) as client:
        return call_api(client.chat.completions.create, messages=messages, **given)


def kinds(response: Any) -> list[str]:
    return [item.type for item in response.output]


@pytest.mark.usefixtures("scripted")
def test_reasoning_is_an_item(thinking: Live) -> None:
    fields = script(thinking, f"{THINK}Rome it is.{NEXT}{SAY}It is sunny.")
    answer = create(thinking, **fields)
    thought, message = answer.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Rome it is.")
    assert thought.summary == []
    assert (message.type, answer.output_text) == ("message", "It is sunny.")
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    streamed = check_stream(thinking, input=INPUT, **fields)
    texts = [item["content"][0]["text"] for item in streamed["output"]]
    assert texts == ["Rome it is.", "It is sunny."]
    assert kinds(create(thinking, include_reasoning=False, **fields)) == ["message"]
    logged = create(thinking, include=["message.output_text.logprobs"], **fields).output[-1]
    told = "".join(token.token for token in logged.content[0].logprobs)
    assert told == "It is sunny."


@pytest.mark.usefixtures("scripted")
def test_a_call_is_answered_by_id_and_by_items(thinking: Live) -> None:
    fields = script(thinking, f'{THINK}Rome.{NEXT}{CALL}{{"city": "Rome"}}')
    first = create(thinking, tools=[WEATHER], **fields)
    thought, call = first.output
    assert (call.type, call.name, call.arguments) == (
        "function_call",
        "get_weather",
        '{"city": "Rome"}',
    )
    streamed = check_stream(thinking, input=INPUT, tools=[WEATHER], **fields)
    assert [item["type"] for item in streamed["output"]] == ["reasoning", "function_call"]
    assert streamed["output"][1]["arguments"] == call.arguments

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    short: dict[str, Any] = {"max_output_tokens": 6, "tools": [WEATHER]}
    by_id = create(thinking, [result], previous_response_id=first.id, **short)
    items = [USER, *(item.model_dump() for item in first.output), result]
    by_items = create(thinking, items, **short)
    function = {"name": call.name, "arguments": call.arguments}
    told = {"id": call.call_id, "type": "function", "function": function}
    messages = [
        USER,
        {"role": "assistant", "reasoning": thought.content[0].text, "tool_calls": [told]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "sunny"},
    ]
    same = chat(thinking, messages, max_tokens=6, tools=[CHAT_TOOL])
    assert by_id.usage.input_tokens == by_items.usage.input_tokens == same.usage.prompt_tokens
    contents = [item.content for item in by_items.output]
    assert [item.content for item in by_id.output] == contents
    with pytest.raises(openai.BadRequestError, match="names 'other'"):
        create(thinking, [{**result, "call_id": "other"}], previous_response_id=first.id)


@pytest.mark.usefixtures("scripted")
def test_an_answer_that_was_cut_off_can_be_continued(thinking: Live) -> None:
    thought = script(thinking, f"{THINK}Rome it is, and no other place.{NEXT}{SAY}Sunny.")
    cut = create(thinking, max_output_tokens=12, **thought)
    assert (cut.status, kinds(cut)) == ("incomplete", ["reasoning"])
    assert cut.output[0].status == "incomplete"
    assert create(thinking, "Go on.", previous_response_id=cut.id, max_output_tokens=2).output
    called = script(thinking, f'{CALL}{{"city": "Rome"}}')
    whole = create(thinking, tools=[WEATHER], **called)
    most = whole.usage.output_tokens - 4
    cut = create(thinking, tools=[WEATHER], max_output_tokens=most, **called)
    assert kinds(cut) == ["function_call"]
    streamed = check_stream(
        thinking, input=INPUT, tools=[WEATHER], max_output_tokens=most, **called
    )
    assert streamed["output"][0]["status"] == "incomplete"
    assert create(thinking, "Go on.", previous_response_id=cut.id, max_output_tokens=2).output


def test_reasoning_is_dropped_where_the_template_does_not_read_it(calling: Live) -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text"}]}
    thought["content"][0]["text"] = "Rome."  # type: ignore[index]
    answer = {"role": "assistant", "content": "Sunny."}
    plain = create(calling, [USER, answer, USER], max_output_tokens=2)
    with_it = create(calling, [USER, thought, answer, USER], max_output_tokens=2)
    assert with_it.usage.input_tokens == plain.usage.input_tokens


def test_tools_are_those_of_chats(calling: Live) -> None:
    expected = chat(calling, [USER], tools=[CHAT_TOOL], tool_choice="required")
    calls = [call.function for call in expected.choices[0].message.tool_calls]
    answer = create(calling, tools=[WEATHER], tool_choice="required")
    found = [item for item in answer.output if item.type == "function_call"]
    assert [item.name for item in found] == [call.name for call in calls]
    assert [item.arguments for item in found] == [call.arguments for call in calls]
    assert len({item.call_id for item in found}) == len(found)
    chosen = {"type": "function", "name": "get_weather"}
    streamed = check_stream(calling, input=INPUT, tools=[WEATHER], tool_choice=chosen)
    (call,) = streamed["output"]
    assert json.loads(call["arguments"])["city"] in ("Rome", "Oslo")
    assert streamed["status"] == "completed"
    assert streamed["tool_choice"] == chosen
    assert streamed["tools"][0]["name"] == "get_weather"
    (call,) = create(
        calling, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    ).output
    assert call.status == "completed"


def test_the_client_parses_calls_and_schemas(calling: Live) -> None:
    with (
        client_of(calling) as client,
        client.responses.stream(
            model="demo",
            input=INPUT,
            tools=[WEATHER],
            tool_choice="required",
            temperature=0,
            parallel_tool_calls=False,
        ) as stream,
    ):
        deltas = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    assert call.arguments == "".join(deltas)
