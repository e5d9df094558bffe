"""What a drafter really drafted, and from which logits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.runner.device_batch import DeviceBatch
from slipstream.sampling import verification
from slipstream.speculative import draft_sampling
from slipstream.speculative.dflash.drafter import BlockChainDrafter, DFlashDrafter
from slipstream.speculative.draft_model.drafter import DraftModelDrafter
from slipstream.speculative.drafter import Draft
from slipstream.speculative.gemma4_assistant.network import AssistantDrafter
from slipstream.speculative.heads.feature_rows import FeatureRowsDrafter
from slipstream.speculative.heads.last_hidden import LastHiddenDrafter
from slipstream.speculative.p_eagle.network import PEagleDrafter
from slipstream.speculative.pard.drafter import PardDrafter
from tests.padded_steps import DirectRecorder

CHAINS = (FeatureRowsDrafter, DraftModelDrafter, LastHiddenDrafter, BlockChainDrafter)
AT_ONCE = (PEagleDrafter, PardDrafter, DFlashDrafter)


@dataclass
class Drafted:
    """One draft of one request: known tokens, guesses, how many were planned, logits of each."""

    known: list[int]
    tokens: list[int]
    planned: int
    logits: list[Tensor] = field(default_factory=list)


def record_drafts(monkeypatch: pytest.MonkeyPatch) -> list[Drafted]:
    """Filled by every greedy draft from here on. No draft may change a cache of the target's.

    What is recorded on the host cannot be captured: on a GPU such steps run directly."""
    monkeypatch.setattr("slipstream.engine.assembly.Recorder", DirectRecorder)
    drafted: list[Drafted] = []
    rows: list[Tensor] = []
    for kind in (*CHAINS, *AT_ONCE):
        _record(monkeypatch, kind, drafted, rows)

    def sample_draft(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows.append(logits)
        return verification.sample_draft(logits, *args, **kwargs)

    monkeypatch.setattr(draft_sampling, "sample_draft", sample_draft)
    return drafted


def _record(
    monkeypatch: pytest.MonkeyPatch, kind: Any, drafted: list[Drafted], rows: list[Tensor]
) -> None:
    propose = kind.propose

    def recorded(self: Any, batch: DeviceBatch) -> Draft:
        rows.clear()
        before = [pages.clone() for pages in _read_only(self)]
        known = [
            self._state.token_ids[slot, : int(self._state.num_tokens[slot])].tolist()
            for slot in batch.slots.tolist()
        ]
        draft = propose(self, batch)
        for ours, theirs in zip(_read_only(self), before, strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        if kind in AT_ONCE and rows:
            rows[:] = torch.cat(rows).view(batch.num_requests, batch.width, -1).unbind(1)
        for index, text in enumerate(known):
            count = int(draft.num_tokens[index])
            if count:
                tokens = draft.token_ids[index, :count].tolist()
                logits = [row[index].clone() for row in rows[:count]]
                assert len(logits) == count
                planned = int(batch.num_draft_tokens[index])
                drafted.append(Drafted(text, tokens, planned, logits))
        return draft

    monkeypatch.setattr(kind, "propose", recorded)


def _read_only(drafter: Any) -> Iterator[Tensor]:
    """Pages that the drafter reads and that are not its own."""
    if isinstance(drafter, AssistantDrafter):
        for layer in drafter._caches:
            yield from layer


def assert_drafts_are(drafted: Sequence[Drafted], head: Any) -> None:
    """Tokens equal to the oracle's, logits within 1e-4."""
    assert drafted
    # Long texts first: the oracle's target has then read the shorter ones, which they begin with.
    for item in sorted(drafted, key=lambda item: len(item.known), reverse=True):
        tokens, logits = head.drafts(item.known, item.planned)
        count = len(item.tokens)
        assert item.tokens == tokens[:count], len(item.known)
        ours, theirs = torch.stack(item.logits), torch.stack([*logits[:count]])
        torch.testing.assert_close(ours, theirs.to(ours), atol=1e-4, rtol=0)
