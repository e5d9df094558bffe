"""What a feature drafter really drafted, and from which logits."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.runner.turn import Turn
from slipstream.sampling import verification
from slipstream.speculative import draft_sampling
from slipstream.speculative.drafter import Draft
from slipstream.speculative.feature_rows import FeatureRowsDrafter
from slipstream.speculative.p_eagle import PEagleDrafter


@dataclass
class Drafted:
    """One draft of one request: the known tokens, what was guessed, the logits of each guess."""

    known: list[int]
    tokens: list[int]
    logits: list[Tensor] = field(default_factory=list)


def record_drafts(monkeypatch: pytest.MonkeyPatch) -> list[Drafted]:
    """Filled by every greedy draft from here on."""
    drafted: list[Drafted] = []
    rows: list[Tensor] = []
    for kind in (FeatureRowsDrafter, PEagleDrafter):
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

    def recorded(self: Any, turn: Turn) -> Draft:
        rows.clear()
        draft = propose(self, turn)
        if kind is PEagleDrafter and rows:  # all of them came at once
            rows[:] = rows[0].view(turn.num_requests, turn.width, -1).unbind(1)
        for index, slot in enumerate(turn.slots.tolist()):
            count = int(draft.num_tokens[index])
            if count:
                known = self._state.token_ids[slot, : int(self._state.num_tokens[slot])].tolist()
                tokens = draft.token_ids[index, :count].tolist()
                logits = [row[index].clone() for row in rows[:count]]
                drafted.append(Drafted(known, tokens, logits))
        return draft

    monkeypatch.setattr(kind, "propose", recorded)


def assert_drafts_are(drafted: list[Drafted], head: Any) -> None:
    """Tokens equal to the oracle's, logits within 1e-4."""
    for item in drafted:
        tokens, logits = head.drafts(item.known, len(item.tokens))
        assert item.tokens == tokens, len(item.known)
        for ours, theirs in zip(item.logits, logits, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
