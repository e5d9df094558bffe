"""Completions with the openai package: several texts, log probabilities, scoring of a prompt."""

import os

from openai import OpenAI

URL = os.environ.get("SLIPSTREAM_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("SLIPSTREAM_MODEL", "demo")

client = OpenAI(base_url=f"{URL}/v1", api_key="none")

prompts = ["def add(a, b):", "def reverse(items):"]
answer = client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=24)
for choice in answer.choices:
    print(prompts[choice.index] + choice.text, "\n---")

sampled = client.completions.create(
    model=MODEL, prompt=prompts[0], temperature=0.8, seed=7, n=2, max_tokens=12, logprobs=2
)
for choice in sampled.choices:
    print(repr(choice.text), choice.logprobs.token_logprobs)

scored = client.completions.create(
    model=MODEL, prompt="def add(a, b): return a + b", echo=True, logprobs=0, max_tokens=0
)
marks = scored.choices[0].logprobs
print(list(zip(marks.tokens, marks.token_logprobs, strict=True)))
