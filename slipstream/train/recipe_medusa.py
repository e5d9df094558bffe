"""Medusa heads (Cai et al. 2024, arXiv 2401.10774, "Medusa-1"): the target stays as it is.

Head i predicts the token i + 2 positions after the one whose hidden state it reads. It starts as
the target's lm_head after a layer that adds nothing, and its loss counts 0.8^i.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slipstream.speculative.medusa.checkpoint import TOKEN_MAP, MedusaShape
from slipstream.speculative.medusa.network import MedusaHeads
from slipstream.train.batches import TrainingBatch
from slipstream.train.chain import ChainRecipe, DraftPosition
from slipstream.train.plan import RunPlan
from slipstream.train.sequences import Sequences
from slipstream.train.target import Target


class MedusaRecipe(ChainRecipe[None]):
    """Heads in training; see `Recipe`."""

    OPTIONS = frozenset({"draft_vocab_size", "share_head", "num_layers", "place_decay"})
    METHOD = "medusa"
    NUM_DRAFT_TOKENS, DECAY = 4, 0.8

    def __init__(self, plan: RunPlan, target: Target, sequences: Sequences) -> None:
        super().__init__(plan, target, sequences)
        options, heads = plan.settings.options, plan.num_draft_tokens
        shape = MedusaShape(
            num_heads=heads,
            num_layers=options.num_layers or 1,
            hidden_size=target.config.hidden_size,
            shares_layer=(False,) * heads,
            bias=True,
            heads="target" if options.share_head else "own",
            num_rows=self.vocabulary.size,
            num_legal_tokens=self.vocabulary.size,
            vocabulary=self.vocabulary.token_ids,
        )
        self.network = MedusaHeads(self.context, shape)
        self.network.share(target.network.embedding, target.network.head)
        rows = self.vocabulary.rows(target.network.head.weight)
        for name, tensor in self.trained.named():
            if name.startswith("lm_head"):
                tensor.copy_(rows)
            else:
                tensor.zero_()

    @classmethod
    def configure(cls, plan: RunPlan) -> tuple[dict[str, Any], None]:
        """Without a shape to read: that depends on the vocabulary, which the data choose."""
        config: dict[str, Any] = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": plan.shape.hidden_size,
            "vocab_size": plan.shape.vocab_size,
            "num_heads": plan.num_draft_tokens,
            "num_hidden_layers": plan.settings.options.num_layers or 1,
            "medusa_fc_bias": True,
        }
        size = cls.draft_vocab_size(plan)
        if size not in (None, plan.shape.vocab_size):
            config["truncated_vocab_size"] = size
        return config, None

    def positions(self, batch: TrainingBatch) -> Iterator[DraftPosition]:
        """The predictions of each head after every token."""
        hidden = batch.states.hidden.flatten(0, 1)
        state = self.network.start(hidden, self.num_draft_tokens)
        row = torch.arange(len(hidden), device=hidden.device)
        for head in range(self.num_draft_tokens):
            logits, state = self.network.logits(head, state, row)
            # The draft starts after the target's own next token.
            index = row.add(head + 1).clamp_max(len(row) - 1)
            weight = batch.shifted(batch.weight.flatten(), head + 1)
            yield DraftPosition(logits, batch.predictions.rows(index), weight)

    def published(self) -> dict[str, Tensor]:
        tensors = dict(self.trained.named())
        if self.vocabulary.token_ids is not None:
            tensors[TOKEN_MAP] = self.vocabulary.token_ids
        return tensors
