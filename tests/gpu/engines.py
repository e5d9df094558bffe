"""Small engines on the GPU, in float32: what replayed steps are compared with, and on what."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from slipstream import LLM, SamplingParams
from slipstream.engine.prompts import EncodedPrompt

VOCAB_SIZE = 96
BLOCK_SIZE = 16
MOST_REQUESTS = 8
SIZES: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "max_num_seqs": MOST_REQUESTS,
    "max_model_len": 256,
    "block_size": BLOCK_SIZE,
    "num_kv_blocks": 200,
    "dtype": "float32",
}

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, max_tokens=32, ignore_eos=True)
# Requests that need the full variant of a step, in one batch.
EVERYTHING = (
    replace(SEEDED, top_k=7),
    replace(SEEDED, top_p=0.8, presence_penalty=0.4, repetition_penalty=1.2),
    replace(SEEDED, min_p=0.05, temperature=0.7),
    replace(GREEDY, frequency_penalty=0.3, repetition_penalty=1.1),
    replace(SEEDED, logit_bias={3: 4.0, 9: -50.0}),
    GREEDY,
    replace(SEEDED, allowed_token_ids=list(range(40)), top_k=20, top_p=0.95),
    replace(SEEDED, min_tokens=20, stop_token_ids=[5, 17, 40, 41, 42]),
)


class Engines:
    """Builds each engine once: capturing takes its time.

    Args:
        target, draft: checkpoints.
        heads: checkpoints of drafting heads, by their method.
    """

    def __init__(self, target: str, draft: str, heads: dict[str, str]) -> None:
        self._target, self._draft, self._heads = target, draft, heads
        self._made: dict[tuple[Any, ...], LLM] = {}

    def get(self, drafter: str, k: int = 0, **options: Any) -> LLM:
        """An engine with that drafter; "plain" has none."""
        key = (drafter, k, *sorted(options.items()))
        if key not in self._made:
            speculation = self._speculation(drafter, k)
            options = {**SIZES, **options}
            self._made[key] = LLM(self._target, speculative_config=speculation, **options)
        return self._made[key]

    def _speculation(self, drafter: str, k: int) -> dict[str, Any] | None:
        if drafter == "plain":
            return None
        chosen: dict[str, dict[str, Any]] = {
            "draft_model": {"model": self._draft},
            "self": {"model": self._target},
            "windowed": {"model": self._draft, "draft_window": 20},
            "windowed_head": {"model": self._heads["eagle3"], "draft_window": 20},
            "subset": {"model": self._draft, "draft_vocab_size": 60},
            "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
            "combination": {
                "drafters": [{"method": "ngram", "min_match": 2}, {"model": self._draft}]
            },
            "host_combination": {
                "drafters": [
                    {
                        "method": "suffix",
                        "min_match": 2,
                        "suffix_decoding_max_cached_requests": 0,  # a seed's text is then its own
                    },
                    {"model": self._heads["eagle3"]},
                ]
            },
            "perfect": {"method": "fake", "model": "perfect"},
            "wrong": {"method": "fake", "model": "wrong"},
            **{method: {"model": head} for method, head in self._heads.items()},
            "eagle_tree": {
                "model": self._heads["eagle"],
                "speculative_token_tree": "[(0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 0)]",
            },
            "eagle3_tree": {
                "model": self._heads["eagle3"],
                "speculative_eagle_topk": 4,
                "speculative_num_steps": 3,
            },
        }[drafter]
        return {**chosen, "num_speculative_tokens": k}


def make_prompts(number: int) -> list[list[int]]:
    """Mixed lengths; each has a stretch that comes twice, so that n-grams are found."""
    generator = torch.Generator().manual_seed(7)
    lengths = (23, 30, 9, 41, 17, 12, 35, 28, 20, 33, 14, 26)[:number]
    drawn = [torch.randint(1, VOCAB_SIZE, (size,), generator=generator) for size in lengths]
    return [[*ids[:8].tolist(), *ids.tolist()] for ids in drawn]


def own_seeds(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[Any]:
    """Parameters for this number of requests, with a seed for each."""
    listed = [params] * count if isinstance(params, SamplingParams) else list(params)[:count]
    return [replace(own, seed=100 + index) for index, own in enumerate(listed)]


def tokens(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[list[int]]:
    """The output tokens of each prompt."""
    return [list(output.outputs[0].token_ids) for output in outputs(llm, prompts, params)]


def outputs(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[Any]:
    """The outputs of `generate` for prompts of token ids."""
    return llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params)


def submit(llm: LLM, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
    """Queue a request without running anything."""
    llm.engine.add(request_id, EncodedPrompt(None, list(prompt), ()), params)


def turn(llm: LLM) -> Iterator[tuple[str, list[int]]]:
    """One step; the requests that ended in it, with their output tokens."""
    for submission in llm.engine.step():
        if submission.finished:
            yield submission.request_id, list(submission.output().outputs[0].token_ids)


def runs_ahead(llm: LLM) -> bool:
    """Whether a step is in flight."""
    return any(request.steps_in_flight for request in llm.engine.scheduler.running)
