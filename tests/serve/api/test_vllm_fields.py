"""Every field of vLLM's requests: it has its effect here, or is refused by its name.

The list is kept in vllm_request_fields.json. A field counts as honoured where what it asks for
happens, which is asked of each of them below.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.serve.api.live import Live
from tests.serve.api.test_request_fields import CHAT, HTTP, PLAIN, TEXT, text_of

SERVE = Path(__file__).parents[1]
LISTED = json.loads((SERVE / "vllm_request_fields.json").read_text())
FIELDS = [(path, name) for path in (TEXT, CHAT) for name in LISTED[path]]

# Values with an effect; null, an empty object and false have none.
REFUSED: Mapping[str, Any] = {
    "ec_transfer_params": {"a": 1},
    "kv_transfer_params": {"a": 1},
    "media_io_kwargs": {"image": {"a": 1}},
    "prompt_embeds": "AAAA",
    TEXT + " thinking_token_budget": 5,
    "use_beam_search": True,
    "vllm_xargs": {"a": 1},
}


REFUSALS = {
    (path, name): REFUSED.get(f"{path} {name}", REFUSED.get(name))
    for path, name in FIELDS
    if name in REFUSED or f"{path} {name}" in REFUSED
}


@dataclass(frozen=True)
class Facts:
    """The settings on which the values of some fields depend."""

    path: str
    text: str  # of the plain answer
    end: str  # the id of the end token
    word: str  # of the token that ONE_TOKEN asks for


@dataclass(frozen=True)
class Changes:
    """The field makes the answer another than the same request without it gives."""

    value: Any
    base: Any = field(default_factory=dict)


@dataclass(frozen=True)
class Same:
    """The value is what is done anyway, or concerns what neither server does here."""

    value: Any


@dataclass(frozen=True)
class ShownIn:
    """Files whose tests show the effect."""

    file: str


NO_REPEATS = {"max_tokens": 60, "ignore_eos": True}
HOT = {"temperature": 2.0, "seed": 1}
ONE_TOKEN = {"logit_bias": {"5": 100}, "ignore_eos": True, "max_tokens": 20}
ENDS = {
    **PLAIN[CHAT],
    "messages": [*PLAIN[CHAT]["messages"], {"role": "assistant", "content": "a"}],
}


def logprobs(facts: Facts) -> dict[str, Any]:
    return {"logprobs": True if facts.path == CHAT else 1}


def stop(facts: Facts) -> dict[str, Any]:
    return {"stop": facts.text[2:5]}


def end(facts: Facts) -> dict[str, Any]:
    return {"logit_bias": {facts.end: 100}}


def last_answer(facts: Facts) -> dict[str, Any]:
    return {"messages": ENDS["messages"]} if facts.path == CHAT else {}


EFFECTS: Mapping[str, Changes | Same | ShownIn] = {
    "add_generation_prompt": Changes(False),
    "add_special_tokens": ShownIn("api/test_request_fields.py"),
    "allowed_token_ids": Changes([5, 6]),
    "bad_words": Changes(lambda facts: [facts.word], ONE_TOKEN),
    "cache_salt": ShownIn("api/test_request_fields.py"),
    "chat_template": ShownIn("api/test_request_templates.py"),
    "chat_template_kwargs": ShownIn("api/test_thinking.py"),
    "continue_final_message": Changes(True, last_answer),
    "documents": ShownIn("api/test_request_templates.py"),
    "echo": Changes(True, last_answer),
    "frequency_penalty": Changes(2.0, NO_REPEATS),
    "ignore_eos": Changes(True, end),
    "include_reasoning": ShownIn("api/test_thinking.py"),
    "include_stop_str_in_output": Changes(True, stop),
    "length_penalty": Same(1.5),
    "logit_bias": Changes({"5": 100}),
    "logprob_token_ids": Changes([5], logprobs),
    "logprobs": Changes(lambda facts: logprobs(facts)["logprobs"]),
    "max_completion_tokens": Changes(3, {"max_tokens": None}),
    "max_tokens": Changes(3),
    "messages": Changes([{"role": "user", "content": "Write sub(a, b)."}]),
    "min_p": Changes(1.0, HOT),
    "min_tokens": Changes(8, stop),
    "mm_payload": Same("none"),
    "mm_processor_kwargs": ShownIn("api/test_images.py"),
    "model": ShownIn("api/test_completions.py"),
    "n": Changes(2),
    "parallel_tool_calls": ShownIn("api/test_tools.py"),
    "presence_penalty": Changes(2.0, NO_REPEATS),
    "priority": ShownIn("../lossless/test_priority.py"),
    "prompt": Changes("def sub(a, b):\n"),
    "prompt_logprobs": Changes(1),
    "reasoning_effort": ShownIn("api/test_thinking.py"),
    "repetition_detection": Changes({"max_pattern_size": 2, "min_count": 4}, ONE_TOKEN),
    "repetition_penalty": Changes(2.0, NO_REPEATS),
    "request_id": ShownIn("api/test_request_fields.py"),
    "response_format": Changes({"type": "json_object"}),
    "return_mm_kwargs": Same(False),
    "return_prompt_text": Changes(True),
    "return_token_ids": Changes(True),
    "return_token_offsets": Same(True),
    "return_tokens_as_token_ids": Changes(True, logprobs),
    "return_weight_versions": Changes(True),
    "routed_experts_prompt_start": Same(1),
    "seed": Changes(2, HOT),
    "session_id": Same("one"),
    "skip_special_tokens": Changes(
        False, lambda facts: {**end(facts), "ignore_eos": True, "max_tokens": 2}
    ),
    "spaces_between_special_tokens": Same(True),
    "stop": Changes(lambda facts: facts.text[2:5]),
    "stop_token_ids": Changes([5], ONE_TOKEN),
    "stream": Changes(True),
    "stream_interval": Changes(20, {"stream": True, "max_tokens": 24, "ignore_eos": True}),
    "stream_options": Changes({"include_usage": True}, {"stream": True}),
    "structured_outputs": Changes({"regex": "[0-9]{3}"}),
    "suffix": ShownIn("test_fill_in.py"),
    "temperature": Changes(2.0, {"seed": 1}),
    "thinking_token_budget": ShownIn("api/test_thinking.py"),
    "tool_choice": ShownIn("api/test_tools.py"),
    "tools": ShownIn("api/test_tools.py"),
    "top_k": Changes(1, HOT),
    "top_logprobs": Changes(2, logprobs),
    "top_p": Changes(0.01, HOT),
    "truncate_prompt_tokens": Changes(2),
    "truncation_side": Changes("right", {"truncate_prompt_tokens": 2, "return_token_ids": True}),
    "user": Same("me"),
    "watermarking": Same(False),
}


def test_nine_of_ten_fields_are_honoured() -> None:
    assert {name for _, name in FIELDS} == {*EFFECTS, *(it.split()[-1] for it in REFUSED)}
    assert len(FIELDS) - len(REFUSALS) >= 0.9 * len(FIELDS)


@pytest.fixture(scope="module")
def said(live: Live) -> Callable[..., str]:
    """The body of an answer, without what no two answers share."""

    @cache
    def asked(path: str, body: str) -> str:
        answer = HTTP.post(f"{live.url}{path}", content=body, headers=JSON)
        assert answer.status_code == 200, answer.text
        return re.sub(r'"(id|created|cached_tokens)":("[^"]*"|\d+)', '"":""', answer.text)

    return lambda path, **fields: asked(path, json.dumps({**PLAIN[path], **fields}))


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(("path", "name"), [it for it in FIELDS if it not in REFUSALS])
def test_a_field_has_its_effect(live: Live, said: Callable[..., str], path: str, name: str) -> None:
    effect = EFFECTS[name]
    if isinstance(effect, ShownIn):
        assert name in (SERVE / effect.file).read_text()
        return
    tokenizer = live.model.tokenizer
    text = text_of(json.loads(said(path)))
    facts = Facts(path, text, str(tokenizer.eos_token_id), tokenizer.decode([5]))

    def known(it: Any) -> Any:
        return it(facts) if callable(it) else it

    base = known(effect.base) if isinstance(effect, Changes) else {}
    without, with_it = said(path, **base), said(path, **{**base, name: known(effect.value)})
    assert (with_it != without) == isinstance(effect, Changes)


@pytest.mark.parametrize(("path", "name"), REFUSALS)
def test_a_field_is_refused_by_its_name(live: Live, path: str, name: str) -> None:
    answer = HTTP.post(f"{live.url}{path}", json={**PLAIN[path], name: REFUSALS[path, name]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, name)
    assert error["message"].startswith(f"{name} is not supported: ")
    nothing = {**PLAIN[path], name: None}
    assert HTTP.post(f"{live.url}{path}", json=nothing).status_code == 200


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_marks_in_a_text_are_refused_by_name(live: Live, path: str) -> None:
    answer = HTTP.post(f"{live.url}{path}", json={**PLAIN[path], "watermarking": True})
    assert answer.json()["error"]["message"].startswith("watermarking is not supported: ")
