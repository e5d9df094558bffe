"""Whatever is wrong is told in OpenAI's form, and the server goes on."""

import gzip
import json
from typing import Any

import httpx
import pytest

from slipstream.serve.protocol.server import ErrorResponse
from tests.serve.api.live import Live

GOOD = {"prompt": "def main(", "max_tokens": 2, "temperature": 0}


def post(live: Live, content: bytes | str, path: str = "/v1/completions") -> httpx.Response:
    return httpx.post(
        f"{live.url}{path}", content=content, headers={"Content-Type": "application/json"}
    )


def error_of(answer: httpx.Response, status: int = 400) -> Any:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    return ErrorResponse.model_validate_json(answer.content).error


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}",
        b'{"a": ' * 5000 + b"1" + b"}" * 5000,
        b'{"prompt": "x"} {"prompt": "y"}',
    ],
    ids=range(13),
)
def test_what_is_no_json_object(live: Live, content: bytes) -> None:
    error = error_of(post(live, content))
    assert error.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"prompt": None}, "prompt", "prompt"),
        ({"prompt": {}}, "prompt", "a text, token ids"),
        ({"prompt": [1, "x"]}, "prompt", "prompt[1]: input should be a valid integer"),
        ({"prompt": ["a", 5]}, "prompt", "prompt[1] must be a text or a list of token ids"),
        ({"prompt": ["a", [1, "b"]]}, "prompt", "prompt[1][1]: input should be a valid integer"),
        ({"prompt": [[1], [2.5]]}, "prompt", "prompt"),
        ({"prompt": [True]}, "prompt", "prompt"),
        ({"prompt": []}, "prompt", "prompt"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": ["a", ""]}, "prompt", "prompt 2 of 2: the prompt is empty"),
        ({"prompt": [-1]}, "prompt", "prompt"),
        ({"prompt": [10**9]}, "prompt", "prompt holds 1000000000, but token ids go from 0"),
        ({"prompt": [[1], [10**9]]}, "prompt", "prompt 2 of 2: prompt holds 1000000000, but token"),
        ({"prompt": [10**30]}, "prompt", "prompt"),
        ({"prompt": "x " * 3000}, "prompt", "max_model_len"),
        ({"max_tokens": 99_999}, "max_tokens", "ask for at most 2045"),
        ({"max_tokens": 2046}, "max_tokens", "ask for at most 2045"),
        ({"prompt": [1] * 2047, "max_tokens": 2}, "max_tokens", "ask for at most 1"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"temperature": True}, "temperature", "number"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": 1e308}, "temperature", "less than or equal"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 0}, "n", "n:"),
        ({"n": 1.5}, "n", "n:"),
        ({"n": 10**40}, "n", "n:"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens", "max_tokens"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens", "must not exceed"),
        ({"max_tokens": 0, "min_tokens": 3}, "min_tokens", "must not exceed"),
        ({"best_of": 3}, "best_of", "leave best_of out"),
        ({"suffix": "x"}, "suffix", "prompt"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"logit_bias": {"def main(": 1}}, "logit_bias", "tokens of this model, not one"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "100"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "token ids go from 0"),
        ({"stop": ""}, "stop", "stop"),
        ({"stop": [1]}, "stop", "stop"),
        ({"stop": ["a"] * 65}, "stop", "64"),
        ({"seed": 2**70}, "seed", "seed"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options",
            "include_obfuscation",
        ),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "streamed"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words", "bad_words"),
        ({"stop_token_ids": [10**8]}, "stop_token_ids", "token ids go from 0"),
        ({"speculative": 3}, "speculative", "speculative"),
        ({"speculative": {"k": 3}}, "speculative", "unknown field speculative.k"),
        ({"speculative": {"num_speculative_tokens": 9}}, "speculative", "at most 4"),
        ({"speculative": {"num_speculative_tokens": -1}}, "speculative", "at least 0, or null"),
        (
            {"num_speculative_tokens": 4},
            "num_speculative_tokens",
            'write "speculative": {"num_speculative_tokens": ...}',
        ),
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"use_beam_search": True}, "use_beam_search", "use_beam_search is not supported: the"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params", "not disaggregated"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs", "no extensions"),
        ({"logits_processors": ["x"]}, "logits_processors", "use logit_bias"),
        ({"store": 0}, "store", "boolean"),
        ({"store": True}, "store", "nothing is stored"),
        ({"metadata": {"a": 1}}, "metadata", "string"),
        ({"request_id": "a b"}, "request_id", "request_id"),
        ({"request_id": "a" * 129}, "request_id", "request_id"),
        ({"truncation_side": "left"}, "truncation_side", "goes with truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least one token"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "contradict"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly"),
        ({"structured_outputs": {"structural_tag": "x"}}, None, "structural_tag"),
        ({"response_format": {"type": "xml"}}, "response_format", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format",
            "schema is missing",
        ),
    ],
)
def test_wrong_fields_are_named(
    live: Live, fields: dict[str, Any], param: str | None, named: str
) -> None:
    error = error_of(post(live, json.dumps({**GOOD, **fields})))
    assert named in error.message
    if param is not None:
        assert error.param == param


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_chat_that_asks_for_more_than_fits(live: Live, name: str) -> None:
    """The engine would end it early; the client could not tell this from its own limit."""
    chat = {"messages": [{"role": "user", "content": "hi"}], name: 2048}
    error = error_of(post(live, json.dumps(chat), "/v1/chat/completions"))
    assert (error.param, error.code) == (name, "context_length_exceeded")


