"""Tools: what the model is told of them, and the calls that come back."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from tests.serve.api.live import DEMO, Live, call_api, serving
from tests.serve.api.tool_models import copy_without_template, write_tool_tokenizer

MESSAGES: list[Any] = [{"role": "user", "content": "Weather in Rome?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
BROKEN = {"type": "function", "function": {"name": "f", "parameters": {"$defs": "x"}}}
EMPTY = {"type": "object", "additionalProperties": False}
NOW = {"type": "function", "function": {"name": "now", "parameters": EMPTY}}


@pytest.fixture(scope="module", params=["hermes", "mistral"])
def live(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    """The marks of one family are plain text, those of the other a special token."""
    folder = tmp_path_factory.mktemp("tools") / request.param
    mark = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}[request.param]
    write_tool_tokenizer(folder, mark, special=request.param == "mistral")
    with serving(replace(DEMO, tokenizer=str(folder))) as live:
        assert live.model.tool_format is not None
        assert live.model.tool_format.name == request.param
        yield live


def create(client: openai.OpenAI, messages: Any = MESSAGES, **fields: Any) -> Any:
    given = {"model": "demo", "temperature": 0, "max_completion_tokens": 80, **fields}
    return call_api(client.chat.completions.create, messages=messages, **given)


def short(client: openai.OpenAI, messages: Any = MESSAGES, **fields: Any) -> Any:
    return create(client, messages, max_completion_tokens=2, **fields)


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[str, list[Any], str]:
    """Content, calls and the finish reason, put together as clients do."""
    content, calls, reason = "", list[Any](), ""
    for chunk in create(client, stream=True, **fields):
        for piece in chunk.choices:
            content += piece.delta.content or ""
            reason = piece.finish_reason or reason
            for call in piece.delta.tool_calls or []:
                if call.index == len(calls):
                    assert call.type == "function"
                    calls.append([call.id, call.function.name, ""])
                calls[call.index][2] += call.function.arguments
    return content, calls, reason


def is_weather(name: str, arguments: str) -> bool:
    given = json.loads(arguments)
    return (
        name == "get_weather"
        and set(given) == {"city", "unit"}
        and given["city"] in ("Rome", "Oslo")
        and given["unit"] in ("C", "F")
    )


def test_a_named_tool_is_called_once(client: openai.OpenAI, live: Live) -> None:
    chosen = {"type": "function", "function": {"name": "get_weather"}}
    choice = create(client, tools=[NOW, WEATHER], tool_choice=chosen).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert is_weather(call.function.name, call.function.arguments)
    content, calls, reason = streamed(client, tools=[NOW, WEATHER], tool_choice=chosen)
    assert (content, reason) == ("", "tool_calls")
    assert [it[1:] for it in calls] == [[call.function.name, call.function.arguments]]
    length = {"hermes": 37, "mistral": 9}[live.model.tool_format.name]  # type: ignore[union-attr]
    assert {len(call.id), len(calls[0][0])} == {length}


def test_some_tool_is_required(client: openai.OpenAI) -> None:
    fields = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = create(client, **fields).choices[0].message.tool_calls
    assert is_weather(call.function.name, call.function.arguments)
    several = create(client, tools=[WEATHER], tool_choice="required", max_completion_tokens=70)
    assert len(several.choices[0].message.tool_calls) >= 1
    assert is_weather(
        several.choices[0].message.tool_calls[0].function.name,
        several.choices[0].message.tool_calls[0].function.arguments,
    )


def test_several_answers_have_calls_of_their_own(client: openai.OpenAI) -> None:
    fields = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "n": 3}
    answer = create(client, temperature=1, seed=3, **fields)
    calls = [choice.message.tool_calls[0] for choice in answer.choices]
    assert all(is_weather(call.function.name, call.function.arguments) for call in calls)
    assert len({call.id for call in calls}) == 3


def test_drafts_do_not_change_where_a_forced_call_ends(client: openai.OpenAI, live: Live) -> None:
    """The output ends with the marks after the call, wherever steps end."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    fields = {"tools": [WEATHER], "tool_choice": named, "n": 2, "return_token_ids": True}
    plain, drafted = (
        create(client, speculative={"num_speculative_tokens": k}, **fields) for k in (0, 4)
    )
    tokens = [choice.token_ids for choice in plain.choices]
    assert [choice.token_ids for choice in drafted.choices] == tokens
    assert plain.usage.completion_tokens == drafted.usage.completion_tokens == sum(map(len, tokens))
    assert live.model.tokenizer.decode(tokens[0]).endswith(("</tool_call>", "]"))
    unmarked = create(client, **{**fields, "max_completion_tokens": len(tokens[0]) - 1})
    assert {choice.finish_reason for choice in unmarked.choices} == {"tool_calls"}


def test_tools_stand_in_the_prompt_unless_none_may_be_called(client: openai.OpenAI) -> None:
    plain = short(client).usage.prompt_tokens
    assert short(client, tools=[WEATHER]).usage.prompt_tokens > plain + 20
    unused = short(client, tools=[WEATHER], tool_choice="none")
    assert unused.usage.prompt_tokens == plain
    assert unused.choices[0].message.tool_calls is None


