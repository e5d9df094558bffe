"""The description of a drafting method, which is known before its code is imported."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.models.config_reader import architecture_names

# Largest K that "auto" chooses: of most methods, of those that look up matches at no cost, and of
# those whose draft tokens all come from one pass of their layers.
MOST_CHOSEN, MOST_LOOKED_UP, MOST_AT_ONCE = 7, 12, 15


@dataclass(frozen=True)
class CheckpointSigns:
    """The properties of a checkpoint by which kinds of drafters are recognised.

    Attributes:
        config: the content of config.json.
        names: names of the tensors, without a leading `model.`; empty if there are no weights.
    """

    config: Mapping[str, Any]
    names: frozenset[str]

    @property
    def model_type(self) -> str | None:
        found = self.config.get("model_type")
        return found if isinstance(found, str) else None

    @property
    def architectures(self) -> frozenset[str]:
        return frozenset(architecture_names(self.config))

    def has_tensors(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self.names)


@dataclass(frozen=True, kw_only=True)
class Method:
    """A drafting method.

    Attributes:
        name: its `method` in a `speculative_config`.
        module: the module that reads its options and loads its drafter; imported on first use.
        spellings: aliases, as values of `method`.
        model_types, architectures: values in config.json that only this method's checkpoints have.
        recognise: whether another checkpoint belongs to this method; or the name of its variant in
            `variants`.
        config_keys: keys of config.json about drafting, which do not change a language model's
            network.
        weight_files: names of weight files that only this method has.
        library_names: names of its checkpoints in the speculators library.
        is_head: its checkpoints are drafting heads, which the module's `HEAD` loads.
        drafts_trees: it can draft token trees.
        without_model: it needs no checkpoint, so `model` may have the method's name instead.
        in_target: the target's own checkpoint may have its network.
        parallel_of: the autoregressive method with a network of the same shape; the key
            `parallel_drafting` chooses between the two.
        implied_by: a key of a `speculative_config` that implies this method if none is named.
        match_keys: the keys for its shortest and longest match, if it looks up matches.
        most_chosen: the largest K if the engine chooses it.
    """

    name: str
    module: str
    spellings: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    recognise: Callable[[CheckpointSigns], bool | str] = lambda signs: False
    variants: tuple[str, ...] = ()
    config_keys: tuple[str, ...] = ()
    weight_files: tuple[str, ...] = ()
    library_names: tuple[str, ...] = ()
    is_head: bool = False
    drafts_trees: bool = False
    without_model: bool = False
    in_target: bool = False
    parallel_of: str | None = None
    implied_by: str | None = None
    match_keys: tuple[str, str] | None = None
    most_chosen: int = MOST_CHOSEN

    def kind_of(self, signs: CheckpointSigns) -> bool | str:
        """Whether a checkpoint belongs to this method; or the name of its variant in `variants`."""
        named = signs.model_type in self.model_types
        return (
            named or not signs.architectures.isdisjoint(self.architectures) or self.recognise(signs)
        )
