"""Drafters that read one hidden state per request: the target's last, after its final norm.

The hidden state from which a request's newest token was sampled is kept in a buffer by slot. The
network needs only this state and that token. So the drafter has no KV cache, and never has to catch
up after rejected drafts or steps without drafts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.core.batch import Batch
from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.device_state import DeviceState
from slipstream.runner.model_runner import Forward
from slipstream.sampling.verification import Verdict
from slipstream.speculative.drafter import Draft, Drafter, DrafterResources
from slipstream.speculative.heads.loading import DraftingNetwork
from slipstream.speculative.heads.method import Head

FEATURES = "the last hidden state of one token, after the final norm"


class LastHiddenNetwork(DraftingNetwork):
    """A network that drafts from one hidden state, and possibly earlier draft tokens."""

    def start(self, hidden: Tensor, count: int) -> Tensor:
        """hidden [R, H] -> the state before the first of `count` tokens."""
        raise NotImplementedError

    def logits(self, index: int, state: Tensor, last_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [R, V] float32 of draft token `index`, after `last_tokens` [R] (the target's ids),
        and the next state."""
        raise NotImplementedError


class LastHidden:
    """The target's hidden state of the last computed token of every request, by slot."""

    def __init__(self, state: DeviceState, hidden_size: int, dtype: torch.dtype) -> None:
        self._state = state
        self._rows = torch.zeros((state.num_slots, hidden_size), dtype=dtype, device=state.device)
        # Number of computed tokens including the row's; -1 if it belongs to an earlier request.
        self._computed = torch.full_like(state.num_computed, -1)

    def drop(self, slots: Sequence[int]) -> None:
        """Invalidate the rows of slots that new requests have taken."""
        if slots:
            self._computed[torch.tensor(slots, device=self._state.device)] = -1

    def keep(self, batch: DeviceBatch, verdict: Verdict, forward: Forward) -> None:
        """Store the rows of the last computed tokens, which may be accepted draft tokens."""
        last_known = forward.layout.first_row + batch.num_known_rows - 1
        row = (last_known + verdict.num_accepted).clamp_min(0)  # padded requests have no tokens
        self._rows.index_copy_(0, batch.slots, forward.hidden[row].to(self._rows.dtype))
        self._computed.index_copy_(0, batch.slots, self._state.num_computed[batch.slots])

    def rows(self, slots: Tensor) -> Tensor:
        """slots [R] -> [R, hidden_size]."""
        return self._rows[slots]

    def has_row(self, slots: Tensor) -> Tensor:
        """[R] bool: whether the row belongs to the token before the last known one. It is missing
        after a prefix cache hit on all tokens but the last."""
        computed = self._computed[slots]
        state = self._state
        return (computed == state.num_computed[slots]) & (computed + 1 == state.num_tokens[slots])


class LastHiddenDrafter(Drafter):
    """Drafts a chain from the last hidden state; the network may read earlier draft tokens."""

    def __init__(self, head: Head[Any, Any], resources: DrafterResources) -> None:
        super().__init__(resources.state)
        self._network: LastHiddenNetwork = head.network
        self._network.share(resources.target.embedding, resources.target.head)
        self._drafting = head.sampling(resources)
        dtype = resources.target.embedding.dtype
        self._last = LastHidden(resources.state, head.target.hidden_size, dtype)

    def prepare(self, batch: Batch) -> None:
        self._last.drop([item.request.slot for item in batch.requests if item.admitted])

    def propose(self, batch: DeviceBatch) -> Draft:
        slots = batch.slots
        newest = (self._state.num_tokens[slots] - 1).clamp_min(0)
        wanted = torch.where(self._last.has_row(slots), batch.num_draft_tokens, 0)
        state = self._start(self._last.rows(slots), batch, newest)

        def place(index: int, last: Tensor) -> tuple[Tensor, None]:
            nonlocal state
            logits, state = self._next(index, state, last)
            return logits, None

        return self._drafting.draft_places(batch, wanted, place)

    def observe(self, batch: DeviceBatch, verdict: Verdict, forward: Forward) -> None:
        self._last.keep(batch, verdict, forward)

    def _start(self, hidden: Tensor, batch: DeviceBatch, newest: Tensor) -> Any:
        """The first state, from hidden [R, H] of the tokens before those at `newest` [R]."""
        return self._network.start(hidden, batch.width)

    def _next(self, index: int, state: Any, last: Tensor) -> tuple[Tensor, Any]:
        """Logits [R, V] of draft token `index`, after tokens `last` [R], and the next state."""
        return self._network.logits(index, state, last)
