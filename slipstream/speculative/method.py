"""What a drafting method says of itself before any of its code is imported."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CheckpointSigns:
    """What tells the kinds of drafters apart.

    Attributes:
        config: the content of config.json.
        names: of the tensors, without a leading `model.`; none where the weights are not there.
    """

    config: Mapping[str, Any]
    names: frozenset[str]

    @property
    def model_type(self) -> str | None:
        found = self.config.get("model_type")
        return found if isinstance(found, str) else None

    @property
    def architectures(self) -> frozenset[str]:
        return frozenset(map(str, self.config.get("architectures") or ()))


@dataclass(frozen=True, kw_only=True)
class Method:
    """A drafting method.

    Attributes:
        name: its `method` in a `speculative_config`.
        module: where its options are read and its drafter is loaded; imported when it is used.
        spellings: other values of `method` that mean it.
        recognise: whether a checkpoint is one for it, or as which of `variants`.
        weight_files: names of files that hold weights of no other method.
        library_names: what the speculators library calls its checkpoints.
        is_head: its checkpoints are drafting heads; the module says in `HEAD` how they are loaded.
        drafts_trees: it can draft trees of tokens.
        without_model: it is named where others name a checkpoint.
        in_target: the target's own checkpoint may hold its network.
        parallel_of: the method that drafts one by one with a network of the same shape, where
            `parallel_drafting` chooses between them.
        implied_by: a key of a `speculative_config` that means it where no method is named.
        match_keys: the keys for its shortest and its longest match, if it looks matches up.
    """

    name: str
    module: str
    spellings: tuple[str, ...] = ()
    recognise: Callable[[CheckpointSigns], bool | str] = lambda signs: False
    variants: tuple[str, ...] = ()
    weight_files: tuple[str, ...] = ()
    library_names: tuple[str, ...] = ()
    is_head: bool = False
    drafts_trees: bool = False
    without_model: bool = False
    in_target: bool = False
    parallel_of: str | None = None
    implied_by: str | None = None
    match_keys: tuple[str, str] | None = None
