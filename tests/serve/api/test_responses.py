"""/v1/responses with the client of the protocol: texts, streams, history, structure, errors."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from slipstream.serve.limits import ServeLimits
from slipstream.serve.protocol.response_object import ResponseObject
from slipstream.serve.responses.store import ResponseStore, StoredResponse
from tests.serve.api.live import Live, call_api, serving
from tests.serve.api.response_streams import check_stream

PROMPT = "def add(a, b):"
LOGPROBS = "message.output_text.logprobs"
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def create(client: openai.OpenAI, input: Any = PROMPT, **fields: Any) -> Any:
    given = {"model": "demo", "temperature": 0, "max_output_tokens": 12, **fields}
    return call_api(client.responses.create, input=input, **given)


def chat(client: openai.OpenAI, messages: list[Any], max_tokens: int = 12, **fields: Any) -> Any:
    given = {"model": "demo", "temperature": 0, "max_tokens": max_tokens, **fields}
    return call_api(client.chat.completions.create, messages=messages, **given).choices[0].message


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def refusal(client: openai.OpenAI, status: int = 400, **fields: Any) -> tuple[str, str | None]:
    with pytest.raises(openai.APIStatusError) as refused:
        create(client, **fields)
    assert refused.value.status_code == status
    body: Any = refused.value.body
    return body["message"], body["param"]


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    items = [{**item, "id": "", "call_id": ""} for item in response["output"]]
    dropped = ("id", "created_at", "completed_at", "usage", "previous_response_id")
    return {**{k: v for k, v in response.items() if k not in dropped}, "output": items}


def test_the_text_is_that_of_a_chat(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "Be brief."}, user(PROMPT)]
    expected = chat(client, messages).content
    answer = create(client, instructions="Be brief.")
    assert answer.output_text == expected
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == 12
    assert answer.usage.total_tokens == answer.usage.input_tokens + 12
    parts = [{"type": "input_text", "text": PROMPT}]
    items = [messages[0], {"type": "message", "role": "user", "content": parts}]
    assert create(client, items).output_text == expected


def test_a_stream_ends_with_the_whole_answer(live: Live, client: openai.OpenAI) -> None:
    for fields in (
        {"max_output_tokens": 12, "include": [LOGPROBS], "top_logprobs": 2},
        {"max_output_tokens": 40, "stop": ["\n"]},
        {"max_output_tokens": 9, "stop": ["def"], "tools": []},
    ):
        streamed = check_stream(live, input=PROMPT, **fields)
        given = {"input": PROMPT, "temperature": 0, **fields}
        whole = httpx.post(f"{live.url}/v1/responses", json=given).json()
        ResponseObject.model_validate(whole)
        assert without_ids(streamed) == without_ids(whole)
    assert whole["output"][0]["content"][0]["text"] == ""


def test_logprobs_are_those_of_a_chat(live: Live, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 6}
    expected = client.chat.completions.create(
        messages=[user(PROMPT)],
        logprobs=True,
        top_logprobs=2,
        **fields,
    )
    assert expected.choices[0].logprobs is not None
    rows = [token.model_dump() for token in expected.choices[0].logprobs.content or []]
    answer = check_stream(
        live, input=PROMPT, max_output_tokens=6, include=[LOGPROBS], top_logprobs=2
    )
    found = answer["output"][0]["content"][0]["logprobs"]
    assert [token["token"] for token in found] == [token["token"] for token in rows]
    for own, other in zip(found, rows, strict=True):
        assert own["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
        assert len(own["top_logprobs"]) == 2


def test_the_client_puts_a_stream_together(client: openai.OpenAI) -> None:
    with client.responses.stream(model="demo", input=PROMPT, max_output_tokens=12) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    assert text
    with pytest.raises(RuntimeError):  # the client calls incomplete ones so
        stream.get_final_response()


def test_a_response_is_continued_by_its_id(live: Live, client: openai.OpenAI) -> None:
    first = create(client, instructions="Be brief.")
    assert client.responses.retrieve(first.id) == first
    second = create(client, "And sub?", previous_response_id=first.id)
    messages = [user(PROMPT), {"role": "assistant", "content": first.output_text}]
    messages.append(user("And sub?"))
    assert second.output_text == chat(client, messages).content
    items = [user(PROMPT), *first.output, user("And sub?")]
    assert create(client, items, store=False).output_text == second.output_text
    third = check_stream(live, input="Thanks.", max_output_tokens=3, previous_response_id=second.id)
    assert third["previous_response_id"] == second.id
    fourth = create(client, "Bye.", previous_response_id=third["id"])
    assert fourth.usage.input_tokens > second.usage.input_tokens
    assert fourth.usage.input_tokens_details.cached_tokens > 0
    client.responses.delete(first.id)
    message, param = refusal(client, 404, previous_response_id=first.id)
    assert "--max-stored-responses" in message
    assert param == "previous_response_id"
    assert create(client, "Again.", previous_response_id=second.id).output_text


def test_the_oldest_turns_make_way_where_that_is_wanted(live: Live, client: openai.OpenAI) -> None:
    rule = {"role": "system", "content": "Be brief."}
    turns = [user(f"{number}: " + "word " * 280) for number in range(9)]
    whole = [rule, *turns, user("Now?")]
    assert "max_model_len" in refusal(client, input=whole)[0]
    answer = create(client, whole, truncation="auto")
    expected = [
        messages
        for kept in range(9)
        if tokens_of(live, messages := [rule, *turns[9 - kept :], user("Now?")]) + 12
        <= live.model.max_model_len
    ][-1]
    assert 3 < len(expected) < 10
    assert answer.usage.input_tokens == tokens_of(live, expected)
    assert answer.output_text == chat(client, expected).content
    again = create(client, "More?", previous_response_id=answer.id, truncation="auto")
    assert again.truncation == "auto"
    assert "max_model_len" in refusal(client, input="word " * 5000, truncation="auto")[0]


def tokens_of(live: Live, messages: list[dict[str, str]]) -> int:
    count: int = httpx.post(f"{live.url}/tokenize", json={"messages": messages}).json()["count"]
    return count


def test_what_is_not_stored_is_gone(client: openai.OpenAI) -> None:
    answer = create(client, store=False)
    assert answer.store is False
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(answer.id)
    stored = create(client)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(stored.id)
    with pytest.raises(openai.BadRequestError, match="stream"):
        client.responses.retrieve(stored.id, stream=True)


def test_the_store_is_bounded_by_number_and_by_bytes() -> None:
    def response(size: int) -> StoredResponse:
        return StoredResponse(b"d" * (size - 1), b"m")

    def kept(store: ResponseStore) -> set[str]:
        return {name for name in "abcdef" if name in store._kept}

    store = ResponseStore(3, 100)
    for name in "abc":
        store.put(name, response(10))
    store.get("a")
    store.put("d", response(10))
    assert kept(store) == {"a", "c", "d"}
    store.put("e", response(85))
    assert kept(store) == {"d", "e"}
    store.put("f", response(101))
    assert kept(store) == {"d", "e"}
    store.delete("e")
    store.put("a", response(90))
    assert kept(store) == {"a", "d"}
    nothing = ResponseStore(0, 100)
    nothing.put("a", response(1))
    assert kept(nothing) == set()


def test_a_server_may_keep_nothing() -> None:
    with (
        serving(limits=ServeLimits(max_stored_responses=0)) as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = create(client, max_output_tokens=1)
        assert answer.store is False
        message, param = refusal(client, store=True)
        assert "--max-stored-responses" in message
        assert param == "store"
        refusal(client, 404, previous_response_id=answer.id)


def test_one_id_serves_many_at_once_and_may_be_deleted_meanwhile(client: openai.OpenAI) -> None:
    first = create(client)

    def go_on(number: int) -> str | None:
        if number == 5:
            client.responses.delete(first.id)
        try:
            text: str = create(client, "More.", previous_response_id=first.id).output_text
        except openai.NotFoundError:
            return None
        return text

    with ThreadPoolExecutor(8) as pool:
        texts = set(pool.map(go_on, range(12)))
    assert len(texts - {None}) <= 1
    assert go_on(0) is None


def test_a_client_that_leaves_ends_its_response(live: Live) -> None:
    body = {"input": PROMPT, "stream": True, "max_output_tokens": 1500, "ignore_eos": True}
    with httpx.stream("POST", f"{live.url}/v1/responses", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                name = json.loads(line.removeprefix("data: "))["response"]["id"]
                break
    deadline = time.monotonic() + 30
    while live.model.thread.num_open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert live.model.thread.num_open == 0
    assert httpx.get(f"{live.url}/v1/responses/{name}").status_code == 404


def test_a_schema_is_followed(live: Live, client: openai.OpenAI) -> None:
    format = {"type": "json_schema", "name": "place", "schema": CITY, "strict": True}
    fields: dict[str, Any] = {"text": {"format": format}, "max_output_tokens": 40}
    answer = create(client, "Where?", **fields)
    assert answer.status == "completed"
    assert json.loads(answer.output_text)["city"] in ("Rome", "Oslo")
    streamed = check_stream(live, input="Where?", **fields)
    assert streamed["output"][0]["content"][0]["text"] == answer.output_text
    assert streamed["text"]["format"]["schema"] == CITY
    start = create(client, text={"format": {"type": "json_object"}}).output_text
    assert start.startswith("{")
    assert create(client, text={"format": {"type": "text"}}).output_text


def test_fields_of_this_server(client: openai.OpenAI) -> None:
    answer = create(
        client,
        speculative={"num_speculative_tokens": 2},
        return_speculation=True,
        seed=3,
        top_k=5,
        metadata={"a": "b"},
    )
    assert "".join(token["text"] for token in answer.speculation["tokens"]) == answer.output_text
    assert answer.usage.speculation["drafts"] > 0
    assert max(token["position"] or 0 for token in answer.speculation["tokens"]) < 3
    assert answer.metadata == {"a": "b"}
    chosen = create(client, include=[LOGPROBS], logprob_token_ids=[5, 6]).output[0].content[0]
    assert all(len(token.top_logprobs) in (2, 3) for token in chosen.logprobs)
    deltas = [
        event.delta
        for event in create(client, stream=True, stream_interval=6)
        if event.type == "response.output_text.delta"
    ]
    assert len(deltas) <= 3


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("background", True, "background must be false"),
        ("truncation", "some", "'auto' or 'disabled'"),
        ("conversation", "conv_1", "continue a response by previous_response_id"),
        ("prompt", {"id": "p"}, "unknown field prompt"),
        ("return_token_ids", True, "/v1/chat/completions"),
        ("n", 2, "n"),
        ("prompt_logprobs", 1, "/v1/chat/completions"),
        ("tools", [{"type": "web_search"}], "the type web_search is not supported"),
        ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": []}, "allowed_tools is"),
        ("tool_choice", "required", "goes with tools"),
        ("text", {"verbosity": "low"}, "how long"),
        ("reasoning", {"effort": "low"}, "does not read reasoning.effort"),
        ("reasoning", {"summary": "concise"}, "auto"),
        ("include", ["file_search_call.results"], LOGPROBS),
        ("top_logprobs", 2, "include"),
        ("stream_options", {"include_obfuscation": False}, "stream: true"),
        ("max_output_tokens", 0, "at least|greater"),
        ("max_output_tokens", 99999, "max_output_tokens is 99999"),
        ("input", [], "at least 1"),
        ("input", 5, "a text or a list of items"),
        ("input", [{"type": "item_reference", "id": "a"}], "item_reference is not supported"),
        ("input", [{"type": "computer_call"}], "must be one of"),
        ("input", [{"type": "reasoning", "encrypted_content": "a"}], "encrypted_content"),
        (
            "input",
            [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
            r"this model reads text only",
        ),
        (
            "input",
            [{"role": "user", "content": [{"type": "input_text"}]}],
            r"input\[0\]\.content\[0\]\.text is missing",
        ),
        (
            "input",
            [{"type": "function_call_output", "call_id": "c", "output": "1"}],
            r"input\[0\]\.call_id names 'c'",
        ),
        ("surprise", 1, "unknown field surprise"),
    ],
)
def test_what_is_refused_is_named(client: openai.OpenAI, field: str, value: Any, part: str) -> None:
    message, param = refusal(client, **{"input": "a", field: value})
    assert re.search(part, message), message
    assert (param or "").split(".")[0] == field


def test_nothing_is_left_running(live: Live) -> None:
    assert live.model.thread.num_open == 0
