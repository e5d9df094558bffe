"""What a checkpoint says of drafting with mask tokens."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.models.checkpoint import Checkpoint
from slipstream.speculative.parallel import MASK_ID_KEYS as _ID_KEYS
from slipstream.speculative.pard.features import PARD2_KEYS

_KIND, _TRAINED = "spd_type", ("para_num", "num_depths")

MASK_TOKEN_KEYS = (*_ID_KEYS, _KIND, *_TRAINED, *PARD2_KEYS)
"""Keys of config.json that say how to draft and leave the network as it is."""

MASK_HEAD_KEYS = (
    *_ID_KEYS,
    *_TRAINED,
    "down_sample_ratio",
    "down_sample_ratio_min",
    "num_draft_layers",
    "parallel_drafting",
)
"""Mask tokens of drafting heads, and what trainers note of the training."""

logger = logging.getLogger("slipstream")


@dataclass(frozen=True)
class MaskToken:
    """What a checkpoint says of its mask token.

    Attributes:
        token_id: None when it does not say.
        trained_tokens: draft tokens from one pass that it was trained for; None when it does not
            say.
    """

    token_id: int | None
    trained_tokens: int | None


def drafts_in_parallel(config: Mapping[str, Any]) -> bool:
    """Whether a language model's config.json says that it was trained to (PARD, PARD-2)."""
    return config.get(_KIND) in ("pard", "pard2") or config.get("pard_token") is not None


def reads_features(config: Mapping[str, Any]) -> bool:
    """Whether it wants the target's features beside token ids (PARD-2)."""
    return bool(config.get("pard2")) or config.get(_KIND) == "pard2"


def read_mask_token(checkpoint: Checkpoint) -> MaskToken:
    """Raises CheckpointError for values that are not ids."""
    ids = [_number(checkpoint, key) for key in _ID_KEYS]
    trained = [_number(checkpoint, key) for key in _TRAINED]
    return MaskToken(_first(ids), _first(trained))


def choose_mask_token(
    config_file: Path,
    said: MaskToken,
    given: int | None,
    vocab_size: int,
    otherwise: str = "",
) -> int:
    """The user's mask token, or else the checkpoint's.

    Args:
        vocab_size: ids that the drafter's embedding has.
        otherwise: what else the user could do.

    Raises:
        UsageError: neither names one.
        CheckpointError: it is no id.
    """
    token = said.token_id if given is None else given
    if token is None:
        raise UsageError(
            f"speculative_config: parallel drafting needs the id of the drafter's mask token, and "
            f"{config_file} has no pard_token; give it as pard_token{otherwise}"
        )
    if not 0 <= token < vocab_size:
        raise CheckpointError(
            f"the drafter's mask token {token} is none of the {vocab_size} ids of its vocabulary; "
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


def parallel_note(method: str, mask: MaskToken, beside: str = "") -> str:
    """What a user should know of such a drafter."""
    token = "unknown: give pard_token" if mask.token_id is None else mask.token_id
    trained = f"; it was trained for {mask.trained_tokens}" if mask.trained_tokens else ""
    return (
        f"it gives all draft tokens from one pass (method {method}){beside}, with mask token "
        f"{token}{trained}"
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
