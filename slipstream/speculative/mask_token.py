"""What a checkpoint says of drafting with mask tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.core.errors import CheckpointError
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.drafters.pard2 import PARD2_KEYS

# The id of the mask token, in the order in which other engines look for it.
_ID_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
_KIND, _TRAINED = "spd_type", "para_num"

MASK_TOKEN_KEYS = (*_ID_KEYS, _KIND, _TRAINED, *PARD2_KEYS)
"""Keys of config.json that say how to draft and leave the network as it is."""


@dataclass(frozen=True)
class MaskToken:
    """How a checkpoint wants to be asked for several tokens at once.

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
    """Raises CheckpointError for ids that are none."""
    ids = [_number(checkpoint, key) for key in _ID_KEYS]
    found = next((token for token in ids if token is not None), None)
    return MaskToken(found, _number(checkpoint, _TRAINED))


def _number(checkpoint: Checkpoint, key: str) -> int | None:
    value = checkpoint.config.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise CheckpointError(
            f'{checkpoint.config_file}: "{key}" must be a whole number, not {value!r}'
        )
    return value
