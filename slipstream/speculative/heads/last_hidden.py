"""Drafters that read one hidden state: the target's, behind its final norm, at its last row.

The row whose logits gave a request its newest token is kept in a buffer by slot; with that token
it is all that the network needs, so nothing is kept in the blocks, and a request whose drafts were
refused, or that did without for a while, has nothing to catch up with.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from slipstream.cache.spec import CacheLayout
from slipstream.core.batch import Batch
from slipstream.core.request import Request
from slipstream.layers.embedding import LanguageModelHead
from slipstream.models.decoder_config import DecoderConfig
from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.device_state import DeviceState
from slipstream.runner.model_runner import Forward
from slipstream.sampling.state import Uses
from slipstream.sampling.verification import Verdict, sample_draft
from slipstream.speculative.drafter import Draft, Drafter, DrafterLimits, DrafterResources, Needs
from slipstream.speculative.heads.options import HeadOptions

FEATURES = "the last hidden state of one token, behind the final norm"


class Network(Protocol):
    """What guesses from one hidden state. Attributes and shapes: `medusa/network.py`."""

    num_heads: int
    num_legal_tokens: int
    vocabulary: Tensor | None

    def share(self, head: LanguageModelHead) -> None:
        """Take from the target what the checkpoint leaves to it."""

    def start(self, hidden: Tensor, count: int) -> Tensor:
        """hidden [R, H] -> the state before the first of `count` tokens."""

    def logits(self, index: int, state: Tensor, last_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Of draft token `index`, behind `last_tokens` [R] (the target's ids): [R, V] float32, and
        the next state."""


class LoadedHeads:
    """A network in memory. It adds nothing to the blocks, so it shares them with everybody."""

    needs = Needs()
    layout: CacheLayout | None = None

    def __init__(self, config: HeadOptions, network: Network, target: DecoderConfig) -> None:
        self._network, self._greedy_only = network, config.greedy_only
        self._hidden_size = target.hidden_size
        self.limits = DrafterLimits(
            max_speculative_tokens=network.num_heads,
            max_model_len=config.max_model_len,
            keeps_probabilities=not config.greedy_only,
            catches_up=True,
        )

    def build(self, resources: DrafterResources) -> Drafter:
        self._network.share(resources.target.head)
        return HeadsDrafter(self._network, resources, self._hidden_size, self._greedy_only)


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


class HeadsDrafter:
    """A chain of guesses from the last hidden state, each known to the next if the network asks."""

    def __init__(
        self, network: Network, resources: DrafterResources, hidden_size: int, greedy_only: bool
    ) -> None:
        self._network, self._greedy_only = network, greedy_only
        self._resources = resources
        self._state, self._sampling = resources.state, resources.sampling
        dtype = resources.target.embedding.dtype
        self._last = LastHidden(resources.state, hidden_size, dtype)

    def prepare(self, batch: Batch) -> None:
        self._last.drop([item.request.slot for item in batch.requests if item.admitted])

    def propose(self, batch: DeviceBatch) -> Draft:
        if not batch.width:
            return Draft.empty(batch)
        slots, network = batch.slots, self._network
        known = self._state.num_tokens[slots]
        wanted = torch.where(self._last.is_there(slots), batch.num_draft_tokens, 0)
        tokens = slots.new_zeros((batch.num_requests, batch.width))
        probs = self._probabilities(batch)
        last = self._state.token_ids[slots, (known - 1).clamp_min(0)]
        state = network.start(self._last.rows(slots), batch.width)
        for index in range(batch.width):
            logits, state = network.logits(index, state, last)
            picked = sample_draft(
                logits,
                slots,
                known + index,
                self._sampling,
                batch.uses,
                network.num_legal_tokens,
                greedy_only=self._greedy_only,
                use_fp64_gumbel=self._resources.use_fp64_gumbel,
                probs_out=None if probs is None else probs[:, index],
                vocabulary=network.vocabulary,
            )
            last = picked if network.vocabulary is None else network.vocabulary[picked]
            tokens[:, index] = last
        certain = self._sampling.temperature[slots] == 0
        one_hot = torch.ones_like(certain) if self._greedy_only else certain
        return Draft(tokens, wanted, one_hot, probs, network.vocabulary)

    def observe(self, batch: DeviceBatch, verdict: Verdict, forward: Forward) -> None:
        self._last.keep(batch, verdict, forward)

    def read_prompts(self, batch: Batch, forward: Forward) -> None:
        """`observe` kept the last row of every chunk."""

    def forget(self, requests: Sequence[Request]) -> None:
        """A slot's row counts no more once the slot is given out anew."""

    def cached_tokens(self, slots: Tensor) -> Tensor:
        return self._state.num_computed[slots]

    def _probabilities(self, batch: DeviceBatch) -> Tensor | None:
        """[R, K, Vq], to be filled with what the drafts are sampled from, if any is."""
        if self._greedy_only or Uses.SAMPLING not in batch.uses:
            return None
        shape = (batch.num_requests, batch.width, self._network.num_legal_tokens)
        return torch.empty(shape, dtype=torch.float32, device=self._state.device)
