"""Engines for the tests of drafters: one prompt, greedy or seeded, and a drafter beside it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, RequestOutput, SamplingParams
from tests.drafters.recording import assert_drafts_are, record_drafts

PROMPT = torch.randint(1, 96, (37,), generator=torch.Generator().manual_seed(3)).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, repetition_penalty=1.3)
SEEDED = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, seed=5)
K = 4


def forced(count: int = K) -> dict[str, Any]:
    """Drafts are accepted to all lengths, by lot."""
    rates = [1 - (place + 1) / (count + 1) for place in range(count)]
    return {
        "num_speculative_tokens": count,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates,
    }


def make(target: str, drafter: Path | str | dict[str, Any] | None, **options: Any) -> LLM:
    """A drafter is a checkpoint, or the keys of `speculative_config`; None decodes plainly."""
    speculative: dict[str, Any] | None = None
    changes = options.pop("speculative", {})
    if drafter is not None:
        named = drafter if isinstance(drafter, dict) else {"model": str(drafter)}
        speculative = {"num_speculative_tokens": K, **named, **changes}
    options = {"num_kv_blocks": 64, "skip_tokenizer_init": True, **options}
    return LLM(target, speculative_config=speculative, **options)


def run(llm: LLM, params: SamplingParams, prompt: list[int] | None = None) -> RequestOutput:
    return llm.generate({"prompt_token_ids": prompt or PROMPT}, params)[0]


def check_drafts(
    target: str,
    drafter: Path | str | dict[str, Any],
    oracle: Any,
    monkeypatch: pytest.MonkeyPatch,
    **options: Any,
) -> LLM:
    """32 rounds and more are the oracle's, whatever was accepted."""
    drafted = record_drafts(monkeypatch)
    speculative = {**forced(options.pop("count", K)), **options.pop("speculative", {})}
    llm = make(target, drafter, speculative=speculative, **options)
    output = run(llm, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    assert len(drafted) >= 32
    assert all(count > 0 for count in output.metrics.num_accepted_tokens_per_pos)
    assert output.metrics.num_accepted_tokens < output.metrics.num_draft_tokens
    assert_drafts_are(drafted[:32], oracle)
    return llm
