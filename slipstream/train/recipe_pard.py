"""PARD (An et al. 2025, arXiv 2504.18583): a draft model that learns to fill mask tokens.

It begins with a draft model (`--init`), or is trained at once. Place i of a draft is the row of a
mask token i places behind the last known one; the loss is that of a draft model, at every place.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.models.checkpoint import Checkpoint, resolve_checkpoint
from slipstream.models.tokenizer import Tokenizer
from slipstream.train.batches import Batch
from slipstream.train.dense import dense_rows, no_caches
from slipstream.train.language_model import SHAPE_OPTIONS, build_language_model, planned
from slipstream.train.losses import Agreement, Columns
from slipstream.train.parallel import DROP_RATE, ParallelLesson
from slipstream.train.places import ParallelRows
from slipstream.train.recipe import Lesson, Order, Workshop

OPTIONS = SHAPE_OPTIONS | {"mask_token", "place_decay", "drop_rate"}
LEARNING_RATE = 5e-4
METHOD: dict[str, Any] = {"method": "pard"}

PLACES, _DECAY = 8, 1.0
_ROWS = 8  # a vocabulary that grows does so by so many, for the kernels' sake


class PardRecipe:
    """A parallel draft model in training; see `Recipe`."""

    stream_layers: tuple[int, ...] = ()

    def __init__(self, workshop: Workshop) -> None:
        settings, shape = workshop.settings, workshop.target.config
        places = workshop.order.places
        decay, rate = settings.place_decay or _DECAY, settings.drop_rate or DROP_RATE
        self.lesson = ParallelLesson(0, places, rate, decay, settings.argmax_weight)
        self.mask_token, num_tokens = choose_mask_token(workshop.order)
        keys = {"pard_token": self.mask_token, "spd_type": "pard", "para_num": places}
        self.model = build_language_model(workshop, num_tokens, **keys)
        self.trained = self.model.trained
        self._vocab_size = shape.vocab_size
        self.columns = Columns(None, shape.vocab_size)

    def logits(self, batch: Batch, rows: ParallelRows) -> Tensor:
        """[B, Q, V]; see `parallel.Network`."""
        size = len(batch.token_ids)
        ids = batch.token_ids[:, rows.anchor]
        ids = torch.where(rows.depth > 0, self.mask_token, ids)
        network = self.model.network
        dense = dense_rows(size, rows.positions, rows.mask)
        hidden, _ = network(ids.flatten(), dense, no_caches(self.model.shape.num_layers))
        return network.head(hidden)[:, : self._vocab_size].view(size, len(rows.anchor), -1)

    def learn(self, batch: Batch, generator: torch.Generator) -> Lesson:
        return self.lesson.learn(self.logits, batch, generator)

    def test(self, batch: Batch) -> tuple[list[Agreement], Tensor]:
        return self.lesson.test(self.logits, batch)

    def export(self, folder: Path, dtype: torch.dtype) -> None:
        self.model.export(folder, dtype)


def check(order: Order) -> None:
    """As of a draft model, with its mask token."""
    planned(order, choose_mask_token(order)[1])


def build(workshop: Workshop) -> PardRecipe:
    """A new parallel draft model, or one that goes on from `--init`."""
    return PardRecipe(workshop)


def choose_mask_token(order: Order) -> tuple[int, int]:
    """(its id, rows that the drafter's embedding needs).

    The one of `--mask-token`, else of `--init`, else the first id that no token has; where all have
    one, the drafter gets some rows more than the target.
    """
    options, size = order.settings.options, order.shape.vocab_size
    if options.init is not None:
        begun = Checkpoint(resolve_checkpoint(options.init)).config
        size = max(size, int(begun.get("vocab_size", 0)))
        stated = begun.get("pard_token")
        if options.mask_token is None and isinstance(stated, int):
            return stated, size
    token = options.mask_token
    if token is not None and not 0 <= token < size:
        raise UsageError(f"--mask-token {token} is none of the {size} ids of the vocabulary")
    if token is None:
        token = _first_free(order.target.path, size)
    if token < size:
        return token, size
    return token, size + _ROWS


def _first_free(target: Path, vocab_size: int) -> int:
    """The first id behind those of all tokens; without a tokenizer, behind the vocabulary."""
    if not (target / "tokenizer.json").is_file():
        return vocab_size
    return max(Tokenizer(target).vocabulary().values()) + 1
