"""Chats with a model that thinks between marks: reasoning, budgets, structure, tools, history."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from slipstream.core.structured import StructuredOutput
from slipstream.engine.grammar import GrammarGuide, Grammars
from slipstream.models.chat_template import ChatTemplate
from slipstream.models.tokenizer import Tokenizer
from slipstream.serve.errors import ApiError
from slipstream.serve.output.parts import OutputConstraints
from slipstream.serve.output.thinking import STYLES, ThinkingFormat
from tests.serve.api.live import DEMO, Live, serving
from tests.serve.api.thinking_models import MARKS, write_thinking_tokenizer
from tests.serve.api.thought_chats import CITY, MESSAGES, WEATHER, create, streamed

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NEW = "<|im_start|>assistant\n"
OPENS = {"chat_template_kwargs": {"opens": True}}
OPEN, CLOSE = 4094, 4095


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    tokenizer = write_thinking_tokenizer(tmp_path_factory.mktemp("thinking") / "tokenizer")
    with serving(replace(DEMO, tokenizer=str(tokenizer))) as live:
        assert isinstance(live.model.output_format, ThinkingFormat)
        yield live


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar of a request is that of its whole output, marks included."""
    monkeypatch.setattr(
        ThinkingFormat, "framed", lambda _, wanted, prompt, continues: wanted.content
    )


def script(text: str) -> dict[str, str]:
    """The field that makes the model write this, which ends after it."""
    tokens = {mark: f"<[{token}]>" for token, mark in MARKS.items()}
    words = [tokens.get(it) or json.dumps(it) for it in re.split(r"(</?\w+>)", text) if it]
    return {"guided_grammar": "start: " + " ".join(words)}


@pytest.mark.usefixtures("scripted")
def test_reasoning_is_told_apart(client: openai.OpenAI) -> None:
    fields = script("<think>\nRome it is.\n</think>\n\nIt is sunny.")
    asked = {"return_speculation": True, "logprobs": True, **fields}
    answer = create(client, **asked)
    choice = answer.choices[0]
    assert (choice.message.reasoning, choice.message.content) == ("Rome it is.", "It is sunny.")
    assert choice.message.reasoning_content == choice.message.reasoning
    assert choice.finish_reason == "stop"
    assert "".join(it.token for it in choice.logprobs.content) == "It is sunny."
    tokens = choice.speculation["tokens"]
    thought = [token["text"] for token in tokens if token["part"] == "reasoning"]
    assert "".join(thought) == "\nRome it is.\n"
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(thought)
    assert streamed(client, **fields) == ("Rome it is.", "It is sunny.", [], "stop")
    assert streamed(client, include_reasoning=False, **fields)[:2] == ("", "It is sunny.")


@pytest.mark.usefixtures("scripted")
def test_calls_behind_the_thought(client: openai.OpenAI) -> None:
    fields = {"tools": [WEATHER], **script(f"<think>Hm.</think>\n\nLet me see.\n{CALL}")}
    choice = create(client, **fields).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.reasoning, choice.message.content) == ("Hm.", "Let me see.")
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Rome"}')
    told = ("Hm.", "Let me see.", [["get_weather", '{"city": "Rome"}']], "tool_calls")
    assert streamed(client, **fields) == told


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_budget_closes_the_thought(client: openai.OpenAI, budget: int) -> None:
    said = []
    for speculative in (0, 4):
        fields = {"speculative": {"num_speculative_tokens": speculative}, **OPENS}
        free = create(client, **fields, max_completion_tokens=30).choices[0].message
        assert free.content == ""
        limited = create(
            client, **fields, thinking_token_budget=budget, max_completion_tokens=30,
            return_speculation=True,
        )  # fmt: skip
        usage, (choice,) = limited.usage, limited.choices
        assert usage.completion_tokens_details.reasoning_tokens == budget
        parts = [token["part"] for token in choice.speculation["tokens"]]
        assert parts[: budget + 1] == ["reasoning"] * budget + ["markup"]
        message = choice.message
        assert free.reasoning.startswith(getattr(message, "reasoning", ""))
        assert message.content
        said.append((getattr(message, "reasoning", None), message.content))
        unlimited = create(client, **fields, thinking_token_budget=-1, max_completion_tokens=30)
        assert unlimited.choices[0].message == free
    assert said[0] == said[1]


