"""PARD-2: parallel drafting that is shown the target's features.

The input of token p is its embedding + scale * target_proj(features of p - 1); masks are shown the
last features that there are, which are those of the token before the bonus token.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import LLM, CheckpointError, SamplingParams
from slipstream.engine.scheduler import Scheduler
from tests.checkpoints import write_qwen3
from tests.drafter_recording import ProposedDraft, Recording, record
from tests.padded_steps import use_padded_steps
from tests.qwen3_oracle import Qwen3Oracle

MASK = 90
WIDTH, TARGET_WIDTH = 32, 48
PROMPT = [5, 9, 14, 33, 5, 9]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SHAPE: dict[str, Any] = {"hidden_size": WIDTH, "num_attention_heads": 4}


def write_pard2(folder: Path, layers: list[int], bias: bool = False, **changes: Any) -> str:
    """A one-layer drafter of another width than its target's, and its projection."""
    config = {
        "pard2": True,
        "spd_type": "pard2",
        "pard_token": MASK,
        "pard2_scale": 0.5,
        "pard2_proj_bias": bias,
        "pard2_target_dim": TARGET_WIDTH * len(layers),
        "pard2_target_layers": layers,
        **changes,
    }
    write_qwen3(folder, seed=7, keep_layers=1, **SHAPE, **config)
    generator = torch.Generator().manual_seed(1)
    size = TARGET_WIDTH * len(layers)
    weights = {"target_proj.weight": torch.randn(WIDTH, size, generator=generator) * 0.3}
    if bias:
        weights["target_proj.bias"] = torch.randn(WIDTH, generator=generator)
    torch.save(weights, folder / "warp_model.bin")
    return str(folder)


class Oracle:
    """Both models read the whole text anew for every draft."""

    def __init__(self, target: str, draft: str) -> None:
        self.target, self.draft = Qwen3Oracle(target), Qwen3Oracle(draft)
        self.weights = torch.load(Path(draft) / "warp_model.bin", weights_only=True)

    def logits(self, draft: ProposedDraft) -> Tensor:
        config = self.draft.config
        states = self.target.hidden_states(draft.known)
        features = torch.cat([states[layer] for layer in config["pard2_target_layers"]], -1)
        shown = features @ self.weights["target_proj.weight"].double().T
        if "target_proj.bias" in self.weights:
            shown = shown + self.weights["target_proj.bias"].double()
        shown = config["pard2_scale"] * shown
        known, masks = len(draft.known), len(draft.tokens) - 1
        added = torch.zeros(known + masks, WIDTH, dtype=torch.float64)
        added[1:known] = shown[: known - 1]
        added[known:] = shown[known - 2]
        return self.draft.logits([*draft.known, *[MASK] * masks], added)[-masks - 1 :]


def check(recording: Recording, oracle: Oracle) -> None:
    assert recording.drafts
    for draft in recording.drafts:
        logits = oracle.logits(draft)
        assert (draft.logits.double() - logits).abs().max() < 1e-4
        assert draft.tokens == logits.argmax(-1).tolist()


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
    recording = record(monkeypatch)
    llm = make(tiny_target, draft, forced=True)
    assert llm.engine.resolved.method == "pard"
    outputs = generate(llm, PROMPT, [*range(1, 30)])
    assert len(recording.drafts) >= 32
    assert sum(output.metrics.num_accepted_tokens_per_pos[3] for output in outputs) > 0
    check(recording, Oracle(tiny_target, draft))


@pytest.mark.parametrize("steps", ["exact", "padded"])
def test_chunks_preemption_hits_and_rests_leave_the_drafts_as_they_are(
    steps: str, tiny_target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = write_pard2(tmp_path / "draft", [-1, -2])
    if steps == "padded":
        use_padded_steps(monkeypatch)
    prompts = [[*range(1, 41)], [*range(50, 70)], PROMPT, [*range(1, 33), 7, 8, 9]]
    plain = generate(make(tiny_target, None), *prompts)
    asked, most_drafts = iter(range(100_000)), Scheduler._most_drafts

    def resting(self: Scheduler, *args: Any, **named: Any) -> int:
        return 0 if next(asked) % 60 > 40 else most_drafts(self, *args, **named)

    monkeypatch.setattr(Scheduler, "_most_drafts", resting)
    recording = record(monkeypatch)
    options = {"num_kv_blocks": 18, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    llm = make(tiny_target, draft, **options)
    outputs = [*generate(llm, *prompts), *generate(llm, prompts[0])]
    for ours, theirs in zip(outputs, [*plain, plain[0]], strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert outputs[-1].metrics.num_cached_tokens > 0
    check(recording, Oracle(tiny_target, draft))


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
