"""/v1/chat/completions through the openai client: every field, streamed and not."""

from typing import Any

import openai
import pytest

from slipstream import LLM, SamplingParams
from tests.serve.api.live import Live, call_api

MESSAGES = [{"role": "user", "content": "Write a function that adds two numbers."}]
IMAGE = {"type": "image_url", "image_url": {"url": "https://x.org"}}
THOUGHT = {"role": "assistant", "content": "x", "reasoning": "a"}


def create(client: openai.OpenAI, messages: Any = MESSAGES, **fields: Any) -> Any:
    given = {"model": "demo", "temperature": 0, "max_completion_tokens": 12, **fields}
    return call_api(client.chat.completions.create, messages=messages, **given)


def said(answer: Any) -> list[str]:
    return [choice.message.content for choice in answer.choices]


def streamed(client: openai.OpenAI, messages: Any = MESSAGES, **fields: Any) -> dict[int, Any]:
    whole: dict[int, Any] = {}
    options = {"include_usage": True}
    for chunk in create(client, messages, stream=True, stream_options=options, **fields):
        assert chunk.object == "chat.completion.chunk"
        if chunk.usage is not None:
            whole[-1] = chunk.usage
        for piece in chunk.choices:
            own = whole.setdefault(piece.index, {"text": "", "content": [], "roles": []})
            own["text"] += piece.delta.content or ""
            own["roles"] += [piece.delta.role] if piece.delta.role else []
            own["content"] += piece.logprobs.content if piece.logprobs else []
            own["finish_reason"] = piece.finish_reason
    return whole


