"""Greedy output of mixtures of experts with speculation is the plain output, in bf16 by the bit.

A row that chose other experts, or added them up in another order, for the rows beside it would show
in the text.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from slipstream import SamplingParams
from slipstream.speculative.catalogue import METHODS
from tests import fake_drafters
from tests.lossless.test_greedy import (
    MAX_TOKENS,
    make_llm,
    make_prompts,
    plain_tokens,
    remember,
    tokens,
)
from tests.mixture_checkpoints import FAMILIES, write_mixture
from tests.padded_steps import use_steps
from tests.pairwise import Case

AXES: dict[str, list[Any]] = {
    "target": list(FAMILIES),
    "drafter": ["right", "half-right", "wrong", "ngram"],
    "k": [1, 3, 7],
    "batch": [1, 8],
    "rows": [512, 24],  # 24: prompts come in chunks, mixed with decoding
    "blocks": [400, 16],  # 16 blocks of 8 tokens: requests are preempted
    "prefix": [False, True],  # the same prompts were run before
    "dtype": ["float32"] if torch.cuda.is_available() else ["float32", "bfloat16"],
    "steps": ["exact", "padded"],
}
SEED = 4  # of weights whose texts move on
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, str]]:
    """A target for each model_type, and its first two layers as a draft model."""
    root = tmp_path_factory.mktemp("families")

    @cache
    def made(kind: str) -> tuple[str, str]:
        draft = write_mixture(root / kind / "draft", kind, keep_layers=2, seed=SEED)
        return str(write_mixture(root / kind / "target", kind, seed=SEED)), str(draft)

    return made


@pytest.mark.matrix(AXES)
def test_greedy_output_is_the_plain_output(
    case: Case, models: Callable[[str], tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "fake", fake_drafters.METHOD)
    target, draft = models(case["target"])
    prompts = make_prompts(case["batch"])
    expected = plain_tokens(target, case["batch"], GREEDY, case.get("dtype", "auto"))
    remember(prompts, expected)
    assert min(len(set(text)) for text in expected) >= 3  # no text stands still

    drafters: dict[str, dict[str, Any]] = {
        "right": {"method": "fake", "model": "perfect"},
        "half-right": {"model": draft},
        "wrong": {"method": "fake", "model": "wrong"},
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    }
    use_steps(case["steps"], monkeypatch)
    llm = make_llm(target, {**drafters[case["drafter"]], "num_speculative_tokens": case["k"]}, case)
    if case["prefix"]:
        llm.generate(prompts, GREEDY)
    outputs = llm.generate(prompts, GREEDY)
    assert tokens(outputs) == expected
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    drafted = sum(output.metrics.num_drafts for output in outputs)
    assert drafted > 0
    if case["drafter"] == "half-right":
        assert 0 < accepted < drafted * case["k"]
    if case["blocks"] == 16 and case["batch"] == 8:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
