"""What a language model that drafts was asked, and what it answered, round by round."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.model_runner import ModelRunner
from slipstream.speculative.draft_model.drafter import DraftModelDrafter
from slipstream.speculative.draft_sampling import DraftSampling
from slipstream.speculative.drafter import Draft
from slipstream.speculative.pard.drafter import PardDrafter


@dataclass
class ProposedDraft:
    """One request's draft: the tokens known before it, the drafted ones, and their logits."""

    known: list[int]
    tokens: list[int]
    logits: Tensor  # [K, Vq]


@dataclass
class Recording:
    """All drafts, and the number of passes of the drafter's network."""

    drafts: list[ProposedDraft] = field(default_factory=list)
    num_passes: int = 0
    num_rounds: int = 0
    inside: bool = False


def record(monkeypatch: pytest.MonkeyPatch) -> Recording:
    """Engines that are built from here on write their drafts down."""
    recording = Recording()
    logits: list[Tensor] = []
    forward, sample = ModelRunner.forward, DraftSampling.sample

    def counted(self: ModelRunner, *args: Any) -> Any:
        recording.num_passes += recording.inside
        return forward(self, *args)

    def sampled(self: DraftSampling, given: Tensor, *args: Any) -> Tensor:
        logits.append(given.clone())
        return sample(self, given, *args)

    monkeypatch.setattr(ModelRunner, "forward", counted)
    monkeypatch.setattr(DraftSampling, "sample", sampled)
    for kind in (PardDrafter, DraftModelDrafter):
        propose = kind.propose

        def recorded(self: Any, batch: DeviceBatch, propose: Any = propose) -> Draft:
            logits.clear()
            state = self._state
            known = [
                state.token_ids[slot, : state.num_tokens[slot]].tolist()
                for slot in batch.slots.tolist()
            ]
            wanted = batch.num_draft_tokens.tolist()
            recording.inside = True
            draft = propose(self, batch)
            recording.inside = False
            recording.num_rounds += any(wanted)
            if any(wanted):
                _keep(recording, known, wanted, draft, torch.cat(logits), len(logits) > 1)
            return draft

        monkeypatch.setattr(kind, "propose", recorded)
    return recording


def _keep(
    recording: Recording,
    known: list[list[int]],
    wanted: list[int],
    draft: Draft,
    logits: Tensor,
    one_by_one: bool,
) -> None:
    requests, width = draft.token_ids.shape
    shape = (width, requests, -1) if one_by_one else (requests, width, -1)
    rows = logits.view(shape)
    if one_by_one:
        rows = rows.transpose(0, 1)
    for request, count in enumerate(wanted):
        if count:
            tokens = draft.token_ids[request, :count].tolist()
            recording.drafts.append(
                ProposedDraft(known[request], tokens, rows[request, :count].clone())
            )
