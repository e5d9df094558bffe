"""Tools on a model whose chat template knows none: the demo's own."""

import json
from typing import Any

import openai
import pytest

from slipstream.core.errors import UsageError
from slipstream.serve.conversation import require_tools
from slipstream.serve.errors import ApiError
from slipstream.serve.tools.tools_in_messages import Messages, write_with_tools
from tests.serve.api.live import Live, call_api

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": {"x": 1}}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "What time is it?"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "midday"}]},
]


def plainly(messages: Messages) -> str:
    return "".join(f"[{it['role']}]{it['content']}" for it in messages)


def no_system(messages: Messages) -> str:
    if any(it["role"] == "system" for it in messages):
        raise UsageError("there is no role system")
    return plainly(messages)


def test_calls_of_the_demo(client: openai.OpenAI, live: Live) -> None:
    messages: list[Any] = [{"role": "user", "content": "Weather in Rome?"}]
    fields = {"model": "demo", "temperature": 0, "tools": [WEATHER], "max_completion_tokens": 80}
    create = client.chat.completions.create
    answer = call_api(
        create, messages=messages, tool_choice="required", parallel_tool_calls=False, **fields
    )
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages += [answer.choices[0].message.model_dump(exclude_none=True), result]
    later = call_api(create, messages=messages, **{**fields, "max_completion_tokens": 1})
    assert later.usage.prompt_tokens > answer.usage.prompt_tokens


def test_calls_and_results_are_texts() -> None:
    text = write_with_tools(plainly, HISTORY, None)
    assert text == (
        "[user]What time is it?"
        '[assistant]Let me see.\n<tool_call>\n{"name": "now", "arguments": {"x": 1}}\n</tool_call>'
        "[user]<tool_response>\nnoon\n</tool_response>\n<tool_response>\nmidday\n</tool_response>"
    )


def test_tools_stand_in_the_system_message() -> None:
    text = write_with_tools(plainly, HISTORY, [WEATHER])
    assert text.startswith("[system]# Tools")
    assert json.dumps(WEATHER) in text
    system = {"role": "system", "content": "Be brief."}
    assert write_with_tools(plainly, [system, *HISTORY], [WEATHER]).startswith(
        "[system]Be brief.\n\n# Tools"
    )
    for write in (no_system, lambda it: plainly([m for m in it if m["role"] != "system"])):
        text = write_with_tools(write, HISTORY, [WEATHER])
        assert text.startswith("[user]# Tools")
        assert "\n\nWhat time is it?[assistant]" in text
    with pytest.raises(UsageError, match="drops the message"):
        write_with_tools(lambda _: "nothing", HISTORY, [WEATHER])


def test_images_stay_among_texts() -> None:
    """Tools come before the user's images, and results between their tags."""
    image: Any = {"type": "image"}
    seen: list[Messages] = []

    def write(messages: Messages) -> str:
        seen.append(messages)
        if messages[0]["role"] == "system":
            raise UsageError("no system")
        return messages[0]["content"][0]["text"]

    results: list[Any] = [{"role": "tool", "content": [image]}, {"role": "tool", "content": "more"}]
    write_with_tools(write, [{"role": "user", "content": [image]}, *results], [WEATHER])
    user, result = seen[-1]
    assert user["content"][1:] == [image]
    texts = [part.get("text", part["type"]) for part in result["content"]]
    assert "".join(texts) == (
        "<tool_response>\nimage\n</tool_response>\n<tool_response>\nmore\n</tool_response>"
    )


def test_another_format_needs_a_template_that_knows_tools(live: Live) -> None:
    assert live.model.tool_format is not None
    assert live.model.tool_format.name == "hermes"
    require_tools(live.model)
    require_tools(live.model.with_options(tool_call_parser="hermes"))
    with pytest.raises(ApiError, match="only for the format hermes"):
        require_tools(live.model.with_options(tool_call_parser="mistral"))
