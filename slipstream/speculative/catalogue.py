"""All drafting methods, and the recognition of checkpoints. A new method is one line here."""

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any, Final

from slipstream.speculative.method import CheckpointSigns, Method

# The folders of the methods. A checkpoint belongs to the first method that recognises it. The order
# matters: heads of several kinds say `LlamaForCausalLM` and differ only by a key or a tensor, and
# any language model may be a draft model.
_FOLDERS = (
    "mtp",
    "dflash2",
    "dspark",
    "dflash",
    "gemma4_assistant",
    "medusa",
    "mlp_speculator",
    "p_eagle",
    "eagle3",
    "pard",
    "eagle",
    "draft_model",
    "ngram",
    "suffix",
    "custom",
    "combination",
)


def _method(folder: str) -> Method:
    method = import_module(f"slipstream.speculative.{folder}").METHOD
    assert isinstance(method, Method)
    return method


METHODS: Final = {method.name: method for method in map(_method, _FOLDERS)}
LANGUAGE_MODEL: Final = "draft_model"  # any language model is of this kind
LOOKUPS: Final = tuple(
    it.name for it in METHODS.values() if it.without_model and not it.in_target
)  # draft for any target without a checkpoint
IN_TARGET: Final = tuple(it.name for it in METHODS.values() if it.in_target)
DRAFTING_KEYS: Final = frozenset(key for method in METHODS.values() for key in method.config_keys)
"""Keys of a language model's config.json that only concern drafting."""


def method_named(name: str) -> Method | None:
    """The method of this name or alias; None if there is none."""
    found = (it for it in METHODS.values() if name == it.name or name in it.spellings)
    return next(found, None)


def recognise(config: Mapping[str, Any], tensor_names: Collection[str]) -> str:
    """The kind of drafter of a checkpoint.

    Args:
        config: the content of config.json.
        tensor_names: as stored, or canonical; empty if the weights are not there.

    Returns:
        The name of a method or variant, or the speculators library's name of a kind that is not
        supported here; `LANGUAGE_MODEL` for an ordinary language model.
    """
    wrapped = config.get("speculators_model_type")
    if wrapped is not None:
        known = (it.name for it in METHODS.values() if wrapped in it.library_names)
        return next(known, str(wrapped))
    names = frozenset(name.removeprefix("model.") for name in tensor_names)
    signs = CheckpointSigns(config, names)
    found = ((method.name, method.kind_of(signs)) for method in METHODS.values())
    return next(name if kind is True else str(kind) for name, kind in found if kind)


def parallel_method(kind: str) -> Method | None:
    """The method of language models of this kind, if they draft all tokens in one pass."""
    found = (it for it in METHODS.values() if it.parallel_of == LANGUAGE_MODEL)
    return next((it for it in found if kind in (it.name, *it.variants)), None)
