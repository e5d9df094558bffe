"""Finds the language model in the checkpoint of a multimodal model.

There, `text_config` in config.json is the language model's config, and its tensors have a longer
prefix. Tensors of towers and projectors are ignored here.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from slipstream.models.config_reader import architecture_names

_INNER = "text_config"
_WRAPPED = "ForConditionalGeneration"
# Keys of the outer config that override `text_config`; `_OF_EITHER` only fill in missing ones.
_OF_THE_WHOLE: Final = ("architectures", "quantization_config", "compression_config")
_TIED = "tie_word_embeddings"
# Keys of the whole where the language model's are not apart.
_OF_IMAGES: Final = (
    *("vision_config", "image_token_id", "video_token_id", "vision_token_id"),
    *("vision_start_token_id", "vision_end_token_id"),
)
_OF_EITHER: Final = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "pad_token_id")
# Prefixes of the language model's tensors, and those that replace them.
_PREFIXES: Final = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_NOT_LANGUAGE: Final = (
    *("visual.", "vision_tower.", "vision_model.", "vision_embedder.", "audio_tower."),
    *("embed_vision.", "embed_audio.", "mm_projector.", "multi_modal_projector."),
)


def is_wrapper(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a multimodal model."""
    names = architecture_names(config)
    return len(names) == 1 and names[0].endswith(_WRAPPED)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's config: taken from `text_config`, or `config` itself without one."""
    inner = config.get(_INNER)
    if not is_wrapper(config):
        return config
    if not isinstance(inner, Mapping):
        return {key: value for key, value in config.items() if key not in _OF_IMAGES}
    whole = {key: config[key] for key in (*_OF_THE_WHOLE, _TIED) if key in config}
    either = {key: config[key] for key in _OF_EITHER if config.get(key) is not None}
    own = {key: value for key, value in inner.items() if value is not None}
    return {**either, **own, **whole}


def text_names(names: Iterable[str], wrapped: bool = False) -> dict[str, str]:
    """Map the stored names of the language model's tensors to canonical names. If no tensor has a
    multimodal prefix, and the model is not `wrapped` all the same, all names are unchanged."""
    names = list(names)
    if not wrapped and not any(name.startswith(tuple(_PREFIXES)) for name in names):
        return {name: name for name in names}
    found = {}
    for name in names:
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        if prefix or not name.removeprefix("model.").startswith(_NOT_LANGUAGE):
            found[name] = _PREFIXES.get(prefix, "") + name.removeprefix(prefix)
    return found


def stored_name(name: str, stored: Iterable[str]) -> str:
    """How a checkpoint with these stored names calls the tensor with this canonical name."""
    stored = list(stored)
    for prefix, short in _PREFIXES.items():
        if name.startswith(short) and any(it.startswith(prefix) for it in stored):
            return prefix + name.removeprefix(short)
    return name