def test_greedy_text_is_the_offline_text(client: openai.OpenAI, offline: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    expected = offline.chat(MESSAGES, params)[0].outputs[0].text
    answer = create(client, max_completion_tokens=30)
    assert said(answer) == [expected]
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    pieces = streamed(client, max_completion_tokens=30)
    assert (pieces[0]["text"], pieces[0]["roles"]) == (expected, ["assistant"])
    assert pieces[0]["finish_reason"] == "length"
    assert pieces[-1] == answer.usage or pieces[-1].total_tokens == answer.usage.total_tokens


def test_answers_that_end_by_themselves(client: openai.OpenAI) -> None:
    answer = create(client, max_completion_tokens=None)
    assert answer.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in said(answer)[0]
    assert create(client, max_completion_tokens=None, max_tokens=3).usage.completion_tokens == 3


def test_several_answers(client: openai.OpenAI, offline: LLM) -> None:
    params = SamplingParams(temperature=1, seed=5, n=3, max_tokens=10)
    expected = [it.text for it in offline.chat(MESSAGES, params)[0].outputs]
    fields = {"temperature": 1, "seed": 5, "n": 3, "max_completion_tokens": 10}
    assert said(create(client, **fields)) == expected
    pieces = streamed(client, **fields)
    assert [pieces[index]["text"] for index in range(3)] == expected
    assert all(pieces[index]["roles"] == ["assistant"] for index in range(3))


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_bytes(client: openai.OpenAI, stream: bool) -> None:
    fields = {"logprobs": True, "top_logprobs": 3}
    if stream:
        one = streamed(client, **fields)[0]
        text, content = one["text"], one["content"]
    else:
        choice = create(client, **fields).choices[0]
        text, content = choice.message.content, choice.logprobs.content
    assert len(content) == 12
    assert b"".join(bytes(token.bytes) for token in content).decode() == text
    for token in content:
        assert [it.logprob for it in token.top_logprobs] == sorted(
            (it.logprob for it in token.top_logprobs), reverse=True
        )
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token  # greedy
        assert token.logprob <= 0


def test_logprobs_without_alternatives(client: openai.OpenAI) -> None:
    content = create(client, logprobs=True).choices[0].logprobs.content
    assert [token.top_logprobs for token in content] == [[]] * 12
    assert create(client).choices[0].logprobs is None


def test_parts_and_roles(client: openai.OpenAI, live: Live) -> None:
    plain = [{"role": "system", "content": "Be short."}, *MESSAGES]
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": "Be short."}]},
        {"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]},
    ]
    assert said(create(client, plain)) == said(create(client, parts))


def test_the_last_message_is_continued(client: openai.OpenAI, offline: LLM) -> None:
    begun = "def add(a, b):"
    prompt = f"<|im_start|>user\n{MESSAGES[0]['content']}<|im_end|>\n<|im_start|>assistant\n{begun}"
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = offline.generate([prompt], params)[0].outputs[0].text
    messages = [*MESSAGES, {"role": "assistant", "content": begun}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    assert said(create(client, messages, **fields)) == [expected]


def test_the_opening_of_the_answer_may_be_left_out(client: openai.OpenAI, live: Live) -> None:
    without = create(client, add_generation_prompt=False).usage.prompt_tokens
    count = len(live.engine.tokenizer.encode("<|im_start|>assistant\n"))  # type: ignore[union-attr]
    assert create(client).usage.prompt_tokens - without == count


def test_speculation_is_told(client: openai.OpenAI) -> None:
    answer = create(client, return_speculation=True, max_completion_tokens=30)
    tokens = answer.choices[0].speculation["tokens"]
    assert "".join(token["text"] for token in tokens) == said(answer)[0]
    assert answer.usage.speculation["drafts"] > 0
    plain = create(client, return_speculation=True, speculative={"num_speculative_tokens": 0})
    assert {token["kind"] for token in plain.choices[0].speculation["tokens"]} == {"plain"}
    unset = create(client, return_speculation=True, speculative={"num_speculative_tokens": None})
    assert unset.usage.speculation["drafts"] > 0


def test_prompt_logprobs_stand_beside_the_choices(client: openai.OpenAI) -> None:
    answer = create(client, prompt_logprobs=1)
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens
    assert answer.prompt_logprobs[0] is None


def test_fields_that_change_nothing(client: openai.OpenAI) -> None:
    plain = said(create(client))
    fields = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "safety_identifier": "s",
    }
    assert said(create(client, **fields)) == plain


def test_thinking_that_a_model_lacks_can_be_switched_off(client: openai.OpenAI) -> None:
    plain = create(client, max_completion_tokens=4).choices[0].message
    for fields in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ):
        assert create(client, max_completion_tokens=4, **fields).choices[0].message == plain


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"reasoning_effort": "low"}, "does not read reasoning_effort"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"functions": [{"name": "f"}]}, "tools"),
        ({"function_call": "auto"}, "tool_choice"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "texts and images"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"prediction": {"type": "content", "content": "x"}}, "speculative"),
        ({"web_search_options": {}}, "searches nothing"),
        ({"verbosity": "low"}, "message"),
        ({"store": True}, "store"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"top_logprobs": 2}, "logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "give one"),
        ({"tool_choice": "auto"}, "goes with tools"),
        ({"parallel_tool_calls": False}, "goes with tools"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "does not read enable_thinking"),
        ({"chat_template_kwargs": {"enable_thinking": 0}}, "does not read enable_thinking"),
        ({"chat_template_kwargs": {"tools": []}}, "field of its own"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "contradict each other",
        ),
        ({"stream": True, "prompt_logprobs": 1}, "cannot be streamed"),
        ({"stream_options": {"include_usage": True}}, "stream: true"),
        ({"speculative": {"num_speculative_tokens": 5}}, "at most 4"),
        ({"speculative": {"num_speculative_tokens": -1}}, "num_speculative_tokens"),
        ({"prompt_logprob": 5}, "did you mean prompt_logprobs?"),
        ({"mm_processor_kwargs": {"a": 1}}, "text only"),
        ({"max_completion_tokens": 0}, "input should be greater than or equal to 1"),
        ({"max_tokns": 5}, "did you mean max_tokens?"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "content is missing"),
        ({"messages": [{"role": "assistant"}]}, "needs a content"),
        ({"messages": [{"role": "user", "content": "x", "extra": 1}]}, "extra"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "text only"),
        ({"messages": [{"role": "user", "content": 5}]}, "must be a text or a list of parts"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
        # The demo's template reads roles and contents only.
        ({"messages": [*MESSAGES, THOUGHT]}, "].reasoning would be ignored"),
        (
            {"messages": [*MESSAGES, {**THOUGHT, "reasoning_content": "b"}]},
            "reasoning_content is the older name",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(
    client: openai.OpenAI, fields: dict[str, Any], named: str
) -> None:
    messages = fields.pop("messages", MESSAGES)
    body = {**fields, "messages": messages}
    body.setdefault("max_completion_tokens", 4)
    with pytest.raises(openai.BadRequestError) as raised:
        client.post("/chat/completions", cast_to=object, body=body)
    error = raised.value.body
    assert isinstance(error, dict)
    assert named in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] is not None
    if "messages" in named or "ignored" in named:
        assert error["param"] == "messages"
    if "at most 4" in named:
        assert error["param"] == "speculative"


def test_a_conversation_that_is_too_long_is_the_fault_of_its_messages(
    client: openai.OpenAI,
) -> None:
    for times in (3000, 1_000_000):
        with pytest.raises(openai.BadRequestError) as raised:
            create(client, [{"role": "user", "content": "a b " * times}])
        assert raised.value.code == "context_length_exceeded"
        assert raised.value.param == "messages"
