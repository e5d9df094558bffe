"""PARD-2: parallel drafting that is shown the target's features."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, CheckpointError, SamplingParams
from tests.drafters.recording import assert_drafts_are, record_drafts
from tests.padded_steps import use_padded_steps
from tests.pard_checkpoints import Pard2, write_pard2

PROMPT = [5, 9, 14, 33, 5, 9]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def make(target: str, draft: str | None, count: int = 4, **options: Any) -> LLM:
    config: dict[str, Any] = {"model": draft, "num_speculative_tokens": count}
    if draft is not None and options.pop("forced", False):
        rates = [1 - (place + 1) / (count + 1) for place in range(count)]
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    options = {"num_kv_blocks": 64, "skip_tokenizer_init": True, "block_size": 8, **options}
    return LLM(target, speculative_config=config if draft else None, **options)


def generate(llm: LLM, *prompts: list[int]) -> list[Any]:
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY)


@pytest.mark.parametrize("steps", ["exact", "padded"])
@pytest.mark.parametrize(
    ("layers", "bias"), [([-1], False), ([-1, -2, -3], False), ([1, 2, 0], True)]
)
def test_every_draft_is_the_oracles(
    layers: list[int],
    bias: bool,
    steps: str,
    tiny_target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft = write_pard2(tmp_path / "draft", layers, bias)
    if steps == "padded":
        use_padded_steps(monkeypatch)
    drafted = record_drafts(monkeypatch)
    llm = make(tiny_target, draft, forced=True)
    assert llm.engine.resolved.method == "pard"
    outputs = generate(llm, PROMPT, [*range(1, 30)])
    assert len(drafted) >= 32
    assert sum(output.metrics.num_accepted_tokens_per_pos[3] for output in outputs) > 0
    assert_drafts_are(drafted, Pard2(tiny_target, draft))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"pard2_target_layers": [-1, -8]}, "holds -8, but the target has hidden states 0 to 2"),
    ({"pard2_target_dim": 100}, "is 100, but 2 hidden states of this target are 96 numbers"),
    ({"pard2_scale": None}, '"pard2_scale" is missing'),
    ({"pard2_proj_bias": True}, r"tensor target_proj.bias is missing in .*use the drafter of"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=str)
def test_a_drafter_of_another_target_is_refused(
    changes: dict[str, Any], message: str, tiny_target: str, tmp_path: Path
) -> None:
    draft = Path(write_pard2(tmp_path / "draft", [-1, -2]))
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=message):
        make(tiny_target, str(draft))


def test_a_missing_projection_is_named(tiny_target: str, tmp_path: Path) -> None:
    draft = Path(write_pard2(tmp_path / "draft", [-1, -2]))
    (draft / "warp_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"has no warp_model\.bin, which holds"):
        make(tiny_target, str(draft))
