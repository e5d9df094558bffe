"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head that learns to draft behind tokens it does not know.

A mask row takes the mask token's embedding and a learned vector in place of the target's streams.
Known tokens and a falling share of chains of masks are learned in one pass (`parallel.py`).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.models.loading import LoadOptions
from slipstream.speculative.heads.checkpoint import MASK_HIDDEN
from slipstream.speculative.p_eagle.network import PEagleConfig, PEagleHead, read_p_eagle_config
from slipstream.speculative.parallel.mask_token import MASK_HEAD_KEYS
from slipstream.train.batches import Batch
from slipstream.train.dense import DENSE, dense_rows, no_caches
from slipstream.train.files import write_checkpoint
from slipstream.train.losses import Agreement, Columns
from slipstream.train.parallel import DROP_RATE, ParallelLesson
from slipstream.train.parameters import FreshSource, Trainable
from slipstream.train.places import ParallelRows
from slipstream.train.recipe import Lesson, Order, Workshop
from slipstream.train.recipe_eagle3 import OPTIONS as HEAD_OPTIONS
from slipstream.train.recipe_eagle3 import PlannedHead, draft_vocab_size, head_config, require_fit
from slipstream.train.vocabulary import (
    choose_tokens,
    mask_token_of_head,
    membership,
    offsets,
    require_draft_vocabulary,
)

OPTIONS = HEAD_OPTIONS | {"mask_token", "share_embedding", "drop_rate"}
LEARNING_RATE = 1e-3
METHOD: dict[str, Any] = {"method": "p-eagle"}

PLACES, _DECAY, _LAYERS = 8, 1.0, 4


class PEagleRecipe:
    """A head in training; see `Recipe`."""

    def __init__(self, workshop: Workshop) -> None:
        order, settings, target = workshop.order, workshop.settings, workshop.target
        options, shape = settings.options, target.config
        places = workshop.order.places
        decay, rate = settings.place_decay or _DECAY, settings.drop_rate or DROP_RATE
        # The row of token 0 would need a feature that comes before it.
        self.lesson = ParallelLesson(1, places, rate, decay, settings.argmax_weight)
        size, eos = draft_vocab_size(order), order.target.eos_token_ids
        chosen = choose_tokens(workshop.sequences, size, shape.vocab_size, eos)
        self._token_ids = None if chosen is None else chosen.to(target.device)
        self.columns = Columns(self._token_ids, shape.vocab_size)
        self.config, planned = _plan(order)
        self.mask_token = self.config["mask_token_id"]
        shares, own_embedding = bool(options.share_head), not options.share_embedding
        self.stream_layers = planned.head.stream_layers(shape.num_layers)
        self._num_layers = planned.head.layers.num_layers
        self.trained = Trainable(FreshSource(target.device, settings.seed))
        longest = max(order.length, shape.max_position_embeddings) + places
        load = LoadOptions(torch.float32, target.device, "auto", longest)
        self.network = PEagleHead(DENSE, self.trained, planned, shape.hidden_size, load)
        # Before the embedding gets the target's numbers, or it would be taken for the target's.
        self.network.share(target.network.embedding, target.network.head)
        self._begin(workshop, shares, own_embedding)

    def _begin(self, workshop: Workshop, shares: bool, own_embedding: bool) -> None:
        """With what the target has of the same kind, as an EAGLE-3 head begins."""
        network = workshop.target.network
        named = dict(self.trained.named())
        fusion = named["fc.weight"]
        width = len(fusion)
        fusion[:, -width:] += torch.eye(width, device=fusion.device)
        self.trained.put("norm.weight", network.norm.weight)
        if own_embedding:
            table = network.embedding.weight
            assert isinstance(table, Tensor)
            self.trained.put("embed_tokens.weight", table)
        if not shares:
            weight = network.head.weight
            assert isinstance(weight, Tensor)
            rows = weight if self._token_ids is None else weight[self._token_ids]
            self.trained.put("lm_head.weight", rows)
        generator = torch.Generator().manual_seed(workshop.settings.seed)
        mask = named[MASK_HIDDEN]
        mask.copy_(torch.randn(mask.shape, generator=generator) * 0.02)

    def logits(self, batch: Batch, rows: ParallelRows) -> Tensor:
        """[B, Q, Vd]; see `parallel.Network`."""
        size, is_mask = len(batch.token_ids), rows.depth > 0
        known = int((~is_mask).sum())
        before = rows.anchor[:known] - 1
        seen = batch.seen

        def at(states: Tensor) -> Tensor:
            return states[:, before].flatten(0, 1)

        features = self.network.project(at(seen.hidden), [*map(at, seen.streams)])
        masks = self.network.mask_feature().expand(size, len(is_mask) - known, -1)
        features = torch.cat((features.view(size, known, -1), masks.to(features.dtype)), 1)
        ids = torch.where(is_mask, self.mask_token, batch.token_ids[:, rows.anchor])
        dense = dense_rows(size, rows.positions, rows.mask)
        caches = no_caches(self._num_layers)
        normed, _ = self.network(ids.flatten(), features.flatten(0, 1), dense, caches)
        return self.network.head(normed).view(size, len(is_mask), -1)

    def learn(self, batch: Batch, generator: torch.Generator) -> Lesson:
        return self.lesson.learn(self.logits, batch, generator)

    def test(self, batch: Batch) -> tuple[list[Agreement], Tensor]:
        return self.lesson.test(self.logits, batch)

    def export(self, folder: Path, dtype: torch.dtype) -> None:
        tensors = {name.removeprefix("model."): value for name, value in self.trained.named()}
        tensors[MASK_HIDDEN] = tensors[MASK_HIDDEN].view(1, 1, -1)
        if self._token_ids is not None:
            tensors["d2t"] = offsets(self._token_ids)
            tensors["t2d"] = membership(self._token_ids, self.config["vocab_size"])
        write_checkpoint(folder, self.config, tensors, dtype)


def check(order: Order) -> None:
    """Sizes, layers and tokens that do not fit the target."""
    _plan(order)


def build(workshop: Workshop) -> PEagleRecipe:
    """A new head for the target."""
    return PEagleRecipe(workshop)


def _plan(order: Order) -> tuple[dict[str, Any], PEagleConfig]:
    """The config.json of a head, and the same read."""
    require_draft_vocabulary(order)
    options = order.settings.options
    config = {
        **head_config(order),
        "architectures": ["PEagleDraftModel"],
        "num_hidden_layers": options.num_layers or _LAYERS,
        "mask_token_id": mask_token_of_head(order),
        "num_depths": order.places,
    }
    planned = read_p_eagle_config(PlannedHead(config), MASK_HEAD_KEYS)
    shared, own_embedding = bool(options.share_head), not options.share_embedding
    parts = replace(planned.head.parts, head=not shared, embedding=own_embedding)
    planned = replace(planned, head=replace(planned.head, parts=parts))
    require_fit(planned.head, order.shape)
    return config, planned
