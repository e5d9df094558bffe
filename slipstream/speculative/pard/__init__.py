"""`pard`: language models that draft all tokens in one pass (PARD, PARD-2)."""

from slipstream.speculative.method import CheckpointSigns, Method


def _recognise(signs: CheckpointSigns) -> bool | str:
    if signs.config.get("pard2"):
        return "pard2"
    return signs.config.get("spd_type") == "pard" or "pard_token" in signs.config


METHOD = Method(
    name="pard",
    module="slipstream.speculative.pard.drafter",
    recognise=_recognise,
    variants=("pard2",),
    parallel_of="draft_model",
    implied_by="pard_token",
)
