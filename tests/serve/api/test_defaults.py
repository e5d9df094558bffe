"""A server with defaults of requests, and with logits in place of log probabilities."""

from collections.abc import Iterator
from dataclasses import replace

import openai
import pytest

from slipstream import LLM, SamplingParams
from tests.serve.api.live import DEMO, serving

PROMPT = "def main("


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    config = replace(
        DEMO,
        override_generation_config={"temperature": 0, "max_new_tokens": 5},
        logprobs_mode="raw_logits",
        speculative_config=None,
    )
    with (
        serving(config) as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_requests_get_them_and_the_limit(client: openai.OpenAI, offline: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5)
    expected = offline.generate(PROMPT, params)[0].outputs[0].text
    own = client.completions.create(model="demo", prompt=PROMPT, max_tokens=50)
    assert (own.choices[0].text, own.choices[0].finish_reason) == (expected, "length")
    short = client.completions.create(model="demo", prompt=PROMPT, max_tokens=2)
    assert short.usage is not None
    assert short.usage.completion_tokens == 2
    hello = [{"role": "user", "content": "write hello"}]
    chat = client.chat.completions.create(model="demo", messages=hello)
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 5
    expected = offline.chat(hello, params)[0].outputs[0].text
    assert chat.choices[0].message.content == expected


def test_logprobs_are_logits(client: openai.OpenAI, offline: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=3)
    rows = offline.generate(PROMPT, params)[0].outputs[0].logprobs
    own = client.completions.create(model="demo", prompt=PROMPT, max_tokens=2, logprobs=3)
    assert rows is not None
    assert own.choices[0].logprobs is not None
    assert own.choices[0].logprobs.top_logprobs is not None
    for theirs, logits in zip(rows, own.choices[0].logprobs.top_logprobs, strict=True):
        probabilities = sorted((it.logprob for it in theirs.values()), reverse=True)
        raw = sorted(logits.values(), reverse=True)
        # They differ by one number a row, the logarithm of the sum.
        assert raw[0] > 0 > probabilities[0]
        gaps = [one - other for one, other in zip(raw, probabilities, strict=True)]
        assert gaps == pytest.approx([gaps[0]] * 3, abs=1e-4)
