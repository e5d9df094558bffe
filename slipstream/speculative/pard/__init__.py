"""`pard`: language models that draft all tokens in one pass (PARD, PARD-2)."""

from slipstream.speculative.method import MOST_AT_ONCE, CheckpointSigns, Method
from slipstream.speculative.parallel import MASK_ID_KEYS, TRAINED_KEYS

_PARD2_KEYS = ("pard2", "pard2_scale", "pard2_proj_bias", "pard2_target_dim", "pard2_target_layers")


PARD2 = "pard2"  # reads the target's features besides token ids


def _recognise(signs: CheckpointSigns) -> bool | str:
    kind = signs.config.get("spd_type")
    if signs.config.get("pard2") or kind == PARD2:
        return PARD2
    return kind == "pard" or signs.config.get("pard_token") is not None


METHOD = Method(
    name="pard",
    module="slipstream.speculative.pard.drafter",
    recognise=_recognise,
    variants=(PARD2,),
    config_keys=(*MASK_ID_KEYS, *TRAINED_KEYS, "spd_type", *_PARD2_KEYS),
    parallel_of="draft_model",
    implied_by="pard_token",
    most_chosen=MOST_AT_ONCE,
)
