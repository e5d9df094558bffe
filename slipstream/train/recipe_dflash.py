"""DFlash (Chen et al. 2026): drafts a block of tokens in one pass, from features of the target.

Blocks start at random tokens of a sequence. The rows of a block attend to the features of the
tokens before it and to each other; slot j predicts the token at its own position, with the weight
exp(-(j - 1) / g) in the loss.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.speculative.dflash.network import DFlashConfig, DFlashNetwork, read_dflash_config
from slipstream.speculative.heads.checkpoint import HeadCheckpoint
from slipstream.train.batches import TrainingBatch
from slipstream.train.chain import ChainRecipe, DraftPosition
from slipstream.train.dense import DenseContext
from slipstream.train.plan import RunPlan
from slipstream.train.recipe import LAYER_OPTIONS, layer_config, planned_checkpoint
from slipstream.train.recipe_eagle3 import usual_layers
from slipstream.train.sequences import Sequences
from slipstream.train.target import Target
from slipstream.train.vocabulary import mask_token_of_head

_LAYERS = 4
_BLOCKS = 16  # draft blocks of a sequence in one pass; in long ones one for each 16 tokens


class DFlashRecipe(ChainRecipe[DFlashConfig]):
    """A drafter in training; see `Recipe`."""

    OPTIONS = LAYER_OPTIONS | {"aux_layers", "num_layers", "mask_token", "place_decay"}
    METHOD = "dflash"
    NUM_DRAFT_TOKENS = 7
    LEARNING_RATE = 6e-4

    def __init__(self, plan: RunPlan, target: Target, sequences: Sequences) -> None:
        super().__init__(plan, target, sequences)
        # g is 4 for blocks of 8 and 7 for blocks of 16.
        self.decay = plan.settings.place_decay or math.exp(-2 / (self.num_draft_tokens + 1))
        self.stream_layers = self.config.stream_layers(target.config.num_layers)
        self.network = DFlashNetwork(self.context, self.config)
        self.network.share(target.network.embedding, target.network.head)
        self.trained.put("norm.weight", target.network.norm.weight)

    @classmethod
    def configure(cls, plan: RunPlan) -> tuple[dict[str, Any], DFlashConfig]:
        config = _drafter_config(plan)
        planned = read_dflash_config(planned_checkpoint(HeadCheckpoint, config))
        if problems := planned.problems(plan.shape):
            raise UsageError(f"such a drafter does not fit this target: {'; '.join(problems)}")
        return config, planned

    def positions(self, batch: TrainingBatch) -> Iterator[DraftPosition]:
        length = batch.shape[1]
        step = max(1, length // _BLOCKS)
        return self.blocks(batch, torch.arange(1, length - self.num_draft_tokens, step))

    def random_positions(
        self, batch: TrainingBatch, generator: torch.Generator
    ) -> Iterator[DraftPosition]:
        count = batch.shape[1] - self.num_draft_tokens - 1
        blocks = max(_BLOCKS, batch.shape[1] // _BLOCKS)
        drawn = torch.randperm(count, generator=generator)[:blocks] + 1
        return self.blocks(batch, drawn.sort().values)

    def blocks(self, batch: TrainingBatch, anchors: Tensor) -> Iterator[DraftPosition]:
        """Slots 1, 2, ... of the blocks that start at tokens `anchors` [A] of each sequence."""
        size, length = batch.shape
        device, width = batch.token_ids.device, self.num_draft_tokens + 1
        anchors = anchors.to(device)
        context = DenseContext(size, self.config.layers.num_layers)
        tokens = torch.arange(length, device=device)
        streams = [stream.flatten(0, 1) for stream in batch.states.streams]
        features = self.network.context(streams)
        self.network.store(features, context.rows(tokens), context.caches)
        slot = torch.arange(width, device=device).repeat(len(anchors))
        anchor = anchors.repeat_interleave(width)
        own = anchor == anchor.unsqueeze(1)
        mask = torch.cat((tokens < anchor.unsqueeze(1), own), 1)
        rows = context.rows(anchor + slot, mask)
        ids = torch.where(slot > 0, self.config.mask_token, batch.token_ids[:, anchor])
        hidden = self.network(ids.flatten(), rows, context.caches)
        hidden = hidden.view(size, len(anchors), width, -1)
        for position in range(1, width):
            logits = self.network.head(hidden[:, :, position].flatten(0, 1))
            index = batch.index(anchors + position - 1)  # rows of the previous tokens
            weight = batch.weight.flatten()[index]
            yield DraftPosition(logits, batch.predictions.rows(index), weight)


def _drafter_config(plan: RunPlan) -> dict[str, Any]:
    """config.json in the authors' layout, with Qwen3 layers."""
    options, shape = plan.settings.options, plan.shape
    entered = options.aux_layers or usual_layers(shape.num_layers)
    layers = options.num_layers or _LAYERS
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": plan.num_draft_tokens + 1,
        "dflash_config": {
            "mask_token_id": mask_token_of_head(plan),
            "target_layer_ids": [layer - 1 for layer in entered],
        },
        "num_target_layers": shape.num_layers,
        **layer_config(plan),
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "attention_bias": False,
    }
