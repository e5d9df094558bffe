"""`p-eagle`: EAGLE-3 heads that give all K draft tokens from one pass (arXiv 2602.01469).

Known tokens are rows of (feature, token) as in a chain (`heads/feature_rows.py`); the masks
behind them have the mask token's embedding and the feature that the head has learned for them.
"""

import logging
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.rows import PassRows, RowLayout, lay_out
from slipstream.speculative.draft_sampling import DraftSampling
from slipstream.speculative.drafter import Draft, Drafter, DrafterResources, Needs
from slipstream.speculative.eagle3.drafter import features_read
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.speculative.heads.config import wrapped_num_tokens
from slipstream.speculative.heads.feature_rows import FeatureRowsDrafter, LoadedFeatureDrafter
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
from slipstream.speculative.p_eagle.network import (
    PEagleHead,
    load_p_eagle,
    p_eagle_problems,
    read_p_eagle_config,
)
from slipstream.speculative.parallel.mask_token import (
    MASK_HEAD_KEYS,
    choose_mask_token,
    parallel_note,
    read_mask_token,
    warn_untrained,
)
from slipstream.speculative.parallel.rows import most_rows, parallel_draft, parallel_rows

logger = logging.getLogger("slipstream")

METHOD = "p-eagle"


@dataclass(frozen=True)
class PEagleOptions:
    """How the head is loaded and sampled.

    Attributes:
        pard_token: id of its mask token; None when the checkpoint says it.
    """

    head: HeadOptions
    pard_token: int | None


def read_options(options: Options) -> PEagleOptions:
    """What every head takes, and `pard_token`."""
    remedy = "this head drafts all tokens at once; leave it out, or choose a head for a chain"
    options.take_only("parallel_drafting", True, remedy)
    token = options.take_int("pard_token", None)
    return PEagleOptions(read_head_options(options, METHOD), token)


def describe(checkpoint: HeadCheckpoint) -> HeadFacts:
    """Without its weights."""
    config = read_p_eagle_config(checkpoint, MASK_HEAD_KEYS)
    mask = read_mask_token(checkpoint)
    note = parallel_note(METHOD, mask)
    return HeadFacts(
        layers=config.head.layers,
        features=features_read(config.head),
        problems=partial(p_eagle_problems, config),
        num_tokens=wrapped_num_tokens(checkpoint.config),
        notes=(note,),
        trained_tokens=mask.trained_tokens,
    )


def load(config: PEagleOptions, target: TargetModel) -> "LoadedPEagle":
    """Load the head, find the mask token, and check that it fits the target."""
    checkpoint = open_head(config.head, METHOD)
    settings, shape = read_p_eagle_config(checkpoint, MASK_HEAD_KEYS), target_config(target)
    require_fit(checkpoint, target, p_eagle_problems(settings, shape))
    said, head = read_mask_token(checkpoint), settings.head
    token = choose_mask_token(checkpoint, said, config.pard_token, head.layers.vocab_size)
    load = load_options(config.head, target)
    require_shared_dtype(head.parts, load.dtype, target)
    ids = read_draft_ids(checkpoint, head.draft_vocab_size, target.vocab_size, load.device)
    limits = head_limits(config.head, METHOD, checkpoint, target)
    return LoadedPEagle(
        network=load_p_eagle(checkpoint, settings, shape.hidden_size, load),
        sampling=DraftSampling(ids, head.draft_vocab_size, config.head.greedy_only),
        limits=replace(limits, max_speculative_tokens=said.trained_tokens, parallel=True),
        needs=Needs(stream_layers=head.stream_layers(shape.num_layers), features=True),
        layout=head_layout(head.layers, load.dtype),
        mask_token=token,
        proposed_tokens=wrapped_num_tokens(checkpoint.config),
    )


@dataclass(frozen=True, eq=False)
class LoadedPEagle(LoadedFeatureDrafter):
    """The head in memory, waiting for its share of the cache.

    Attributes:
        mask_token: an id of its embedding.
        proposed_tokens: the K that its wrapper proposes, which it was trained for.
    """

    network: PEagleHead
    mask_token: int
    proposed_tokens: int | None

    def build(self, resources: DrafterResources) -> Drafter:
        warn_untrained(self.proposed_tokens, resources.num_speculative_tokens)
        self.network.share(resources.target.embedding, resources.target.head)
        return PEagleDrafter(self, resources)


class PEagleDrafter(FeatureRowsDrafter):
    """Drafts with one pass a round, whatever K."""

    def __init__(self, loaded: LoadedPEagle, resources: DrafterResources) -> None:
        super().__init__(loaded, resources)
        self._mask_token = loaded.mask_token
        self._most_rows = most_rows(resources.num_speculative_tokens)
        with torch.no_grad():  # once: it never changes
            self._mask_feature = loaded.network.mask_feature().to(self._features.dtype)

    def propose(self, batch: DeviceBatch) -> Draft:
        """One ragged pass over the rows that wait and the masks."""
        if not batch.width:
            return Draft.empty(batch)
        state, slots = self._state, batch.slots
        # Behind a prefix hit the first feature comes with this step.
        wanted = batch.num_featured_drafts
        starts = self._computed[slots]
        rows = parallel_rows(state, batch, starts, wanted, self._most_rows, self._mask_token)
        layout = lay_out(state, rows)
        if layout.is_empty:  # nobody drafts after all
            return Draft.empty(batch)
        hidden, _ = self._pass(layout, self._row_features(rows, layout), 0)
        logits = self._network.head(layout.tails(hidden, wanted, batch.width).flatten(0, 1))
        draft = parallel_draft(state, batch, wanted, logits, self._drafting, self._resources)
        computed = torch.where(wanted > 0, state.num_tokens[slots], starts)
        self._computed.index_copy_(0, slots, computed)
        return draft

    def _row_features(self, rows: PassRows, layout: RowLayout) -> Tensor:
        """[T, F]: what waits for the rows of known tokens, the mask's for those behind them."""
        slots = rows.slots[layout.request]
        waiting = self._features[slots, layout.offset.clamp_max(self._most - 1)]
        is_mask = layout.inputs.rows.positions >= self._state.num_tokens[slots]
        return torch.where(is_mask.unsqueeze(1), self._mask_feature, waiting)
