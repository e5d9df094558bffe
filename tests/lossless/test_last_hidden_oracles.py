"""Draft tokens of Medusa heads and MLPSpeculators within the engine are those of their oracles.

The oracles take the target's hidden states from the transformers library.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream import LLM, SamplingParams
from slipstream.runner.device_batch import DeviceBatch
from slipstream.speculative.drafter import Draft
from slipstream.speculative.heads.last_hidden import LastHiddenDrafter
from tests.last_hidden_checkpoints import (
    Guess,
    medusa_for,
    medusa_oracle,
    mlp_for,
    mlp_oracle,
)
from tests.padded_steps import use_padded_steps

METHODS = ("medusa", "mlp_speculator")
PROMPTS: list[Any] = [
    {"prompt_token_ids": [(7 * start + 3 * index) % 96 for index in range(length)]}
    for start, length in ((1, 5), (5, 70))
]


@dataclass
class Seen:
    """The drafts of an engine, each with the known tokens that it continues."""

    drafts: list[tuple[list[int], list[int]]] = field(default_factory=list)

    @classmethod
    def watching(cls, monkeypatch: pytest.MonkeyPatch) -> "Seen":
        seen, propose = cls(), LastHiddenDrafter.propose

        def noted(drafter: LastHiddenDrafter, batch: DeviceBatch) -> Draft:
            draft, state = propose(drafter, batch), drafter._state
            for row, count in enumerate(draft.num_tokens.tolist()):
                slot = int(batch.slots[row])
                known = state.token_ids[slot, : int(state.num_tokens[slot])]
                if count:
                    seen.drafts.append((known.tolist(), draft.token_ids[row, :count].tolist()))
            return draft

        monkeypatch.setattr(LastHiddenDrafter, "propose", noted)
        return seen


@pytest.fixture(scope="module")
def hidden_states(tiny_target: str) -> Any:
    """Token ids to the target's hidden states [T, H] after its final norm."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(tiny_target, dtype=torch.float32)

    def run(ids: list[int]) -> Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).last_hidden_state[0]

    return run


def random_oracle(method: str, target: str) -> tuple[str, Guess]:
    if method == "medusa":
        path = medusa_for(target)
        return path, medusa_oracle(load_file(Path(path) / "medusa_lm_head.safetensors"))
    path = mlp_for(target)
    config = json.loads((Path(path) / "config.json").read_text())
    return path, mlp_oracle(load_file(Path(path) / "model.safetensors"), config)


@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
@pytest.mark.parametrize("method", METHODS)
def test_draft_tokens_are_the_oracles_whatever_is_accepted(
    method: str,
    padded: bool,
    tiny_target: str,
    hidden_states: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Acceptance is forced, so that every number of tokens is gained; prompts come in chunks."""
    if padded:
        use_padded_steps(monkeypatch)
    path, oracle = random_oracle(method, tiny_target)
    llm = LLM(
        tiny_target,
        speculative_config={
            "method": method,
            "model": path,
            "num_speculative_tokens": 5,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [0.8, 0.6, 0.45, 0.3, 0.2],
        },
        skip_tokenizer_init=True,
        max_num_batched_tokens=24,
        max_num_seqs=4,
        num_kv_blocks=64,
        enforce_eager=True,  # what is watched reads from the device
    )
    seen = Seen.watching(monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params)
    assert all(output.metrics.num_drafts >= 32 for output in outputs)
    accepted = outputs[0].metrics.num_accepted_tokens_per_pos
    assert accepted[0] > accepted[-1] > 0
    wrong = 0
    for known, draft in seen.drafts:
        hidden = hidden_states(known[:-1])[-1]
        logits = oracle(hidden, known[-1], len(draft))
        assert draft == [int(row.argmax()) for row in logits] or near_tie(logits)
        wrong += draft != [int(row.argmax()) for row in logits]
    assert wrong <= 1


def near_tie(logits: list[Tensor]) -> bool:
    best = torch.stack(logits).topk(2).values
    return bool(((best[:, 0] - best[:, 1]) < 1e-4).any())
