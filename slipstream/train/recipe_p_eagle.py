"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head that drafts all tokens in one pass over masks.

A mask row takes the mask token's embedding, and a learned vector in place of the target's streams.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slipstream.speculative.heads.checkpoint import MASK_HIDDEN, HeadCheckpoint
from slipstream.speculative.p_eagle.network import PEagleConfig, PEagleHead, read_p_eagle_config
from slipstream.train.batches import TrainingBatch
from slipstream.train.dense import DenseContext
from slipstream.train.parallel import ParallelRecipe, ParallelRows
from slipstream.train.plan import RunPlan
from slipstream.train.recipe import planned_checkpoint
from slipstream.train.recipe_eagle3 import Eagle3Recipe, head_config, initialise_head, require_fit
from slipstream.train.sequences import Sequences
from slipstream.train.target import Target
from slipstream.train.vocabulary import mask_token_of_head

_LAYERS = 4


class PEagleRecipe(ParallelRecipe[PEagleConfig]):
    """A head in training; see `Recipe`."""

    OPTIONS = Eagle3Recipe.OPTIONS | {"mask_token", "share_embedding", "drop_rate"}
    METHOD = "p-eagle"
    NUM_DRAFT_TOKENS = 8
    FIRST = 1  # the row of token 0 would need a feature of the token before

    def __init__(self, plan: RunPlan, target: Target, sequences: Sequences) -> None:
        super().__init__(plan, target, sequences)
        self.mask_token = self.config_json["mask_token_id"]
        self.stream_layers = self.config.stream_layers(target.config.num_layers)
        self.network = PEagleHead(self.context, self.config)
        # `share` must not find the target's numbers in the head's own embedding yet.
        self.network.share(target.network.embedding, target.network.head)
        initialise_head(self.trained, target, self.vocabulary)
        generator = torch.Generator().manual_seed(plan.settings.seed)
        size = len(dict(self.trained.named())[MASK_HIDDEN])
        self.trained.put(MASK_HIDDEN, torch.randn(size, generator=generator) * 0.02)

    @classmethod
    def configure(cls, plan: RunPlan) -> tuple[dict[str, Any], PEagleConfig]:
        options = plan.settings.options
        config = {
            **head_config(plan),
            "architectures": ["PEagleDraftModel"],
            "num_hidden_layers": options.num_layers or _LAYERS,
            "mask_token_id": mask_token_of_head(plan),
            "num_depths": plan.num_draft_tokens,
        }
        planned = read_p_eagle_config(planned_checkpoint(HeadCheckpoint, config))
        shared, own_embedding = bool(options.share_head), not options.share_embedding
        parts = replace(planned.parts, head=not shared, embedding=own_embedding)
        planned = replace(planned, parts=parts)
        require_fit(planned, plan.shape)
        return config, planned

    @classmethod
    def draft_vocab_size(cls, plan: RunPlan) -> int | None:
        return Eagle3Recipe.draft_vocab_size(plan)

    def logits(self, batch: TrainingBatch, rows: ParallelRows) -> Tensor:
        size, is_mask = len(batch.token_ids), rows.depth > 0
        known = batch.token_ids.shape[1] - self.FIRST  # without waiting for the device to count
        before = rows.anchor[:known] - 1

        def at(states: Tensor) -> Tensor:
            return states[:, before].flatten(0, 1)

        features = self.network.project(at(batch.states.hidden), [*map(at, batch.states.streams)])
        masks = self.network.mask_feature().expand(size, len(is_mask) - known, -1)
        features = torch.cat((features.view(size, known, -1), masks.to(features.dtype)), 1)
        ids = torch.where(is_mask, self.mask_token, batch.token_ids[:, rows.anchor])
        context = DenseContext(size, self.config.layers.num_layers)
        inputs = context.rows(rows.positions, rows.mask)
        normed, _ = self.network(ids.flatten(), features.flatten(0, 1), inputs, context.caches)
        return self.network.head(normed).view(size, len(is_mask), -1)

    def published(self) -> dict[str, Tensor]:
        tensors = super().published()
        return {**tensors, MASK_HIDDEN: tensors[MASK_HIDDEN].view(1, 1, -1)}
