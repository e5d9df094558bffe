"""MTP modules of targets with recurrent states, against transformers' layers."""

from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM
from tests.drafters.engines import GREEDY, K, forced, run
from tests.drafters.recording import assert_drafts_are, record_drafts
from tests.hybrid_checkpoints import FAMILIES, HybridMtp, add_module, write_hybrid
from tests.padded_steps import use_padded_steps


@pytest.mark.parametrize(
    ("kind", "padded"),
    [
        pytest.param(kind, padded, marks=() if (index + padded) % 2 else pytest.mark.full)
        for index, kind in enumerate(FAMILIES)
        for padded in (False, True)
    ],
)
def test_a_target_drafts_for_itself(
    kind: str, padded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module has gated attention, and norms that are stored as their difference from 1."""
    target = write_hybrid(tmp_path, kind)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 64}
    expected = run(LLM(target, **options), GREEDY)
    oracle = HybridMtp(add_module(target, kind))
    if padded:
        use_padded_steps(monkeypatch)
    speculative = {"method": "mtp", "num_speculative_tokens": K}
    drafted = record_drafts(monkeypatch)
    run(LLM(target, speculative_config={**speculative, **forced()}, **options), GREEDY)
    assert len(drafted) > 5
    assert_drafts_are(drafted, oracle)
    output = run(LLM(target, speculative_config=speculative, **options), GREEDY)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.metrics.num_accepted_tokens > 0
