"""What kind of drafter a checkpoint is, from its config.json and the names of its tensors.

The published kinds look alike: heads say `LlamaForCausalLM` and differ by a key or a tensor. The
tests stand in the order in which the first that holds is right.
"""

from collections.abc import Collection, Mapping
from typing import Any

from slipstream.models.modules_beside import own_drafter_tensors
from slipstream.speculative.medusa.checkpoint import names_medusa
from slipstream.speculative.mtp.checkpoint import holds_language_model, is_module_config

# Language models and heads of one shape, that draft one by one or all at once.
DRAFT_MODEL, PARALLEL = "draft_model", "pard"
CHAIN_HEAD, PARALLEL_HEAD = "eagle3", "p-eagle"

# What the speculators library calls its kinds.
_WRAPPED = {
    "dflash": "dflash",
    "dspark": "dflash",
    "eagle": "eagle",
    "eagle3": CHAIN_HEAD,
    "medusa": "medusa",
    "mtp": "mtp",
    "peagle": PARALLEL_HEAD,
}
_DFLASH = {"DFlashDraftModel", "DSparkDraftModel", "Qwen3DSparkModel"}
_EAGLE3 = {
    "Eagle3DraftModel",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "LlamaEagle3DraftModel",
    "LlamaForCausalLMEagle3",
    "PEagleDraftModel",
}
_ASSISTANTS = {"gemma4_assistant", "gemma4_unified_assistant"}
_MASK_TOKENS = ("ptd_token_id", "pard_token", "mask_token_id")


def recognise(config: Mapping[str, Any], tensor_names: Collection[str]) -> str:
    """The kind of drafter.

    Args:
        config: the content of config.json.
        tensor_names: as stored, or canonical; none when the weights are not there.

    Returns:
        A method name of `speculative_config`, or a kind that has none here yet; `draft_model` for
        an ordinary language model.
    """
    wrapped = config.get("speculators_model_type")
    if wrapped is not None:
        return _WRAPPED.get(str(wrapped), str(wrapped))
    names = {name.removeprefix("model.") for name in tensor_names}
    architectures = set(map(str, config.get("architectures") or ()))
    model_type = config.get("model_type")
    if is_module_config(config) or (own_drafter_tensors(names) and not holds_language_model(names)):
        return "mtp"
    if "dflash_config" in config or architectures & _DFLASH:
        return "dflash"
    if model_type in _ASSISTANTS or "Gemma4AssistantForCausalLM" in architectures:
        return "gemma4_assistant"
    if names_medusa(config, names):
        return "medusa"
    if model_type == "mlp_speculator" or "MLPSpeculatorPreTrainedModel" in architectures:
        return "mlp_speculator"
    if _is_eagle3(config, architectures, names):
        masked = any(config.get(key) is not None for key in _MASK_TOKENS)
        parallel = masked or "mask_hidden" in names or "PEagleDraftModel" in architectures
        return PARALLEL_HEAD if parallel else CHAIN_HEAD
    if config.get("pard2"):
        return "pard2"
    if config.get("spd_type") == "pard" or "pard_token" in config:
        return "pard"
    is_eagle1 = model_type == "eagle" or "EagleLlamaForCausalLM" in architectures
    return "eagle" if is_eagle1 or _is_eagle1(names) else DRAFT_MODEL


def kind_of_drafter(config: Mapping[str, Any]) -> str | None:
    """By config.json alone: the kind of a checkpoint that only drafts, None for any other."""
    kind = recognise(config, ())
    return None if kind == DRAFT_MODEL else kind


def _is_eagle3(config: Mapping[str, Any], architectures: set[str], names: set[str]) -> bool:
    if architectures & _EAGLE3 or any(name.startswith("Eagle3Qwen") for name in architectures):
        return True
    marked = "d2t" in names or any(
        name.startswith("midlayer.") or name == "layers.0.hidden_norm.weight" for name in names
    )
    return marked or "draft_vocab_size" in config or "eagle_config" in config


def _is_eagle1(names: set[str]) -> bool:
    fused = "fc.weight" in names or "fusion_fc.weight" in names
    return fused and "layers.0.input_layernorm.weight" not in names
