"""Texts that must have a shape, in all the spellings, with speculation on."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from slipstream import StructuredOutput
from tests.serve.api.live import Live

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "maxItems": 2,
        },
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}
GRAMMAR = 'start: "def " /[a-z]{3,6}/ "():"'
MESSAGES = [{"role": "user", "content": "Describe a pet."}]


def text_of(live: Live, path: str = "/v1/completions", **fields: Any) -> str:
    prompt = {"messages": MESSAGES} if "chat" in path else {"prompt": "pet = "}
    body = {**prompt, "temperature": 0, "max_tokens": 60, **fields}
    answer = httpx.post(f"{live.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"] if "chat" in path else choice["text"])


def error_of(live: Live, **fields: Any) -> Any:
    body = {"prompt": "x", "max_tokens": 8, **fields}
    answer = httpx.post(f"{live.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_schema_in_every_spelling(live: Live, path: str) -> None:
    named = {"name": "pet", "schema": SCHEMA, "strict": True}
    texts = {
        text_of(live, path, response_format={"type": "json_schema", "json_schema": named}),
        text_of(live, path, guided_json=SCHEMA),
        text_of(live, path, guided_json=json.dumps(SCHEMA)),
        text_of(live, path, structured_outputs={"json": SCHEMA}),
        text_of(
            live,
            path,
            structured_outputs={"json": SCHEMA},
            speculative={"num_speculative_tokens": 0},
        ),
    }
    assert len(texts) == 1, "greedy, so all say the same"
    pet = json.loads(texts.pop())
    assert set(pet) == {"name", "kind", "ages"}
    assert re.fullmatch("[a-z]{1,8}", pet["name"])
    assert pet["kind"] in ("cat", "dog")
    assert len(pet["ages"]) <= 2


@pytest.mark.parametrize(
    "fields",
    [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}],
)
def test_any_object(live: Live, fields: dict[str, Any]) -> None:
    # Without a bias the little model would write strings for ever.
    assert live.engine.tokenizer is not None
    closing = [live.engine.tokenizer.token_to_id(text) for text in ('"', "}")]
    text = text_of(live, **fields, logit_bias={str(token): 20 for token in closing})
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "fields", [{"guided_choice": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}]
)
def test_one_of_several_texts(live: Live, fields: dict[str, Any]) -> None:
    assert text_of(live, **fields) in ("yes", "no")


@pytest.mark.parametrize(
    "fields",
    [{"guided_regex": "[a-c]{3}-[0-9]{4}"}, {"structured_outputs": {"regex": "[a-c]{3}-[0-9]{4}"}}],
)
def test_a_regular_expression(live: Live, fields: dict[str, Any]) -> None:
    assert re.fullmatch("[a-c]{3}-[0-9]{4}", text_of(live, **fields))


@pytest.mark.parametrize(
    "fields", [{"guided_grammar": GRAMMAR}, {"structured_outputs": {"grammar": GRAMMAR}}]
)
def test_a_grammar(live: Live, fields: dict[str, Any]) -> None:
    assert re.fullmatch(r"def [a-z]{3,6}\(\):", text_of(live, **fields))


def test_streams_and_samples(live: Live) -> None:
    body = {
        "prompt": ["a = ", "b = "],
        "n": 3,
        "max_tokens": 100,
        "guided_json": SCHEMA,
        "seed": 1,
        "stream": True,
    }
    texts: dict[int, str] = {}
    with httpx.stream("POST", f"{live.url}/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for piece in json.loads(line[6:])["choices"]:
                    texts[piece["index"]] = texts.get(piece["index"], "") + piece["text"]
    pets = [json.loads(texts[index]) for index in range(6)]
    assert all(pet["kind"] in ("cat", "dog") for pet in pets)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"guided_regex": "("}, "regex"),
        ({"guided_grammar": "start: nothing"}, "grammar"),
        ({"guided_json": {"type": "no such type"}}, "json_schema"),
        ({"guided_json": "{"}, "json_schema is not JSON"),
        ({"guided_json": "[1]"}, "must be a JSON object"),
        ({"guided_choice": [""]}, "choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "contradict"),
    ],
)
def test_shapes_that_cannot_be(live: Live, fields: dict[str, Any], named: str) -> None:
    assert named in error_of(live, **fields)["message"]


def test_a_shape_that_nothing_can_follow(live: Live) -> None:
    error = error_of(live, guided_choice=["yes"], allowed_token_ids=[0])
    assert error["code"] == "grammar_failed"
    assert "no token" in error["message"]


def test_a_stream_tells_of_its_failure(live: Live) -> None:
    body = {"prompt": "x", "guided_choice": ["yes"], "allowed_token_ids": [0], "stream": True}
    answer = httpx.post(f"{live.url}/v1/completions", json=body, timeout=60)
    failure, done = answer.text.split("\n\n")[-3:-1]
    assert json.loads(failure.removeprefix("data: "))["error"]["code"] == "grammar_failed"
    assert done == "data: [DONE]"


def test_who_has_no_grammar_waits_for_nobodys(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling a large one takes seconds, and several may come at once."""
    go_on, compiling = threading.Event(), threading.Semaphore(0)
    compile_now = live.engine.compile

    def held(structured: StructuredOutput) -> None:
        compiling.release()
        assert go_on.wait(60)
        compile_now(structured)

    monkeypatch.setattr(live.engine, "compile", held)
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(text_of, live, guided_regex=f"[ab]{{{n}}}") for n in range(1, 5)]
        try:
            assert compiling.acquire(timeout=60)
            assert compiling.acquire(timeout=60)
            plain = {"prompt": "x", "max_tokens": 2}
            answer = httpx.post(f"{live.url}/v1/completions", json=plain, timeout=30)
            assert answer.status_code == 200
        finally:
            go_on.set()
        assert [len(text.result()) for text in waiting] == [1, 2, 3, 4]
