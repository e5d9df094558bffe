"""`pard`: language models that draft all tokens in one pass (PARD, PARD-2)."""

from collections.abc import Mapping
from typing import Any

from slipstream.speculative.method import CheckpointSigns, Method
from slipstream.speculative.parallel import MASK_ID_KEYS, TRAINED_KEYS

_PARD2_KEYS = ("pard2", "pard2_scale", "pard2_proj_bias", "pard2_target_dim", "pard2_target_layers")


def drafts_in_parallel(config: Mapping[str, Any]) -> bool:
    """Whether a language model was trained for parallel drafting, by its config.json."""
    return config.get("spd_type") in ("pard", "pard2") or config.get("pard_token") is not None


def reads_features(config: Mapping[str, Any]) -> bool:
    """Whether it reads the target's features besides token ids (PARD-2)."""
    return bool(config.get("pard2")) or config.get("spd_type") == "pard2"


def _recognise(signs: CheckpointSigns) -> bool | str:
    if signs.config.get("pard2"):
        return "pard2"
    return signs.config.get("spd_type") == "pard" or "pard_token" in signs.config


METHOD = Method(
    name="pard",
    module="slipstream.speculative.pard.drafter",
    recognise=_recognise,
    variants=("pard2",),
    config_keys=(*MASK_ID_KEYS, *TRAINED_KEYS, "spd_type", *_PARD2_KEYS),
    parallel_of="draft_model",
    implied_by="pard_token",
)
