"""`p-eagle`: EAGLE-3 heads that draft all K tokens in one pass (arXiv 2602.01469).

Known tokens are rows of (feature, token) as in a chain (`heads/feature_rows.py`), followed by mask
rows, which have the mask token's embedding and the learned mask feature.
"""

from functools import partial

import torch
from torch import Tensor

from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.rows import PassRows, RowLayout, lay_out
from slipstream.speculative.drafter import Draft, DrafterResources
from slipstream.speculative.heads.feature_rows import FeatureRowsDrafter
from slipstream.speculative.heads.loading import load_network
from slipstream.speculative.heads.method import Head, HeadMethod
from slipstream.speculative.model_options import ModelKeys
from slipstream.speculative.p_eagle.network import PEagleConfig, PEagleHead, read_p_eagle_config
from slipstream.speculative.parallel.rows import (
    most_rows,
    parallel_rows,
    warn_untrained,
)


class PEagleDrafter(FeatureRowsDrafter):
    """Drafts all K tokens in one pass."""

    def __init__(self, head: Head[PEagleConfig, PEagleHead], resources: DrafterResources) -> None:
        warn_untrained(head.config.num_tokens, resources.num_speculative_tokens)
        super().__init__(head, resources)
        token = head.config.mask.token_id
        assert token is not None, "`with_options` chose one"
        self._mask_token = token
        self._most_rows = most_rows(resources.num_speculative_tokens)
        with torch.no_grad():  # computed once, as it is constant
            self._mask_feature = head.network.mask_feature().to(self._features.dtype)

    def propose(self, batch: DeviceBatch) -> Draft:
        """Run one ragged pass over the pending rows and the mask rows."""
        state, slots = self._state, batch.slots
        # After a prefix hit the first feature comes with this step.
        wanted = batch.num_featured_drafts
        known = state.num_tokens.index_select(0, slots)
        starts = self._computed.index_select(0, slots)
        rows = parallel_rows(
            *(batch, known, starts, wanted, self._most_rows, self._mask_token), self._excerpt(slots)
        )
        layout = lay_out(state, rows)
        if layout.is_empty:  # no request drafts
            return Draft.empty(batch)
        features = self._row_features(rows, layout)
        hidden, _ = self._pass(layout.inputs, layout.token_ids, features, 0)
        places = wanted, batch.width, batch.drafts_fill
        logits = self._network.head(layout.tails(hidden, *places).flatten(0, 1))
        draft = self._drafting.draft_at_once(batch, wanted, logits)
        self._computed.index_copy_(0, slots, batch.where_drafts(wanted, known, starts))
        return draft

    def _row_features(self, rows: PassRows, layout: RowLayout) -> Tensor:
        """[T, F]: stored features for the rows of known tokens, the mask feature for mask rows."""
        slots = rows.slots[layout.request]
        waiting = self._features[slots, layout.offset.clamp_max(self._most - 1)]
        is_mask = layout.inputs.rows.positions >= self._state.num_tokens[slots]
        return torch.where(is_mask.unsqueeze(1), self._mask_feature, waiting)


HEAD = HeadMethod(
    name="p-eagle",
    read=read_p_eagle_config,
    network=partial(load_network, PEagleHead),
    drafter=PEagleDrafter,
    keys=ModelKeys(
        parallel=True,
        remedy="this head drafts all tokens at once; leave it out, or choose a head for a chain",
        mask_token=True,
        cache=True,
        window=True,
    ),
)