def test_the_last_free_place_can_be_used(live: Live) -> None:
    body = {"prompt": [1] * 2047, "max_tokens": 1}
    assert post(live, json.dumps(body)).json()["usage"]["total_tokens"] == 2048


def test_the_server_still_works(live: Live) -> None:
    assert post(live, json.dumps(GOOD)).status_code == 200
    live.engine.scheduler.check_invariants()


def test_a_byte_order_mark_is_no_part_of_a_body(live: Live) -> None:
    answers = [post(live, json.dumps(GOOD).encode(coding)) for coding in ("utf-8", "utf-8-sig")]
    first, second = (answer.json()["choices"] for answer in answers)
    assert first == second


def test_a_missing_prompt(live: Live) -> None:
    assert error_of(post(live, b"{}")).message == "prompt is missing"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_other_bodies_than_json(live: Live, content_type: str) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    answer = httpx.post(f"{live.url}/v1/completions", content=json.dumps(GOOD), headers=headers)
    assert "application/json" in error_of(answer, 415).message


def test_paths_and_methods(live: Live) -> None:
    for path in ("/nowhere", "//v1/models"):
        assert f"GET {path}:" in error_of(httpx.get(live.url + path), 404).message
    for path in ("/v1/responses/%2e%2e%2f", "/health/"):
        assert "/openapi.json" in error_of(httpx.get(live.url + path), 404).message
    for path, other in (
        ("/completion", "/v1/completions"),
        ("/props", "/v1/models"),
        ("/api/chat", "/v1/chat/completions"),
        ("/api/generate", "/v1/completions"),
        ("/api/tags", "/v1/models"),
    ):
        assert f"use {other}, of" in error_of(httpx.get(live.url + path), 404).message
        assert f"use {other}, of" in error_of(httpx.post(live.url + path), 404).message
    answer = httpx.get(f"{live.url}/v1/completions")
    assert error_of(answer, 405).type == "invalid_request_error"
    assert answer.headers["allow"] == "POST"


def test_errors_of_several_prompts_leave_nothing_behind(live: Live) -> None:
    body = {**GOOD, "prompt": ["def main(", "x " * 3000]}
    assert "max_model_len" in error_of(post(live, json.dumps(body))).message
    assert post(live, json.dumps(GOOD)).status_code == 200


def test_a_compressed_body(live: Live) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    packed = gzip.compress(json.dumps(GOOD).encode())
    answer = httpx.post(f"{live.url}/v1/completions", content=packed, headers=headers)
    assert "Content-Encoding" in error_of(answer, 415).message
