"""Captured steps that read shared blocks once say what steps say that read them apart."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.runner import graphs, prefix_groups

if not torch.cuda.is_available():
    pytest.skip("steps are captured on a GPU only", allow_module_level=True)

COMMON = [5 + index * 7 % 40 for index in range(200)]
SEEDED = SamplingParams(temperature=1, max_tokens=24, ignore_eos=True, seed=1)


@pytest.mark.parametrize("k", [0, 3])
def test_texts_are_equal(
    k: int, tiny_target: str, tiny_draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "WANTED_BEFORE_CAPTURE", 2)
    monkeypatch.setattr(prefix_groups, "PIECE", 64)
    prompts: list[Any] = [
        {"prompt_token_ids": [*COMMON[: 200 if number % 3 else 40], 5 + number]}
        for number in range(9)
    ]
    params = [replace(SEEDED, seed=number, temperature=number % 2) for number in range(9)]

    def run(least_saved: int) -> tuple[list[Sequence[int]], bool]:
        monkeypatch.setattr(prefix_groups, "LEAST_SAVED", least_saved)
        llm = LLM(
            tiny_target,
            speculative_config={"model": tiny_draft, "num_speculative_tokens": k} if k else None,
            skip_tokenizer_init=True,
            max_num_seqs=16,
            max_model_len=256,
            num_kv_blocks=256,
        )
        llm.generate(prompts[1:2], replace(SEEDED, max_tokens=1))
        texts = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        captured = llm.engine._step._graphs
        assert captured is not None
        return texts, any(key.shares for key in captured._graphs)

    together, apart = run(256), run(1 << 40)
    assert together == (apart[0], True)
    assert not apart[1]