def test_a_budget_counts_behind_the_opening_mark(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"logit_bias": {str(OPEN): 100}, "thinking_token_budget": 3}
    answer = create(client, **fields, max_completion_tokens=9, return_speculation=True)
    parts = [token["part"] for token in answer.choices[0].speculation["tokens"]]
    # The biased token is all that the model writes.
    assert parts == ["markup"] * 5 + ["content"] * 4
    # Models without reasoning have no limit, nor has reasoning that the prompt has closed.
    for kwargs in ({}, {"chat_template_kwargs": {"enable_thinking": False}}):
        free, limited = (
            create(client, **kwargs, **more, max_completion_tokens=20).choices[0].message
            for more in ({}, {"thinking_token_budget": 0})
        )
        assert free == limited
        assert free.content


@pytest.mark.parametrize("opens", [False, True])
def test_structure_begins_behind_the_thought(client: openai.OpenAI, opens: bool) -> None:
    fields: dict[str, Any] = {"chat_template_kwargs": {"opens": opens}, "thinking_token_budget": 6}
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    if not opens:
        fields["logit_bias"] = {str(OPEN): 100, str(CLOSE): 100}
    said = []
    for speculative in (0, 4):
        fields["speculative"] = {"num_speculative_tokens": speculative}
        answer = create(client, response_format=wanted, **fields)
        (choice,) = answer.choices
        assert json.loads(choice.message.content)["city"] in ("Rome", "Oslo")
        assert choice.finish_reason == "stop"
        if opens:
            assert answer.usage.completion_tokens_details.reasoning_tokens == 6
        for wish, fits in (
            ({"guided_regex": "[0-9]{2}/[0-9]"}, lambda it: it[2] == "/" and len(it) == 4),
            ({"guided_choice": ["yes", "no"]}, lambda it: it in ("yes", "no")),
            ({"guided_grammar": 'start: "<" n ">"\nn: /[0-9]{3}/'}, lambda it: it[4] == ">"),
        ):
            content = create(client, **wish, **fields).choices[0].message.content
            assert fits(content), (wish, content)
        said.append(choice.message)
    assert said[0] == said[1]


def test_a_call_that_must_come(client: openai.OpenAI) -> None:
    for more in (OPENS, {}, {"chat_template_kwargs": {"enable_thinking": False}}):
        fields: dict[str, Any] = {"tools": [WEATHER], "thinking_token_budget": 4, **more}
        choice = create(client, tool_choice="required", parallel_tool_calls=False, **fields)
        (call,) = choice.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
        assert choice.choices[0].finish_reason == "tool_calls"
        thought = choice.usage.completion_tokens_details.reasoning_tokens
        assert thought == 4 or (thought == 0 and more is not OPENS)