def test_calls_and_their_results_are_history(client: openai.OpenAI) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    history = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "12:00"},
    ]
    assert short(client, history).usage.prompt_tokens > short(client).usage.prompt_tokens
    for arguments in ("[1]", "{", "1"):
        call["function"]["arguments"] = arguments  # type: ignore[index]
        with pytest.raises(openai.BadRequestError, match="arguments of a tool call"):
            short(client, history)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "not in tools"),
        ({"tools": [NOW, NOW]}, "same name"),
        ({"tools": [BROKEN], "tool_choice": "required"}, "no JSON schema: the value of '$defs'"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tool_choice": "required", "guided_regex": "a"}, "say what the answer must be"),
        ({"guided_json": {"type": "object"}}, "no room for tool calls"),
        ({"tool_choice": "sometimes"}, "tool_choice must be"),
    ],
)
def test_wrong_tools(client: openai.OpenAI, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        create(client, **{"tools": [WEATHER], **fields})
    assert named in raised.value.message


def two_calls(live: Live) -> str:
    """A grammar that forces a sentence and two calls."""
    call = '{"name": "now", "arguments": {"a": [1, 2]}}'
    assert live.model.tool_format is not None
    if live.model.tool_format.name == "hermes":
        marked = json.dumps(f"<tool_call>\n{call}\n</tool_call>")
        return f'start: "Let me see.\\n" {marked} "\\n" {marked}'
    mark = live.model.tokenizer.token_to_id("[TOOL_CALLS]")
    return f'start: "Let me see.\\n" <[{mark}]> {json.dumps(f"[{call}, {call}]")}'


def test_calls_that_the_model_chose_to_make(client: openai.OpenAI, live: Live) -> None:
    fields = {"tools": [NOW], "guided_grammar": two_calls(live), "logprobs": True}
    choice = create(client, **fields).choices[0]
    calls = choice.message.tool_calls
    assert choice.message.content == "Let me see."
    assert [call.function.arguments for call in calls] == ['{"a": [1, 2]}'] * 2
    assert choice.finish_reason == "tool_calls"
    whole = "".join(token.token for token in choice.logprobs.content)
    assert whole.count('{"name": "now", "arguments"') == 2
    content, streamed_calls, reason = streamed(client, **fields)
    assert (content, reason) == ("Let me see.", "tool_calls")
    assert [it[1:] for it in streamed_calls] == [["now", '{"a": [1, 2]}']] * 2


def test_a_call_that_a_stop_string_cuts_off_is_not_called_whole(
    client: openai.OpenAI, live: Live
) -> None:
    fields = {"tools": [NOW], "guided_grammar": two_calls(live), "stop": ", 2"}
    choice = create(client, **fields).choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", ", 2")
    (call,) = choice.message.tool_calls
    assert call.function.arguments == '{"a": [1'
    content, calls, reason = streamed(client, **fields)
    assert (content, reason) == ("Let me see.", "stop")
    assert [it[1:] for it in calls] == [["now", '{"a": [1']]


def test_an_answer_can_end_behind_its_first_call(client: openai.OpenAI, live: Live) -> None:
    fields = {"tools": [NOW], "guided_grammar": two_calls(live)}
    one = create(client, parallel_tool_calls=False, **fields)
    assert len(one.choices[0].message.tool_calls) == 1
    assert one.choices[0].finish_reason == "tool_calls"
    assert one.usage.completion_tokens < create(client, **fields).usage.completion_tokens
    _, streamed_calls, reason = streamed(client, parallel_tool_calls=False, **fields)
    assert (len(streamed_calls), reason) == (1, "tool_calls")


def test_a_strict_tool_leaves_other_text_alone(client: openai.OpenAI) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    plain = create(client, tools=[WEATHER], max_completion_tokens=12)
    # The prompt tells of strictness, so the same text is not promised: only that it is text.
    answer = create(client, tools=[strict], max_completion_tokens=12)
    assert answer.choices[0].message.content
    assert plain.choices[0].message.content


def test_a_model_without_a_template_cannot_chat(tmp_path: Any) -> None:
    folder = copy_without_template(tmp_path / "base")
    with (
        serving(replace(DEMO, tokenizer=str(folder), speculative_config=None)) as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            create(client, tools=[WEATHER])
        assert client.models.list().data[0].speculative is None
        answer = client.completions.create(model="demo", prompt="def main(", max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2


def test_a_model_without_a_tokenizer_takes_token_ids() -> None:
    config = replace(DEMO, skip_tokenizer_init=True, speculative_config=None)
    with (
        serving(config) as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="without a tokenizer"):
            create(client)
        with pytest.raises(openai.BadRequestError, match="token"):
            client.completions.create(model="demo", prompt="def main(", max_tokens=2)
        assert httpx.get(f"{live.url}/tokenizer_info").status_code == 400
        for fields in ({"echo": True}, {"logprobs": 1}, {"stop": "x"}):
            with pytest.raises(openai.BadRequestError, match="token"):
                client.completions.create(model="demo", prompt=[466, 10], max_tokens=2, **fields)
        answer = client.completions.create(model="demo", prompt=[466, 10], max_tokens=2)
        assert answer.usage is not None
        assert (answer.choices[0].text, answer.usage.completion_tokens) == ("", 2)
