"""Medusa heads (Cai et al. 2024, arXiv 2401.10774, "Medusa-1"): the target stays as it is.

Head i guesses i + 2 places behind the token whose hidden state it reads. It begins as the target's
own lm_head behind a layer that adds nothing, and its loss counts by 0.8^i.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.models.loading import LoadOptions
from slipstream.speculative.medusa.checkpoint import TOKEN_MAP, MedusaShape
from slipstream.speculative.medusa.network import MedusaHeads
from slipstream.train.batches import Batch
from slipstream.train.dense import DENSE
from slipstream.train.files import write_checkpoint
from slipstream.train.losses import Agreement, Columns
from slipstream.train.parameters import FreshSource, Trainable
from slipstream.train.places import shifted
from slipstream.train.recipe import Lesson, Order, Workshop
from slipstream.train.unroll import Place, learn_chain, test_chain
from slipstream.train.vocabulary import choose_tokens, require_draft_vocabulary

OPTIONS = frozenset({"draft_vocab_size", "share_head", "num_layers", "place_decay"})
LEARNING_RATE = 1e-3
METHOD: dict[str, Any] = {"method": "medusa"}

PLACES, _DECAY = 4, 0.8


class MedusaRecipe:
    """Heads in training; see `Recipe`."""

    stream_layers: tuple[int, ...] = ()

    def __init__(self, workshop: Workshop) -> None:
        settings, target = workshop.settings, workshop.target
        options, shape = settings.options, target.config
        self._heads = workshop.order.places
        self._layers = options.num_layers or 1
        self._decay = settings.place_decay or _DECAY
        self._argmax_weight = settings.argmax_weight
        chosen = choose_tokens(
            workshop.sequences,
            options.draft_vocab_size,
            shape.vocab_size,
            workshop.order.target.eos_token_ids,
        )
        self._token_ids = None if chosen is None else chosen.to(target.device)
        self.columns = Columns(self._token_ids, shape.vocab_size)
        size = shape.vocab_size if chosen is None else len(chosen)
        planned = MedusaShape(
            num_heads=self._heads,
            num_layers=self._layers,
            hidden_size=shape.hidden_size,
            shares_layer=(False,) * self._heads,
            bias=True,
            heads="target" if options.share_head else "own",
            num_rows=size,
            num_legal_tokens=size,
            vocabulary=chosen,
        )
        self.trained = Trainable(FreshSource(target.device, settings.seed))
        load = LoadOptions(torch.float32, target.device, "auto", workshop.order.length)
        self.network = MedusaHeads(DENSE, self.trained, planned, load)
        self.network.share(target.network.head)
        self._target = target
        self._begin()

    def _begin(self) -> None:
        weight = self._target.network.head.weight
        assert isinstance(weight, Tensor)
        rows = weight if self._token_ids is None else weight[self._token_ids]
        for name, tensor in self.trained.named():
            if name.startswith("lm_head"):
                tensor.copy_(rows)
            else:
                tensor.zero_()

    def places(self, batch: Batch) -> list[Place]:
        """What each head says behind every token but for the last that it has nothing to learn."""
        hidden = batch.seen.hidden.flatten(0, 1)
        state = self.network.start(hidden, self._heads)
        row = torch.arange(len(hidden), device=hidden.device)
        found = []
        for index in range(self._heads):
            logits, state = self.network.logits(index, state, row)
            # Behind the target's own next token.
            place = row.add(index + 1).clamp_max(len(row) - 1)
            weight = shifted(batch.follows.flatten(), batch.shape, index + 1)
            found.append(Place(logits, batch.wanted.rows(place), batch.best_column[place], weight))
        return found

    def learn(self, batch: Batch, generator: torch.Generator) -> Lesson:
        del generator  # nothing is left to chance
        return learn_chain(iter(self.places(batch)), self._decay, self._argmax_weight)

    def test(self, batch: Batch) -> tuple[list[Agreement], Tensor]:
        return test_chain(iter(self.places(batch)))

    def export(self, folder: Path, dtype: torch.dtype) -> None:
        shape = self._target.config
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": shape.hidden_size,
            "vocab_size": shape.vocab_size,
            "num_heads": self._heads,
            "num_hidden_layers": self._layers,
            "medusa_fc_bias": True,
        }
        tensors = dict(self.trained.named())
        if self._token_ids is not None:
            tensors[TOKEN_MAP] = self._token_ids
            config["truncated_vocab_size"] = len(self._token_ids)
        write_checkpoint(folder, config, tensors, dtype)


def check(order: Order) -> None:
    """Whatever its flags say there are such heads."""
    require_draft_vocabulary(order)


def build(workshop: Workshop) -> MedusaRecipe:
    """New heads for the target."""
    return MedusaRecipe(workshop)
