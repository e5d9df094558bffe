"""`dflash`: a draft block from one pass over features of the target (DFlash).

The keys and values of the context come from the features of a token alone, so `observe` writes them
into the slots of the tokens that the target has just computed, and there is nothing to catch up
with: not behind a prefix hit, nor after a while without drafts. The rows of a draft block write the
slots of the tokens that they stand for, which the request's blocks have room for; the context of
what is committed is written over them before anybody reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from slipstream.cache.spec import CacheLayout, ModelCache
from slipstream.core.batch import Batch
from slipstream.core.request import Request
from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.model_runner import Forward
from slipstream.runner.rows import lay_out
from slipstream.sampling.verification import Verdict
from slipstream.speculative.dflash.config import (
    DFlashConfig,
    dflash_problems,
    read_dflash_config,
)
from slipstream.speculative.dflash.network import DFlashNetwork, load_dflash
from slipstream.speculative.draft_sampling import DraftSampling
from slipstream.speculative.drafter import Draft, Drafter, DrafterLimits, DrafterResources, Needs
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.config import wrapped_num_tokens
from slipstream.speculative.heads.loading import read_draft_ids
from slipstream.speculative.heads.options import (
    HeadFacts,
    HeadOptions,
    head_layout,
    head_limits,
    load_options,
    open_head,
    read_head_options,
    require_fit,
    require_shared_dtype,
    target_config,
)
from slipstream.speculative.options import Options, TargetModel
from slipstream.speculative.parallel.rows import parallel_draft

METHOD = "dflash"


def read_options(options: Options) -> HeadOptions:
    """What every head takes."""
    options.take_only("parallel_drafting", True, "all tokens come from one pass; leave it out")
    return read_head_options(options, METHOD)


def describe(checkpoint: HeadCheckpoint) -> HeadFacts:
    """Without its weights."""
    config = read_dflash_config(checkpoint)
    layers = config.entered_layers
    which = f"layers {', '.join(map(str, layers))}" if layers else f"{config.num_read} layers"
    note = (
        f"it gives all draft tokens from one pass, {config.max_drafts} at most, with mask token "
        f"{config.mask_token}"
    )
    features = f"the residual streams that enter {which}"
    return HeadFacts(
        config.layers,
        features,
        partial(dflash_problems, config),
        num_tokens=wrapped_num_tokens(checkpoint.config) or config.max_drafts,
        notes=(note,),
    )


def load(config: HeadOptions, target: TargetModel) -> "LoadedDFlash":
    """Load the drafter and check that it fits the target."""
    checkpoint = open_head(config, METHOD)
    drafter, shape = read_dflash_config(checkpoint), target_config(target)
    require_fit(checkpoint, target, dflash_problems(drafter, shape))
    load = load_options(config, target)
    require_shared_dtype(drafter.parts, load.dtype, target)
    ids = read_draft_ids(checkpoint, drafter.draft_vocab_size, target.vocab_size, load.device)
    return LoadedDFlash(
        network=load_dflash(checkpoint, drafter, shape.hidden_size, load),
        config=drafter,
        sampling=DraftSampling(ids, drafter.draft_vocab_size, config.greedy_only),
        limits=replace(
            head_limits(config, METHOD, checkpoint, target),
            max_speculative_tokens=drafter.max_drafts,
        ),
        # What is read of a token is kept in the cache, so none is computed again for it.
        needs=Needs(stream_layers=drafter.stream_layers(shape.num_layers)),
        layout=head_layout(drafter.layers, load.dtype),
    )


@dataclass(frozen=True, eq=False)
class LoadedDFlash:
    """The network in memory, waiting for its share of the cache."""

    network: DFlashNetwork
    config: DFlashConfig
    sampling: DraftSampling
    limits: DrafterLimits
    needs: Needs
    layout: CacheLayout

    def build(self, resources: DrafterResources) -> Drafter:
        self.network.share(resources.target.embedding, resources.target.head)
        return DFlashDrafter(self, resources)


class DFlashDrafter:
    """Drafts with one pass a round, whatever K."""

    def __init__(self, loaded: LoadedDFlash, resources: DrafterResources) -> None:
        self._network, self._config = loaded.network, loaded.config
        self._drafting, self._resources = loaded.sampling, resources
        self._state = resources.state
        layout = loaded.layout
        self._dtype = layout.dtype
        self._cache = ModelCache(layout, resources.cache_sizes)

    def prepare(self, batch: Batch) -> None:
        """Nothing waits."""

    def propose(self, batch: DeviceBatch) -> Draft:
        """One pass over the draft blocks."""
        if not batch.width:
            return Draft.empty(batch)
        wanted = batch.num_draft_tokens
        known = self._state.num_tokens[batch.slots]
        hidden = self._hidden(batch, (known - 1).clamp_min(0), wanted)
        logits = self._network.head(hidden.flatten(0, 1))
        return parallel_draft(self._state, batch, wanted, logits, self._drafting, self._resources)

    def observe(self, batch: DeviceBatch, verdict: Verdict, forward: Forward) -> None:
        """The context of what was computed; that of refused tokens will be written anew before it
        is read, and is left out where rows can be picked."""
        inputs = forward.layout.inputs
        rows = forward.layout.leading(batch.num_new_tokens + verdict.num_accepted)
        inputs = replace(
            inputs,
            rows=replace(inputs.rows, positions=inputs.rows.positions[rows]),
            paging=replace(inputs.paging, slots=inputs.paging.slots[rows]),
        )
        context = self._network.context(
            [stream[rows].to(self._dtype) for stream in forward.streams]
        )
        self._network.store(context, inputs, self._cache.layers)

    def read_prompts(self, batch: Batch, forward: Forward) -> None:
        """`observe` took in all rows."""

    def forget(self, requests: Sequence[Request]) -> None:
        """Nothing is kept beside the cache."""

    def cached_tokens(self, slots: Tensor) -> Tensor:
        return self._state.num_computed[slots]

    def _hidden(self, batch: DeviceBatch, starts: Tensor, wanted: Tensor) -> Tensor:
        """[R, K, H], what enters the head: the rows that predict."""
        known_rows = 0 if self._config.from_anchor else 1
        lengths = torch.where(wanted > 0, wanted + known_rows, 0)
        most, mask = batch.width + known_rows, self._config.mask_token
        layout = lay_out(self._state, batch.rows(starts, lengths, most, mask_token=mask))
        if layout.is_empty:  # nobody drafts after all
            shape = (batch.num_requests, batch.width, self._network.head.width)
            return torch.zeros(shape, dtype=self._dtype, device=starts.device)
        hidden = self._network(layout.token_ids, layout.inputs, self._cache.layers)
        return layout.tails(hidden, wanted, batch.width)
