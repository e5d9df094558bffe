"""Fields that other servers have: what each of them changes."""

import json
from typing import Any

import httpx
import pytest

from tests.serve.api.live import Live

# A client of one call takes longer to make than to answer.
HTTP = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), timeout=60)
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PLAIN: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "def add(a, b):\n", "max_tokens": 8, "temperature": 0},
    CHAT: {
        "messages": [{"role": "user", "content": "Write add(a, b)."}],
        "max_tokens": 8,
        "temperature": 0,
    },
}
BOTH = pytest.mark.parametrize("path", [TEXT, CHAT])


def ask(live: Live, path: str, **fields: Any) -> Any:
    answer = HTTP.post(f"{live.url}{path}", json={**PLAIN[path], **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(live: Live, path: str, **fields: Any) -> list[Any]:
    body = {**PLAIN[path], **fields, "stream": True}
    lines = HTTP.post(f"{live.url}{path}", json=body).text.split("\n\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def text_of(answer: Any) -> str:
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@BOTH
def test_null_asks_for_nothing(live: Live, path: str) -> None:
    """Clients send null for unset fields, also for those of other servers."""
    plain = text_of(ask(live, path))
    for name in ("kv_transfer_params", "suffix", "logits_processors", "anything_at_all"):
        assert text_of(ask(live, path, **{name: None})) == plain
    assert text_of(ask(live, path, kv_transfer_params={}, store=False)) == plain


def test_null_within_messages_asks_for_nothing(live: Live) -> None:
    answer = {"role": "assistant", "content": "x", "refusal": None, "annotations": None}
    messages = [*PLAIN[CHAT]["messages"], answer, *PLAIN[CHAT]["messages"]]
    assert ask(live, CHAT, messages=messages)["choices"]


@BOTH
def test_labels_change_nothing(live: Live, path: str) -> None:
    labels = {
        **{"user": "a", "metadata": {"a": "b"}, "session_id": "s", "prompt_cache_key": "k"},
        **{"length_penalty": 1.5, "mm_payload": "none", "service_tier": "auto", "store": False},
    }
    assert text_of(ask(live, path, **labels)) == text_of(ask(live, path))


@BOTH
def test_the_request_names_its_answer(live: Live, path: str) -> None:
    prefix = "cmpl" if path == TEXT else "chatcmpl"
    assert ask(live, path, request_id="mine-1")["id"] == f"{prefix}-mine-1"
    assert {it["id"] for it in chunks(live, path, request_id="mine-2")} == {f"{prefix}-mine-2"}


@BOTH
@pytest.mark.parametrize("n", [1, 2])
def test_token_ids_are_returned(live: Live, path: str, n: int) -> None:
    fields = {"return_token_ids": True, "return_weight_versions": True, "n": n}
    whole, pieces = ask(live, path, **fields), chunks(live, path, **fields)
    holder = whole["choices"][0] if path == TEXT else whole
    first = pieces[0]["choices"][0] if path == TEXT else pieces[0]
    assert holder["prompt_token_ids"] == first["prompt_token_ids"]
    assert len(holder["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    for choice in whole["choices"]:
        ids = choice["token_ids"]
        text = live.model.tokenizer.decode(ids, skip_special_tokens=True)
        assert text == text_of({"choices": [choice]})
        own = [it for chunk in pieces for it in chunk["choices"] if it["index"] == choice["index"]]
        assert [token for it in own for token in it["token_ids"]] == ids
        span = [{"version": "default", "start": 0, "end": len(ids)}]
        assert choice["weight_versions"] == own[-1]["weight_versions"] == span
        assert not any("prompt_token_ids" in it for it in own[1:])


def test_logprobs_may_name_tokens_by_their_ids(live: Live) -> None:
    fields = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = ask(live, TEXT, logprobs=2, **fields)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{it}" for it in choice["token_ids"]]
    assert all("token_id:" in name for row in choice["logprobs"]["top_logprobs"] for name in row)
    choice = ask(live, CHAT, logprobs=True, **fields)["choices"][0]
    named = [it["token"] for it in choice["logprobs"]["content"]]
    assert named == [f"token_id:{it}" for it in choice["token_ids"]]


def test_the_text_of_the_prompt_is_returned(live: Live) -> None:
    text = ask(live, CHAT, return_prompt_text=True)["prompt_text"]
    assert "Write add(a, b)." in text
    first, *rest = chunks(live, CHAT, return_prompt_text=True)
    assert first["prompt_text"] == text
    assert not any("prompt_text" in it for it in rest)


@BOTH
def test_prompts_are_cut(live: Live, path: str) -> None:
    fields = {"return_token_ids": True}

    def prompt(**more: Any) -> list[int]:
        answer = ask(live, path, **fields, **more)
        holder: Any = answer["choices"][0] if path == TEXT else answer
        return list(holder["prompt_token_ids"])

    whole = prompt()
    assert prompt(truncate_prompt_tokens=3) == whole[-3:]
    assert prompt(truncate_prompt_tokens=3, truncation_side="right") == whole[:3]
    assert prompt(truncate_prompt_tokens=len(whole)) == whole
    assert prompt(truncate_prompt_tokens=-1) == whole


def test_a_prompt_may_be_cut_to_what_fits(live: Live) -> None:
    long = "a b " * 100_000
    answer = ask(live, TEXT, prompt=["first", long], truncate_prompt_tokens=-1, echo=True)
    assert answer["usage"]["total_tokens"] > 2048
    assert answer["choices"][1]["text"].startswith(" b")
    assert len(answer["choices"][1]["text"]) < len(long)


def test_biases_name_tokens_by_their_texts_too(live: Live) -> None:
    [token] = live.model.tokenizer.encode("return", add_special_tokens=False)
    by_text = ask(live, TEXT, logit_bias={"return": 100})
    assert by_text["choices"] == ask(live, TEXT, logit_bias={str(token): 100})["choices"]
    assert text_of(by_text) != text_of(ask(live, TEXT))


def test_a_json_object_may_have_a_schema(live: Live) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [7]}}}
    schema.update(required=["a"], additionalProperties=False)
    wanted = {"type": "json_object", "schema": schema}
    answer = ask(live, CHAT, response_format=wanted, max_tokens=40)
    assert json.loads(text_of(answer)) == {"a": 7}


@BOTH
def test_the_prefix_cache_is_kept_apart_by_salts(live: Live, path: str) -> None:
    def cached(salt: str | None) -> int:
        fields: dict[str, Any] = {"cache_salt": salt}
        if path == TEXT:
            fields["prompt"] = "x = 1\n" * 40
        else:
            fields["messages"] = [{"role": "user", "content": "y = 2\n" * 40}]
        return int(ask(live, path, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("mine") == 0
    assert cached("mine") > 0
    assert cached("yours") == 0
    assert cached(None) == 0


@BOTH
def test_priorities_need_their_policy(live: Live, path: str) -> None:
    assert text_of(ask(live, path, priority=0)) == text_of(ask(live, path))
    answer = HTTP.post(f"{live.url}{path}", json={**PLAIN[path], "priority": -5})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "priority")
    assert "--scheduling-policy priority" in error["message"]


@BOTH
def test_repetition_ends_the_output(live: Live, path: str) -> None:
    [token] = live.model.tokenizer.encode(" a", add_special_tokens=False)
    fields = {"logit_bias": {str(token): 100}, "max_tokens": 40, "return_token_ids": True}
    whole = ask(live, path, **fields, ignore_eos=True)["choices"][0]
    assert (whole["token_ids"], whole["finish_reason"]) == ([token] * 40, "length")
    fields["repetition_detection"] = {"max_pattern_size": 3, "min_count": 5}
    for n in (1, 2):
        for choice in ask(live, path, **fields, n=n)["choices"]:
            assert choice["token_ids"] == [token] * 5
            assert (choice["finish_reason"], choice["stop_reason"]) == (
                "stop",
                "repetition_detected",
            )
    fields["repetition_detection"] = {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 5}
    assert ask(live, path, **fields)["choices"][0]["token_ids"] == [token] * 10
    assert ask(live, path, **fields, min_tokens=20)["choices"][0]["token_ids"] == [token] * 20
    assert ask(live, path, max_tokens=12, repetition_detection={"max_pattern_size": 0})["choices"]


def test_logprobs_of_named_tokens(live: Live) -> None:
    whole = ask(live, TEXT, logprobs=5, return_token_ids=True, return_tokens_as_token_ids=True)
    plain = whole["choices"][0]["logprobs"]["top_logprobs"]
    named = [*[int(name[9:]) for name in plain[0]][:3], 40]
    fields = {"logprob_token_ids": named, "return_tokens_as_token_ids": True}
    choice = ask(live, TEXT, logprobs=0, **fields, return_token_ids=True)["choices"][0]
    rows = choice["logprobs"]["top_logprobs"]
    assert choice["token_ids"] == whole["choices"][0]["token_ids"]
    for token, row, before in zip(choice["token_ids"], rows, plain, strict=True):
        assert set(row) == {f"token_id:{it}" for it in (token, *named)}
        for name in row.keys() & before.keys():
            assert row[name] == pytest.approx(before[name], abs=1e-5)
    content = ask(live, CHAT, logprobs=True, **fields)["choices"][0]["logprobs"]["content"]
    assert all(len(it["top_logprobs"]) in (4, 5) for it in content)


@BOTH
def test_chunks_wait_for_tokens(live: Live, path: str) -> None:
    fields = {"return_token_ids": True, "max_tokens": 24, "ignore_eos": True}
    pieces = [it["choices"][0]["token_ids"] for it in chunks(live, path, **fields)]
    fields["stream_interval"] = 20
    fewer = [it["choices"][0]["token_ids"] for it in chunks(live, path, **fields)]
    assert [token for piece in fewer for token in piece] == [it for one in pieces for it in one]
    assert sum(map(bool, fewer)) <= 3 < sum(map(bool, pieces))


@pytest.mark.parametrize("n", [1, 2])
def test_a_chat_may_begin_with_the_last_answer(live: Live, n: int) -> None:
    begun = [*PLAIN[CHAT]["messages"], {"role": "assistant", "content": "def add("}]
    fields = {"messages": begun, "continue_final_message": True, "n": n}
    plain, whole = ask(live, CHAT, **fields), ask(live, CHAT, **fields, echo=True)
    pieces = chunks(live, CHAT, **fields, echo=True)
    for place in range(n):
        content = plain["choices"][place]["message"]["content"]
        assert whole["choices"][place]["message"]["content"] == "def add(" + content
        own = [it for chunk in pieces for it in chunk["choices"] if it["index"] == place]
        assert "".join(it["delta"].get("content", "") for it in own) == "def add(" + content
    assert text_of(ask(live, CHAT, echo=True)) == text_of(ask(live, CHAT))


@pytest.mark.parametrize(("path", "default"), [(TEXT, True), (CHAT, False)])
def test_special_tokens_around_a_prompt_are_a_choice(
    live: Live, path: str, default: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo's tokenizer adds none, so the test looks at what it is asked for."""
    tokenizer, asked = live.model.tokenizer, list[bool]()

    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        asked.append(add_special_tokens)
        return [5, 6, 7]

    monkeypatch.setattr(tokenizer, "encode", encode)
    ask(live, path)
    ask(live, path, add_special_tokens=True)
    ask(live, path, add_special_tokens=False)
    assert asked == [default, True, False]


@pytest.mark.parametrize("stream", [False, True])
def test_names_that_the_template_does_not_read_are_told_in_a_header(
    live: Live, stream: bool
) -> None:
    """Clients name the speakers of any model."""
    plain = {**PLAIN[CHAT], "stream": stream}
    named = {**plain, "messages": [{**PLAIN[CHAT]["messages"][0], "name": "bob"}]}
    for path in (CHAT, "/tokenize"):
        body = {"messages": named["messages"]} if path == "/tokenize" else named
        answer = HTTP.post(f"{live.url}{path}", json=body)
        assert answer.status_code == 200
        assert answer.headers["x-ignored-fields"] == "messages[0].name"
    assert "x-ignored-fields" not in HTTP.post(f"{live.url}{CHAT}", json=plain).headers
    many = [*named["messages"]] * 40
    answer = HTTP.post(f"{live.url}{CHAT}", json={**plain, "messages": many})
    assert answer.headers["x-ignored-fields"].endswith("messages[15].name, and 24 more")
