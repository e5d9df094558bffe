"""What a feature drafter really drafted, and from which logits."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.runner.turn import Turn
from slipstream.sampling import verification
from slipstream.speculative import feature_rows
from slipstream.speculative.drafter import Draft


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
    propose = feature_rows.FeatureRowsDrafter.propose

    def recorded(self: feature_rows.FeatureRowsDrafter, turn: Turn) -> Draft:
        rows.clear()
        draft = propose(self, turn)
        for index, slot in enumerate(turn.slots.tolist()):
            count = int(draft.num_tokens[index])
            if count:
                known = self._state.token_ids[slot, : int(self._state.num_tokens[slot])].tolist()
                tokens = draft.token_ids[index, :count].tolist()
                logits = [row[index].clone() for row in rows[:count]]
                drafted.append(Drafted(known, tokens, logits))
        return draft

    def sample_draft(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows.append(logits)
        return verification.sample_draft(logits, *args, **kwargs)

    monkeypatch.setattr(feature_rows.FeatureRowsDrafter, "propose", recorded)
    monkeypatch.setattr(feature_rows, "sample_draft", sample_draft)
    return drafted


def assert_drafts_are(drafted: list[Drafted], head: Any) -> None:
    """Tokens equal to the oracle's, logits within 1e-4."""
    for item in drafted:
        tokens, logits = head.drafts(item.known, len(item.tokens))
        assert item.tokens == tokens, len(item.known)
        for ours, theirs in zip(item.logits, logits, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
