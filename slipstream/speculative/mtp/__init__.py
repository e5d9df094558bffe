"""`mtp`: multi-token prediction modules, trained with the target, mostly in its checkpoint."""

from collections.abc import Collection, Mapping
from typing import Any

from slipstream.models.config_reader import architecture_names
from slipstream.models.own_drafter import own_drafter_tensors
from slipstream.speculative.method import CheckpointSigns, Method


def holds_language_model(names: Collection[str]) -> bool:
    """Whether the tensors include a language model's layers besides the modules'."""
    rest = set(names) - own_drafter_tensors(names)
    return any(name.removeprefix("model.").startswith("layers.") for name in rest)


def is_module_config(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes MTP modules only, as engines and trainers write it."""
    return str(config.get("model_type")).endswith("_mtp") or any(
        name.endswith(("MTP", "MTPModel", "MTPDraftModel")) for name in architecture_names(config)
    )


def _recognise(signs: CheckpointSigns) -> bool:
    alone = own_drafter_tensors(signs.names) and not holds_language_model(signs.names)
    return bool(alone) or is_module_config(signs.config)


METHOD = Method(
    name="mtp",
    module="slipstream.speculative.mtp.network",
    spellings=("deepseek_mtp", "glm4_moe_mtp", "mimo_mtp", "qwen3_5_mtp", "qwen3_next_mtp"),
    recognise=_recognise,
    library_names=("mtp",),
    is_head=True,
    without_model=True,
    in_target=True,
)
