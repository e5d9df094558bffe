"""Drafters that read one hidden state: the target's, behind its final norm, at its last row.

The row whose logits gave a request its newest token is kept in a buffer by slot; with that token
it is all that the network needs, so nothing is kept in the blocks, and a request whose drafts were
refused, or that did without for a while, has nothing to catch up with.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.core.batch import Batch
from slipstream.layers.embedding import Embedding, LanguageModelHead
from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.device_state import DeviceState
from slipstream.runner.model_runner import Forward
from slipstream.sampling.verification import Verdict
from slipstream.speculative.drafter import Draft, Drafter, DrafterResources
from slipstream.speculative.heads.method import Head

FEATURES = "the last hidden state of one token, behind the final norm"


class LastHiddenNetwork(Protocol):
    """What guesses from one hidden state, and perhaps the tokens guessed before."""

    def share(self, embedding: Embedding, head: LanguageModelHead) -> None:
        """Take from the target what the checkpoint leaves to it."""

    def start(self, hidden: Tensor, count: int) -> Tensor:
        """hidden [R, H] -> the state before the first of `count` tokens."""

    def logits(self, index: int, state: Tensor, last_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [R, V] float32 of draft token `index`, behind `last_tokens` [R] (the target's
        ids), and the next state."""


class LastHidden:
    """The target's hidden state of the last computed token of every request, by slot."""

    def __init__(self, state: DeviceState, hidden_size: int, dtype: torch.dtype) -> None:
        self._state = state
        self._rows = torch.zeros((state.num_slots, hidden_size), dtype=dtype, device=state.device)
        # How many tokens were computed with the row; -1: it is of a former request.
        self._computed = torch.full_like(state.num_computed, -1)

    def drop(self, slots: Sequence[int]) -> None:
        """Slots with new requests."""
        if slots:
            self._computed[torch.tensor(slots, device=self._state.device)] = -1

    def keep(self, batch: DeviceBatch, verdict: Verdict, forward: Forward) -> None:
        """The row of the last token that is computed now, the committed drafts included."""
        last_known = forward.layout.first_row + batch.num_known_rows - 1
        row = (last_known + verdict.num_accepted).clamp_min(0)  # padding has no tokens
        self._rows.index_copy_(0, batch.slots, forward.hidden[row].to(self._rows.dtype))
        self._computed.index_copy_(0, batch.slots, self._state.num_computed[batch.slots])

    def rows(self, slots: Tensor) -> Tensor:
        """slots [R] -> [R, hidden_size]."""
        return self._rows[slots]

    def is_there(self, slots: Tensor) -> Tensor:
        """[R] bool: the row is the one before the last known token. Behind a prefix hit on all but
        that token there is none yet."""
        computed = self._computed[slots]
        state = self._state
        return (computed == state.num_computed[slots]) & (computed + 1 == state.num_tokens[slots])


class LastHiddenDrafter(Drafter):
    """A chain of draft tokens from the last hidden state; the network may read earlier ones."""

    def __init__(self, head: Head[Any, Any], resources: DrafterResources) -> None:
        super().__init__(resources.state)
        self._network: LastHiddenNetwork = head.network
        self._network.share(resources.target.embedding, resources.target.head)
        self._drafting, self._resources = head.sampling, resources
        dtype = resources.target.embedding.dtype
        self._last = LastHidden(resources.state, head.target.hidden_size, dtype)

    def prepare(self, batch: Batch) -> None:
        self._last.drop([item.request.slot for item in batch.requests if item.admitted])

    def propose(self, batch: DeviceBatch) -> Draft:
        slots = batch.slots
        newest = (self._state.num_tokens[slots] - 1).clamp_min(0)
        wanted = torch.where(self._last.is_there(slots), batch.num_draft_tokens, 0)
        state = self._start(self._last.rows(slots), batch, newest)

        def place(index: int, last: Tensor) -> tuple[Tensor, None]:
            nonlocal state
            logits, state = self._next(index, state, last)
            return logits, None

        return self._drafting.draft_places(batch, self._resources, wanted, place)

    def observe(self, batch: DeviceBatch, verdict: Verdict, forward: Forward) -> None:
        self._last.keep(batch, verdict, forward)

    def _start(self, hidden: Tensor, batch: DeviceBatch, newest: Tensor) -> Any:
        """hidden [R, H], of the tokens before the newest, at positions [R] -> the first state."""
        del newest
        return self._network.start(hidden, batch.width)

    def _next(self, index: int, state: Any, last: Tensor) -> tuple[Tensor, Any]:
        """Logits [R, V] of draft token `index` behind the tokens `last` [R], and the next state."""
        return self._network.logits(index, state, last)
