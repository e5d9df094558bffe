"""PARD (An et al. 2025, arXiv 2504.18583): a draft model that learns to fill mask tokens.

It starts from a draft model (`--init`) or from nothing. Position i of a draft is the row of a mask
token i tokens after the last known one; the loss is that of a draft model at every position.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.models.decoder_config import DecoderConfig
from slipstream.train.batches import TrainingBatch
from slipstream.train.language_model import SHAPE_OPTIONS, LanguageModelRecipe, initial_checkpoint
from slipstream.train.parallel import ParallelRecipe, ParallelRows
from slipstream.train.plan import RunPlan
from slipstream.train.vocabulary import choose_mask_token

_ROWS = 8  # a vocabulary grows by a multiple of this, which kernels prefer


class PardRecipe(LanguageModelRecipe, ParallelRecipe[DecoderConfig]):
    """A parallel draft model in training; see `Recipe`."""

    OPTIONS = SHAPE_OPTIONS | {"mask_token", "place_decay", "drop_rate"}
    METHOD = "pard"
    NUM_DRAFT_TOKENS = 8

    @classmethod
    def changes(cls, plan: RunPlan) -> Mapping[str, Any]:
        mask_token, num_rows = mask_token_and_rows(plan)
        return {
            "pard_token": mask_token,
            "spd_type": "pard",
            "para_num": plan.num_draft_tokens,
            "vocab_size": num_rows,
        }

    @property
    def mask_token(self) -> int:
        return int(self.config_json["pard_token"])

    def logits(self, batch: TrainingBatch, rows: ParallelRows) -> Tensor:
        ids = batch.token_ids[:, rows.anchor]
        ids = torch.where(rows.depth > 0, self.mask_token, ids)
        return self.next_logits(ids, rows.positions, rows.mask).view(*ids.shape, -1)


def mask_token_and_rows(plan: RunPlan) -> tuple[int, int]:
    """(the id of the mask token, rows of the drafter's embedding).

    The id comes from `--mask-token`, else from `--init`, else it is the first unused one. If all
    are used, the drafter gets some rows more than the target.
    """
    size, init = plan.shape.vocab_size, initial_checkpoint(plan)
    if init is not None:
        size = max(size, int(init.config.get("vocab_size", 0)))
        stated = init.config.get("pard_token")
        if plan.settings.options.mask_token is None and isinstance(stated, int):
            return stated, size
    token = choose_mask_token(plan, size)
    return token, size if token < size else size + _ROWS
