"""`dflash`: drafts a block of tokens in one pass, from the target's hidden states (DFlash).

The keys and values of a context token depend only on the target's features of that token. `observe`
writes them to the slots of all tokens that the target has just computed, so the drafter never has
to catch up, neither after a prefix hit nor after steps without drafts. The rows of a draft block
write their keys and values to the slots of the draft tokens; for accepted tokens, `observe`
overwrites them with those of the context before they are read.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.cache.spec import ModelCache
from slipstream.kernels.pass_inputs import PassInputs
from slipstream.runner.captured_passes import CapturedPasses
from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.model_runner import Forward
from slipstream.runner.rows import lay_out
from slipstream.sampling.verification import Verdict
from slipstream.speculative.dflash.network import DFlashConfig, DFlashNetwork, read_dflash_config
from slipstream.speculative.draft_sampling import Places
from slipstream.speculative.drafter import Draft, Drafter, DrafterResources
from slipstream.speculative.heads.loading import load_network
from slipstream.speculative.heads.method import Head, HeadMethod
from slipstream.speculative.model_options import ModelKeys


class DFlashDrafter(Drafter):
    """Drafts all K tokens in one pass."""

    def __init__(
        self, head: Head[DFlashConfig, DFlashNetwork], resources: DrafterResources
    ) -> None:
        super().__init__(resources.state)
        self._network, self._config = head.network, head.config
        self._network.share(resources.target.embedding, resources.target.head)
        self._drafting = head.sampling(resources)
        layout = head.layout
        assert layout is not None, "its layers have keys and values"
        self._dtype = head.dtype
        self._cache = ModelCache(layout, resources.cache_sizes)
        self._captured: CapturedPasses | None = None
        if resources.record is not None:
            sizes = self._state.num_slots, resources.record
            self._captured = CapturedPasses(self._store, *sizes)

    def propose(self, batch: DeviceBatch) -> Draft:
        """Run one pass over the draft blocks of all requests."""
        wanted = batch.num_draft_tokens
        known = self._state.num_tokens[batch.slots]
        hidden = self._hidden(batch, (known - 1).clamp_min(0), wanted)
        logits = self._network.head(hidden.flatten(0, 1))
        return self._drafting.draft_at_once(batch, wanted, logits)

    def observe(self, batch: DeviceBatch, verdict: Verdict, forward: Forward) -> None:
        """Write the context of the computed tokens. Rejected tokens are left out if rows can be
        selected; otherwise their entries are overwritten before they are read."""
        placed, streams = forward.layout.inputs, forward.streams
        inputs = PassInputs(placed.rows, placed.paging)  # the others are of the target's layers
        replayed = None
        if self._captured is not None and forward.layout.row_starts:
            replayed = self._captured.run(inputs, *streams)
        if replayed is not None:
            return
        rows = forward.layout.leading(batch.num_new_tokens + verdict.num_accepted)
        inputs = replace(
            inputs,
            rows=replace(inputs.rows, positions=inputs.rows.positions[rows]),
            paging=replace(inputs.paging, slots=inputs.paging.slots[rows]),
        )
        self._store(inputs, *(stream[rows] for stream in streams))

    def _store(self, inputs: PassInputs, *streams: Tensor) -> Sequence[Tensor]:
        """Write the context of rows with these streams of the target."""
        context = self._network.context([stream.to(self._dtype) for stream in streams])
        self._network.store(context, inputs, self._cache.layers)
        return ()

    def _hidden(self, batch: DeviceBatch, starts: Tensor, wanted: Tensor) -> Tensor:
        """Run the pass; returns [R, K, H], the lm_head's input of the rows that predict tokens."""
        known_rows = 0 if self._config.from_anchor else 1
        lengths = torch.where(wanted > 0, wanted + known_rows, 0)
        most, mask = batch.width + known_rows, self._config.mask_token
        layout = lay_out(self._state, batch.rows(starts, lengths, most, mask_token=mask))
        if layout.is_empty:  # no request drafts
            shape = (batch.num_requests, batch.width, self._network.head.width)
            return torch.zeros(shape, dtype=self._dtype, device=starts.device)
        hidden = self._network(layout.token_ids, layout.inputs, self._cache.layers)
        return layout.tails(hidden, wanted, batch.width)


HEAD = HeadMethod(
    name="dflash",
    read=read_dflash_config,
    network=partial(load_network, DFlashNetwork),
    drafter=DFlashDrafter,
    keys=ModelKeys(parallel=True, remedy="all tokens come from one pass; leave it out", cache=True),
)


class BlockChooser(Protocol):
    """A network of draft blocks whose logits of each position depend on the token before it."""

    def places(self, hidden: Tensor) -> Places:
        """Begin a round; hidden [R, K, H] is the final hidden state of the rows that predict."""


class BlockChainDrafter(DFlashDrafter):
    """Drafts with one pass of the layers, followed by a cheap sequential step for each token."""

    def __init__(self, head: Head[Any, Any], resources: DrafterResources) -> None:
        super().__init__(head, resources)
        self._chooser: BlockChooser = head.network

    def propose(self, batch: DeviceBatch) -> Draft:
        wanted = batch.num_draft_tokens
        known = self._state.num_tokens[batch.slots]
        hidden = self._hidden(batch, (known - 1).clamp_min(0), wanted)
        places = self._chooser.places(hidden)
        return self._drafting.draft_places(batch, wanted, places)
