"""Engines with P-EAGLE heads, and their drafts held against the oracle's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import LLM, RequestOutput, SamplingParams
from tests.drafters.heads import MASK
from tests.drafters.oracles import PEagle, Target
from tests.drafters.recording import assert_drafts_are, record_drafts

PROMPT = torch.randint(1, 96, (37,), generator=torch.Generator().manual_seed(3)).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, repetition_penalty=1.3)
SEEDED = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, seed=5)
K = 4
AUX = "eagle_aux_hidden_state_layer_ids"


def forced(count: int) -> dict[str, Any]:
    """Drafts are accepted to all lengths, by lot."""
    rates = [1 - (place + 1) / (count + 1) for place in range(count)]
    return {
        "num_speculative_tokens": count,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates,
    }


def make(target: str, head: Path | str | None, **options: Any) -> LLM:
    speculative = None
    if head is not None:
        speculative = {"model": str(head), "num_speculative_tokens": K}
        speculative |= options.pop("speculative", {})
    options = {"num_kv_blocks": 64, "skip_tokenizer_init": True, **options}
    return LLM(target, speculative_config=speculative, **options)


def run(llm: LLM, params: SamplingParams, prompt: list[int] | None = None) -> RequestOutput:
    return llm.generate({"prompt_token_ids": prompt or PROMPT}, params)[0]


def oracle(folder: Path, target: str, mask: int = MASK, **flags: Any) -> PEagle:
    return PEagle(folder, Target(target), mask, **flags)


def check(
    target: str, folder: Path, head: PEagle, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """32 steps and more, whatever was accepted."""
    drafted = record_drafts(monkeypatch)
    speculative = {**forced(options.pop("count", K)), **options.pop("speculative", {})}
    llm = make(target, folder, speculative=speculative, **options)
    assert llm.engine.resolved.method == "p-eagle"
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    output = run(llm, params)
    assert len(drafted) >= 32
    assert all(count > 0 for count in output.metrics.num_accepted_tokens_per_pos)
    assert output.metrics.num_accepted_tokens < output.metrics.num_draft_tokens
    assert_drafts_are(drafted[:32], head)
