"""Draft models: small language models trained to predict what the target predicts.

Self-distillation (Zhou et al. 2023, arXiv 2310.08461): KL against the target's distribution at
every token, best over text that the target wrote itself (`--generate`).
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from slipstream.models.decoder_config import DecoderConfig
from slipstream.train.batches import TrainingBatch
from slipstream.train.chain import ChainRecipe, DraftPosition
from slipstream.train.language_model import LanguageModelRecipe
from slipstream.train.losses import Agreement, agreement


class DraftRecipe(LanguageModelRecipe, ChainRecipe[DecoderConfig]):
    """A draft model in training; see `Recipe`."""

    METHOD = "draft_model"
    NUM_DRAFT_TOKENS = 4

    def logits(self, batch: TrainingBatch) -> Tensor:
        """[B * S, V]."""
        positions = torch.arange(batch.shape[1], device=batch.token_ids.device)
        return self.next_logits(batch.token_ids, positions, None)

    def positions(self, batch: TrainingBatch) -> Iterable[DraftPosition]:
        """The first position; later ones are learned as the first ones of later drafts."""
        yield DraftPosition(self.logits(batch), batch.predictions, batch.weight.flatten())

    def evaluate(self, batch: TrainingBatch) -> tuple[list[Agreement], Tensor]:
        found = agreement(self.logits(batch), batch.predictions)
        weight = torch.ones_like(found.greedy)
        positions = []
        for count in range(self.num_draft_tokens):
            greedy, sampled = (batch.shifted(x, count) for x in (found.greedy, found.sampled))
            positions.append(Agreement(greedy, sampled))
            weight = weight * batch.shifted(batch.weight.flatten(), count)
        return positions, weight
