"""lm-eval's local-completions: log likelihoods by the server beside those of `LLM` offline."""

import os

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

from slipstream import LLM, SamplingParams

URL = os.environ.get("SLIPSTREAM_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("SLIPSTREAM_MODEL", "demo")

PAIRS = [
    ("def add(a, b):", " return a + b"),
    ("for i in range(", "10):"),
    ("import numpy as", " np"),
    ("class Node:\n    def", " __init__(self, value):"),
]

served = LocalCompletionsAPI(
    base_url=f"{URL}/v1/completions",
    model=MODEL,
    tokenizer_backend="remote",  # /tokenizer_info and /tokenize of the server
    batch_size=2,
    max_length=2048,
)
requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(PAIRS)]
theirs = served.loglikelihood(requests)

offline = LLM(MODEL)
params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
for pair, (total, greedy) in zip(PAIRS, theirs, strict=True):
    context, tokens = (served.tok_encode(text) for text in (pair[0], "".join(pair)))
    rows = offline.generate([{"prompt_token_ids": tokens}], params)[0].prompt_logprobs
    scored = [*zip(tokens, rows, strict=True)][len(context) :]
    expected = sum(row[token].logprob for token, row in scored)
    print(f"{total:9.4f} served, {expected:9.4f} offline, greedy {greedy}: {pair}")
    assert abs(total - expected) < 1e-3
    assert greedy == all(row[token].rank == 1 for token, row in scored)
