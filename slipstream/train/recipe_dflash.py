"""DFlash (Chen et al. 2026): draft blocks that are filled in one pass over features of the target.

Blocks begin at random tokens of a sequence. The rows of a block see the features of the tokens
before it and each other, and slot j learns the token at its own place. It counts by
exp(-(j - 1) / g).
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.models.loading import LoadOptions
from slipstream.speculative.dflash.config import (
    DFlashConfig,
    dflash_problems,
    read_dflash_config,
)
from slipstream.speculative.dflash.network import DFlashNetwork
from slipstream.train.batches import Batch
from slipstream.train.dense import DENSE, DenseRows, dense_rows, no_caches
from slipstream.train.files import write_checkpoint
from slipstream.train.losses import Agreement, Columns
from slipstream.train.parameters import FreshSource, Trainable
from slipstream.train.recipe import Lesson, Order, Workshop
from slipstream.train.recipe_eagle3 import PlannedHead, usual_layers
from slipstream.train.unroll import Place, learn_chain, test_chain
from slipstream.train.vocabulary import mask_token_of_head

OPTIONS = frozenset(
    {
        "aux_layers",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "intermediate_size",
        "mask_token",
        "place_decay",
    }
)
LEARNING_RATE = 6e-4
METHOD: dict[str, Any] = {"method": "dflash"}

PLACES, _LAYERS = 7, 4
_BLOCKS = 16  # of a sequence, learned in one pass


class DFlashRecipe:
    """A drafter in training; see `Recipe`."""

    def __init__(self, workshop: Workshop) -> None:
        settings, target = workshop.settings, workshop.target
        self._places = workshop.order.places
        # g is 4 for blocks of 8 and 7 for blocks of 16.
        self._decay = settings.place_decay or math.exp(-2 / (self._places + 1))
        self._argmax_weight = settings.argmax_weight
        self.columns = Columns(None, target.config.vocab_size)
        self.config, planned = _plan(workshop.order)
        self._mask_token, self._num_layers = planned.mask_token, planned.layers.num_layers
        self.stream_layers = planned.stream_layers(target.config.num_layers)
        self.trained = Trainable(FreshSource(target.device, settings.seed))
        longest = max(workshop.order.length, target.config.max_position_embeddings) + self._places
        load = LoadOptions(torch.float32, target.device, "auto", longest)
        self.network = DFlashNetwork(DENSE, self.trained, planned, target.config.hidden_size, load)
        self.network.share(target.network.embedding, target.network.head)
        self.trained.put("norm.weight", target.network.norm.weight)

    def places(self, batch: Batch, anchors: Tensor) -> list[Place]:
        """Slots 1 on of the blocks that begin at these tokens [A] of every sequence."""
        size, length = batch.shape
        device, width = batch.token_ids.device, self._places + 1
        caches = no_caches(self._num_layers)
        tokens = torch.arange(length, device=device)
        context_rows = dense_rows(size, tokens)
        streams = [stream.flatten(0, 1) for stream in batch.seen.streams]
        self.network.store(self.network.context(streams), context_rows, caches)
        slot = torch.arange(width, device=device).repeat(len(anchors))
        anchor = anchors.repeat_interleave(width)
        own = anchor == anchor.unsqueeze(1)
        mask = torch.cat((tokens < anchor.unsqueeze(1), own), 1)
        rows: DenseRows = dense_rows(size, anchor + slot, mask)
        rows.context.update(context_rows.context)
        ids = torch.where(slot > 0, self._mask_token, batch.token_ids[:, anchor])
        hidden = self.network(ids.flatten(), rows, caches).view(size, len(anchors), width, -1)
        sequence = torch.arange(size, device=device).unsqueeze(1) * length
        found = []
        for place in range(1, width):
            # What the target says behind the token before.
            index = (sequence + anchors + place - 1).flatten()
            logits = self.network.head(hidden[:, :, place].flatten(0, 1))
            weight = batch.follows.flatten()[index]
            found.append(Place(logits, batch.wanted.rows(index), batch.best_column[index], weight))
        return found

    def learn(self, batch: Batch, generator: torch.Generator) -> Lesson:
        length = batch.shape[1]
        begins = torch.randperm(length - self._places - 1, generator=generator)[:_BLOCKS] + 1
        places = self.places(batch, begins.sort().values.to(batch.token_ids.device))
        return learn_chain(iter(places), self._decay, self._argmax_weight)

    def test(self, batch: Batch) -> tuple[list[Agreement], Tensor]:
        length = batch.shape[1]
        step = max(1, length // _BLOCKS)
        begins = torch.arange(1, length - self._places, step, device=batch.token_ids.device)
        return test_chain(iter(self.places(batch, begins)))

    def export(self, folder: Path, dtype: torch.dtype) -> None:
        tensors = {name.removeprefix("model."): value for name, value in self.trained.named()}
        write_checkpoint(folder, self.config, tensors, dtype)


def check(order: Order) -> None:
    """Sizes, layers and tokens that do not fit the target."""
    _plan(order)


def build(workshop: Workshop) -> DFlashRecipe:
    """A new drafter for the target."""
    return DFlashRecipe(workshop)


def _plan(order: Order) -> tuple[dict[str, Any], DFlashConfig]:
    """The config.json of a drafter, and the same read."""
    config = _block_config(order, order.places + 1)
    planned = read_dflash_config(PlannedHead(config))
    if problems := dflash_problems(planned, order.shape):
        raise UsageError(f"such a drafter does not fit this target: {'; '.join(problems)}")
    return config, planned


def _block_config(order: Order, block_size: int) -> dict[str, Any]:
    """A config.json as the authors publish it: layers of Qwen3's kind."""
    options, shape = order.settings.options, order.shape
    entered = options.aux_layers or usual_layers(shape.num_layers)
    layers = options.num_layers or _LAYERS
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": block_size,
        "dflash_config": {
            "mask_token_id": mask_token_of_head(order),
            "target_layer_ids": [layer - 1 for layer in entered],
        },
        "num_target_layers": shape.num_layers,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": options.intermediate_size or shape.intermediate_size,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "num_attention_heads": options.num_heads or shape.num_heads,
        "num_key_value_heads": options.num_kv_heads or shape.num_kv_heads,
        "head_dim": options.head_dim or shape.head_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope.theta,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab_size,
    }
