"""Flags of the server that change its answers."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from slipstream import LLM
from slipstream.core.errors import UsageError
from slipstream.serve.conversation import render, require_defaults
from slipstream.serve.limits import ServeLimits
from slipstream.serve.options import AnswerOptions
from slipstream.serve.protocol.chat import ChatRequest
from tests.serve.api.live import Live, serving

ASKED: dict[str, Any] = {"model": "demo", "max_tokens": 24, "temperature": 0.0}
PROMPT = "def main("
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def other() -> Iterator[Live]:
    """A server with all of them at once."""
    answers = AnswerOptions(
        response_role="bot",
        max_logprobs=30,
        return_tokens_as_token_ids=True,
        enable_force_include_usage=True,
    )
    with serving(answers=answers, limits=ServeLimits(stream_interval=10)) as live:
        yield live


@pytest.fixture(scope="module")
def asked(other: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{other.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_stream_waits_for_so_many_tokens_and_ends_with_its_usage(
    asked: openai.OpenAI, client: openai.OpenAI
) -> None:
    chunks = [*asked.completions.create(**ASKED, prompt=PROMPT, stream=True)]
    whole = client.completions.create(**ASKED, prompt=PROMPT)
    assert "".join(it.choices[0].text for it in chunks if it.choices) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    assert 2 <= len(chunks) - 1 <= 4  # 24 tokens: the first step's, twice 10 or more, the rest


def test_tokens_are_named_by_their_ids(asked: openai.OpenAI, offline: LLM) -> None:
    fields = ASKED | {"max_tokens": 3, "logprobs": 2}
    found = asked.completions.create(**fields, prompt=PROMPT).choices[0].logprobs
    assert found is not None
    texts = [
        offline.tokenizer.decode([int(name.removeprefix("token_id:"))])
        for name in found.tokens or ()
    ]
    assert "".join(texts) == asked.completions.create(**fields, prompt=PROMPT).choices[0].text
    assert found.top_logprobs is not None
    assert all(name.startswith("token_id:") for row in found.top_logprobs for name in row)


def test_as_many_alternatives_as_the_server_gives(other: Live, live: Live) -> None:
    def status(server: Live, **fields: object) -> int:
        body = {"prompt": PROMPT, "max_tokens": 1, **fields}
        return httpx.post(f"{server.url}/v1/completions", json=body).status_code

    assert (status(other, logprobs=30), status(other, logprobs=31)) == (200, 400)
    assert (status(live, logprobs=20), status(live, prompt_logprobs=21)) == (200, 400)


@pytest.mark.parametrize("stream", [True, False])
def test_the_role_of_answers(other: Live, stream: bool) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, "stream": stream}
    answer = httpx.post(f"{other.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert '"role":"bot"' in answer.text


TEMPLATE = (
    "{% for it in messages %}{% if it.content is string %}text{% else %}"
    "{% for part in it.content %}{{ part.type }}={{ part.text }}{% endfor %}{% endif %}"
    "{% endfor %}{% if mood %}{{ mood }}{% endif %}"
)


def written(live: Live, answers: AnswerOptions, **fields: object) -> object:
    model = live.model.with_options(chat_template=TEMPLATE, answers=answers)
    require_defaults(model)
    body = ChatRequest.model_validate({"messages": MESSAGES, **fields})
    return render(model, body.messages, body, None, [])


def test_variables_of_the_template_have_defaults(live: Live) -> None:
    answers = AnswerOptions(
        default_chat_template_kwargs={"mood": "!"}, chat_template_content_format="openai"
    )
    assert written(live, answers) == "text=Hi!"
    assert written(live, answers, chat_template_kwargs={"mood": "?"}) == "text=Hi?"
    with pytest.raises(UsageError, match="--default-chat-template-kwargs"):
        written(live, AnswerOptions(default_chat_template_kwargs={"mode": 1}))
