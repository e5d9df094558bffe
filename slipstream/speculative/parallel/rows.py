"""Parallel drafting: one pass over the waiting tokens, followed by mask tokens.

For each request the pass has the committed tokens that the drafter has not computed, whose last one
is the bonus (or recovered) token, and then K - 1 mask tokens at the positions that follow. With the
ordinary causal mask, the row of the bonus token gives draft token 1, and the row of mask token j
draft token j + 1 (An et al. 2025, PARD; P-EAGLE, arXiv 2602.01469).

Rows of mask tokens write to the slots of the draft tokens that they predict, so that later masks
of the pass attend to them. They never count as computed, and the next pass overwrites these slots
before it reads them. A request has at most K rows more here than in the target's pass.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.models.checkpoint import Checkpoint
from slipstream.runner.device_batch import DeviceBatch
from slipstream.runner.excerpts import Excerpt
from slipstream.runner.rows import PassRows
from slipstream.speculative.parallel import MASK_ID_KEYS, TRAINED_KEYS


def most_rows(num_speculative_tokens: int) -> int:
    """Maximum number of a request's rows in a round's pass; see `DrafterLimits.draft_rows`."""
    return 2 * num_speculative_tokens


def parallel_rows(
    batch: DeviceBatch,
    known: Tensor,
    starts: Tensor,
    wanted: Tensor,
    most: int,
    mask_token: int,
    excerpt: Excerpt,
) -> PassRows:
    """The rows of the pass.

    Args:
        known, starts: [R] int64, numbers of known tokens, and of tokens that the drafter has
            computed.
        wanted: [R] int64, number of draft tokens; a request with 0 has no rows.
        most: see `most_rows`.
        excerpt: the part of the context to which the rows attend.
    """
    starts = excerpt.places(starts)
    waiting = excerpt.places(known) - starts
    lengths = batch.where_drafts(wanted, waiting + wanted - 1, 0)
    return batch.rows(starts, lengths, most, mask_token=mask_token, excerpt=excerpt)


MASK_HEAD_KEYS = (
    *MASK_ID_KEYS,
    *TRAINED_KEYS,
    "down_sample_ratio",
    "down_sample_ratio_min",
    "num_draft_layers",
    "parallel_drafting",
)
"""Keys about mask tokens of drafting heads, and notes on their training."""

logger = logging.getLogger("slipstream")


@dataclass(frozen=True)
class MaskToken:
    """A checkpoint's mask token.

    Attributes:
        token_id: None: not stated.
        trained_tokens: number of draft tokens per pass that it was trained for; None: not stated.
    """

    token_id: int | None
    trained_tokens: int | None


def read_mask_token(checkpoint: Checkpoint) -> MaskToken:
    """Read the mask token; CheckpointError for values that are not ids."""
    ids = [_number(checkpoint, key) for key in MASK_ID_KEYS]
    trained = [_number(checkpoint, key) for key in TRAINED_KEYS]
    return MaskToken(_first(ids), _first(trained))


def choose_mask_token(
    config_file: Path, said: MaskToken, given: int | None, vocab_size: int, otherwise: str = ""
) -> int:
    """The user's mask token, or else the checkpoint's.

    Args:
        vocab_size: number of ids of the drafter's embedding.
        otherwise: another remedy, for the message.

    Raises:
        UsageError: neither the user nor the checkpoint names one.
        CheckpointError: it is not a valid id.
    """
    token = said.token_id if given is None else given
    if token is None:
        raise UsageError(
            f"speculative_config: parallel drafting needs the id of the drafter's mask token, and "
            f"{config_file} has no pard_token; give it as pard_token{otherwise}"
        )
    if not 0 <= token < vocab_size:
        raise CheckpointError(
            f"the drafter's mask token {token} is not in its vocabulary of {vocab_size} ids; "
            "give the right one as pard_token"
        )
    return token


def warn_untrained(trained: int | None, count: int) -> None:
    """Warn if a drafter is asked for more tokens at once than it was trained for."""
    if trained is not None and count > trained:
        logger.warning(
            "the drafter was trained for %d tokens at once and is asked for %d: expect the last "
            "ones to be refused, and num_speculative_tokens=%d to be faster",
            trained,
            count,
            trained,
        )


def parallel_note(method: str, mask: MaskToken) -> str:
    """A note for the user about a drafter with a mask token."""
    token = "unknown: give pard_token" if mask.token_id is None else mask.token_id
    trained = f"; it was trained for {mask.trained_tokens}" if mask.trained_tokens else ""
    return (
        f"it gives all draft tokens from one pass (method {method}), with mask token {token}"
        f"{trained}"
    )


def _first(numbers: list[int | None]) -> int | None:
    return next((number for number in numbers if number is not None), None)


def _number(checkpoint: Checkpoint, key: str) -> int | None:
    value = checkpoint.config.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise CheckpointError(
            f'{checkpoint.config_file}: "{key}" must be a whole number, not {value!r}'
        )
    return value