@pytest.mark.parametrize("mark", ["<think>", "</tool_call>", "<|im_end|>"])
def test_a_structure_may_spell_marks(client: openai.OpenAI, mark: str) -> None:
    schema = {**CITY, "properties": {"city": {"const": mark}}}
    named = {"name": "x", "schema": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for k in (0, 4):
        given: dict[str, Any] = {"speculative": {"num_speculative_tokens": k}}
        format = {"type": "json_schema", "json_schema": named}
        answer = create(client, response_format=format, **given).choices[0].message
        assert json.loads(answer.content) == {"city": mark}
        called = create(
            client, tools=[tool], tool_choice="required", parallel_tool_calls=False, **given
        )
        [call] = called.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": mark}
        answer = create(client, guided_choice=[f"a {mark} b"], **given).choices[0].message
        assert answer.content == f"a {mark} b"
        answer = create(client, guided_grammar=f'start: "{mark}"', **given).choices[0].message
        assert answer.content == mark


def test_a_structure_behind_marks_that_are_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_thinking_tokenizer(tmp_path / "text", as_text=True))
    grammars = Grammars(tokenizer, 4096, (0, 2))
    format = ThinkingFormat(STYLES[0], tokenizer, ChatTemplate(tokenizer))
    wanted = OutputConstraints(content=StructuredOutput(json_schema=CITY))
    rome, bonn = '{"city": "Rome"}', '{"city": "Bonn"}'
    for opening, prompt in (("<think>", NEW), ("", f"{NEW}<think>\n")):
        ids = tokenizer.encode(prompt, False)
        frame = format.framed(wanted, ids, False)
        assert frame is not None
        thought = f"{opening}\nHm < 3, {{}} — ja.</think>\n\n"
        for text, fits in (
            (thought + rome, True),
            (thought + bonn, False),
            (rome, opening != ""),
            (thought + thought + rome, False),
        ):
            guide = grammars.guide(frame, frozenset())
            assert isinstance(guide, GrammarGuide)
            tokens = tokenizer.encode(text, False)
            taken = guide.matcher.try_consume_tokens(tokens)
            assert (taken == len(tokens) and guide.matcher.is_accepting()) == fits, text
        with pytest.raises(ApiError, match="as tokens"):
            format.framed(replace(wanted, budget=3), ids, False)


def rendered(live: Live, client: openai.OpenAI, messages: list[Any], **fields: Any) -> str:
    body = {"messages": messages, "add_generation_prompt": True, **fields}
    answer = client.post("/../tokenize", cast_to=object, body=body)
    assert isinstance(answer, dict)
    return live.model.tokenizer.decode(answer["tokens"], skip_special_tokens=False)


def test_history_and_effort_reach_the_template(client: openai.OpenAI, live: Live) -> None:
    call = {"id": "c1", "type": "function"}
    call["function"] = {"name": "get_weather", "arguments": '{"city": "Rome"}'}  # type: ignore[assignment]
    history = [
        *MESSAGES,
        {"role": "assistant", "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    assert "<think>\nHm.\n</think>" in rendered(live, client, history, tools=[WEATHER])
    off = "<think>\n\n</think>\n\n"
    assert rendered(live, client, MESSAGES, reasoning_effort="none").endswith(off)
    for fields in ({}, {"reasoning_effort": "high"}):
        assert rendered(live, client, MESSAGES, **fields).endswith("assistant\n")
    with pytest.raises(openai.BadRequestError, match="contradict"):
        rendered(
            live, client, MESSAGES, reasoning_effort="none",
            chat_template_kwargs={"enable_thinking": True},
        )  # fmt: skip


def test_r1_answers_begin_with_a_thought(client: openai.OpenAI, live: Live) -> None:
    model = live.model.with_options(reasoning_parser="deepseek_r1")
    format = model.output_format
    assert isinstance(format, ThinkingFormat)
    live.model.__dict__["output_format"] = format
    try:
        answer = create(client, thinking_token_budget=5, max_completion_tokens=20)
    finally:
        del live.model.__dict__["output_format"]
    assert answer.usage.completion_tokens_details.reasoning_tokens == 5
    assert answer.choices[0].message.content


def test_budgets_that_cannot_be_kept(client: openai.OpenAI, live: Live) -> None:
    with pytest.raises(openai.BadRequestError, match="thinking_token_budget"):
        create(client, thinking_token_budget=-2)
    with pytest.raises(openai.BadRequestError, match="use /v1/chat/completions"):
        client.completions.create(model="demo", prompt="a", extra_body={"thinking_token_budget": 1})
    live.model.__dict__["output_format"] = None
    try:
        with pytest.raises(openai.BadRequestError, match="--reasoning-parser"):
            create(client, thinking_token_budget=3)
    finally:
        del live.model.__dict__["output_format"]
