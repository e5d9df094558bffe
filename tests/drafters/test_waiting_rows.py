"""Rows of heads that wait while nothing is drafted."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.core.batch import DraftPlan, StepReport
from slipstream.engine.draft_policy import Candidate
from slipstream.engine.prompts import EncodedPrompt
from slipstream.speculative.heads.feature_rows import FeatureRowsDrafter
from tests.drafters.recording import Drafted, record_drafts

K, IDLE = 3, 17
PROMPTS = [[5, 9, 14], [33, 5, 9, 2, 7], [8, 1, 60, 61]]


@dataclass(frozen=True)
class Late:
    """A policy that drafts nothing until a request has gained some tokens."""

    widths = (0, K)
    reads_confidences = False

    def plan(self, candidates: Sequence[Candidate]) -> Sequence[DraftPlan]:
        return [
            DraftPlan(min(it.most, K) if it.request.num_output_tokens >= IDLE else 0)
            for it in candidates
        ]

    def observe(self, report: StepReport) -> None:
        """The policy learns nothing."""


def run(llm: LLM, prompts: Sequence[list[int]]) -> None:
    """Run requests, each of which arrives two steps after the one before."""
    params = SamplingParams(temperature=0, max_tokens=IDLE + 8, ignore_eos=True)
    engine = llm.engine
    for number, prompt in enumerate(prompts):
        engine.add(f"{number}", EncodedPrompt(None, prompt, ()), params)
        engine.step()
        engine.step()
    while engine.has_unfinished:
        engine.step()


@pytest.mark.parametrize("kind", ["eagle3", "p-eagle"])
def test_one_pass_computes_the_rows_of_several_requests(
    kind: str, tiny_target: str, tiny_heads: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted, passes = record_drafts(monkeypatch), list[int]()
    flush = FeatureRowsDrafter._flush

    def counted(self: FeatureRowsDrafter, slots: torch.Tensor, adapted: bool) -> None:
        passes.append(len(slots))
        flush(self, slots, adapted)

    monkeypatch.setattr(FeatureRowsDrafter, "_flush", counted)
    llm = LLM(
        tiny_target,
        speculative_config={"model": tiny_heads[kind], "num_speculative_tokens": K},
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        num_kv_blocks=48,
        max_num_seqs=4,
    )
    llm.engine.scheduler.policy = Late()
    alone: list[Drafted] = []
    for prompt in PROMPTS:
        run(llm, [prompt])
    alone, num_alone = [*drafted], len(passes)
    drafted.clear()
    passes.clear()
    run(llm, PROMPTS)
    assert len(passes) < 0.7 * num_alone
    assert max(passes) > 1
    expected = {tuple(it.known): it for it in alone}
    assert {tuple(it.known) for it in drafted} == set(expected)
    for it in drafted:
        assert it.tokens == expected[tuple(it.known)].tokens
        for ours, theirs in zip(it.logits, expected[tuple(it.known)].logits, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
