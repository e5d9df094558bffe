"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head that learns to draft behind tokens it does not know.

A mask row takes the mask token's embedding and a learned vector in place of the target's streams.
Known tokens and a falling share of chains of masks are learned in one pass (`parallel.py`).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.models.drafters.eagle3_config import eagle3_problems
from slipstream.models.drafters.head_checkpoint import MASK_HIDDEN
from slipstream.models.drafters.p_eagle import PEagleHead, read_p_eagle_config
from slipstream.models.loading import LoadOptions
from slipstream.models.tokenizer import Tokenizer
from slipstream.speculative.mask_token import MASK_HEAD_KEYS
from slipstream.train.batches import Batch
from slipstream.train.dense import DENSE, dense_rows, no_caches
from slipstream.train.export import write_checkpoint
from slipstream.train.losses import Agreement, Columns
from slipstream.train.parallel import ParallelLesson
from slipstream.train.parameters import FreshSource, Trainable
from slipstream.train.places import ParallelRows
from slipstream.train.recipe import Lesson, Workshop
from slipstream.train.recipe_eagle3 import OPTIONS as HEAD_OPTIONS
from slipstream.train.recipe_eagle3 import PlannedHead, head_config
from slipstream.train.vocabulary import choose_tokens, membership, offsets

OPTIONS = HEAD_OPTIONS | {"mask_token", "share_embedding"}
LEARNING_RATE = 1e-3
METHOD: dict[str, Any] = {"method": "p-eagle"}

_PLACES, _DECAY, _LAYERS = 8, 1.0, 4
_DRAFT_VOCAB_SIZE = 32_000


class PEagleRecipe:
    """A head in training; see `Recipe`."""

    def __init__(self, workshop: Workshop) -> None:
        settings, target = workshop.settings, workshop.target
        options, shape = settings.options, target.config
        places = settings.num_speculative_tokens or _PLACES
        decay, argmax_weight = settings.place_decay or _DECAY, settings.argmax_weight
        # The row of token 0 would need a feature that comes before it.
        self.lesson = ParallelLesson(1, places, settings.drop_rate, decay, argmax_weight)
        shares = bool(options.share_head)
        if shares and options.draft_vocab_size is not None:
            raise UsageError(
                "--share-head drafts over the target's whole vocabulary; leave --draft-vocab-size "
                "or --share-head out"
            )
        default = min(_DRAFT_VOCAB_SIZE, shape.vocab_size)
        size = None if shares else options.draft_vocab_size or default
        chosen = choose_tokens(workshop.sequences, size, shape.vocab_size, workshop.eos_token_ids)
        self._token_ids = None if chosen is None else chosen.to(target.device)
        self.columns = Columns(self._token_ids, shape.vocab_size)
        self.mask_token = choose_mask_token(workshop)
        self.config = {
            **head_config(workshop, size or shape.vocab_size),
            "architectures": ["PEagleDraftModel"],
            "num_hidden_layers": options.num_layers or _LAYERS,
            "mask_token_id": self.mask_token,
            "num_depths": places,
        }
        planned = read_p_eagle_config(PlannedHead(self.config), MASK_HEAD_KEYS)
        own_embedding = not options.share_embedding
        parts = replace(planned.head.parts, head=not shares, embedding=own_embedding)
        planned = replace(planned, head=replace(planned.head, parts=parts))
        problems = eagle3_problems(planned.head, shape)
        if problems:
            raise UsageError(f"such a head cannot draft for this target: {'; '.join(problems)}")
        self.stream_layers = planned.head.stream_layers(shape.num_layers)
        self._num_layers = planned.head.layers.num_layers
        self.trained = Trainable(FreshSource(target.device, settings.seed))
        longest = max(settings.max_length, shape.max_position_embeddings) + places
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
            self.trained.put("embed_tokens.weight", network.embedding.weight)
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


def build(workshop: Workshop) -> PEagleRecipe:
    """A new head for the target."""
    return PEagleRecipe(workshop)


def choose_mask_token(workshop: Workshop) -> int:
    """The one of `--mask-token`, else the first id that no token has, else the last id: the head
    has an embedding of its own, and the mask's feature tells a mask from that token."""
    token, size = workshop.settings.options.mask_token, workshop.target.config.vocab_size
    if token is not None:
        if not 0 <= token < size:
            raise UsageError(f"--mask-token {token} is none of the {size} ids of the vocabulary")
        return token
    path = workshop.target.path
    if not (path / "tokenizer.json").is_file():
        return size - 1
    return min(size - 1, max(Tokenizer(path).vocabulary().values()) + 1)
