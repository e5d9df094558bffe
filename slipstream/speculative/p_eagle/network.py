"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head that drafts several tokens in parallel.

Rows of unknown tokens read a mask token, and instead of the target's streams a learned vector of
the same width, `mask_hidden`, which goes through the same norms and fc. Everything else is as in
EAGLE-3; most heads have several layers and their own embedding. Trainers publish `mask_hidden` as
[1, 1, N].
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from slipstream.layers.parameters import Part
from slipstream.models.decoder_config import DecoderConfig
from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.rows import PassRows, RowLayout, lay_out
from slipstream.speculative.drafter import Draft, DrafterLimits, DrafterResources
from slipstream.speculative.eagle3.network import Eagle3Config, Eagle3Head, read_eagle3_config
from slipstream.speculative.heads.checkpoint import MASK_HIDDEN, HeadCheckpoint
from slipstream.speculative.heads.feature_rows import FeatureRowsDrafter
from slipstream.speculative.heads.loading import HeadContext, load_network
from slipstream.speculative.heads.method import Head, HeadMethod
from slipstream.speculative.model_options import ModelKeys, ModelOptions
from slipstream.speculative.options import TargetModel
from slipstream.speculative.parallel.rows import (
    MASK_HEAD_KEYS,
    MaskToken,
    choose_mask_token,
    most_rows,
    parallel_note,
    parallel_rows,
    read_mask_token,
    warn_untrained,
)


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """The config of a P-EAGLE head.

    Attributes:
        mask: the mask token stated by the checkpoint.
        config_file: path of its config.json.
        has_weights: whether the checkpoint has weights, or only a config.
        mask_columns: size of the stored mask_hidden; None if there is none.
    """

    mask: MaskToken
    config_file: Path
    has_weights: bool
    mask_columns: int | None

    @property
    def notes(self) -> tuple[str, ...]:
        return (parallel_note("p-eagle", self.mask),)

    def feature_columns(self, target_width: int) -> int:
        """Number of the target's hidden values that a row reads."""
        return (self.num_read if self.use_aux_hidden_state else 1) * target_width

    def problems(self, target: DecoderConfig) -> list[str]:
        problems = super().problems(target)
        expected = self.fc_columns or self.feature_columns(target.hidden_size)
        if self.has_weights and self.mask_columns is None:
            problems.append(
                f"it has no tensor {MASK_HIDDEN}, which stands for the features of tokens that are "
                "not known yet; export it again with that tensor"
            )
        elif self.mask_columns not in (None, expected):
            problems.append(
                f"its {MASK_HIDDEN} has {self.mask_columns} numbers where a token's features have "
                f"{expected}; it was trained for another target, or its config.json does not list "
                "all layers that it reads"
            )
        return problems

    def with_options(self, options: ModelOptions, target: TargetModel) -> Self:
        token = choose_mask_token(
            self.config_file, self.mask, options.mask_token, self.layers.vocab_size
        )
        return replace(self, mask=replace(self.mask, token_id=token))

    def limits(self, options: ModelOptions, longest: int, identity: str) -> DrafterLimits:
        limits = super().limits(options, longest, identity)
        return replace(limits, max_speculative_tokens=self.trained_tokens, parallel=True)


def read_p_eagle_config(checkpoint: HeadCheckpoint) -> PEagleConfig:
    """Read the keys of EAGLE-3 and those of mask tokens."""
    head, mask = read_eagle3_config(checkpoint, MASK_HEAD_KEYS), read_mask_token(checkpoint)
    entry = checkpoint.entries.get(MASK_HIDDEN) if checkpoint.has_weights else None
    return PEagleConfig(
        **{**vars(head), "trained_tokens": mask.trained_tokens},
        mask=mask,
        config_file=checkpoint.config_file,
        has_weights=checkpoint.has_weights,
        mask_columns=None if entry is None else entry.shape[0],
    )


class PEagleHead(Eagle3Head):
    """Maps token ids and features, including mask rows, to the lm_head's input."""

    def __init__(self, context: HeadContext, config: PEagleConfig) -> None:
        super().__init__(context, config)
        self._target_width = context.target_width
        columns = config.feature_columns(context.target_width)
        self._mask_hidden = context.source.vector([Part(MASK_HIDDEN, columns)])

    def mask_feature(self) -> Tensor:
        """The feature of mask rows, [1, H]."""
        streams = torch.split(self._mask_hidden.unsqueeze(0), self._target_width, -1)
        return self.project(streams[0], streams)


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
