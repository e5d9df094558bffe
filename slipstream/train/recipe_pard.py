"""PARD (An et al. 2025, arXiv 2504.18583): a draft model that learns to fill mask tokens.

It starts from a draft model (`--init`) or from nothing. Position i of a draft is the row of a mask
token i tokens after the last known one; the loss is that of a draft model at every position.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.train.batches import Batch
from slipstream.train.language_model import SHAPE_OPTIONS, LanguageModelRecipe, initial_checkpoint
from slipstream.train.parallel import ParallelRecipe, ParallelRows
from slipstream.train.plan import RunPlan
from slipstream.train.vocabulary import first_unused_id, require_mask_token

_ROWS = 8  # a vocabulary grows by a multiple of this, which kernels prefer


class PardRecipe(LanguageModelRecipe, ParallelRecipe):
    """A parallel draft model in training; see `Recipe`."""

    OPTIONS = SHAPE_OPTIONS | {"mask_token", "place_decay", "drop_rate"}
    METHOD = "pard"
    NUM_DRAFT_TOKENS = 8

    @classmethod
    def changes(cls, plan: RunPlan) -> Mapping[str, Any]:
        mask_token, num_rows = choose_mask_token(plan)
        return {
            "pard_token": mask_token,
            "spd_type": "pard",
            "para_num": plan.num_draft_tokens,
            "vocab_size": num_rows,
        }

    @property
    def mask_token(self) -> int:
        return int(self.config["pard_token"])

    def logits(self, batch: Batch, rows: ParallelRows) -> Tensor:
        ids = batch.token_ids[:, rows.anchor]
        ids = torch.where(rows.depth > 0, self.mask_token, ids)
        return self.next_logits(ids, rows.positions, rows.mask).view(*ids.shape, -1)


def choose_mask_token(plan: RunPlan) -> tuple[int, int]:
    """(the id of the mask token, rows of the drafter's embedding).

    The id is that of `--mask-token`, else of `--init`, else the first unused one. If all are used,
    the drafter gets some rows more than the target.
    """
    size, token = plan.shape.vocab_size, plan.settings.options.mask_token
    init = initial_checkpoint(plan)
    if init is not None:
        size = max(size, int(init.config.get("vocab_size", 0)))
        stated = init.config.get("pard_token")
        if token is None and isinstance(stated, int):
            return stated, size
    if token is not None:
        require_mask_token(token, size)
    else:
        token = first_unused_id(plan, size)
    return token, size if token < size else size + _ROWS
