"""Lists of modules in a quantization_config, such as those that are not quantised.

An entry is a module name, which also matches the module's submodules and may have the wildcards `*`
and `?`, or a regular expression after "re:". The prefixes `model.` and `language_model.` are
optional.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from slipstream.core.errors import CheckpointError
from slipstream.models.config_reader import ConfigReader

_PREFIXES = ("model.", "language_model.")
_EXPRESSION = "re:"
_HEAD = "lm_head"  # in most lists, even if it is tied and not stored


@dataclass(frozen=True)
class ModuleList:
    """The entries of one list, and its key in the config."""

    key: str
    entries: tuple[str, ...]

    def names(self, module: str) -> bool:
        """Whether an entry matches this module."""
        return any(matches(entry, module) for entry in self.entries)

    def require_named(self, modules: Collection[str], path: Path) -> None:
        """Raise CheckpointError if the list has entries but none matches any of these modules."""
        if not self.entries or self.names(_HEAD) or any(map(self.names, modules)):
            return
        raise CheckpointError(
            f"{path}: {self.key} of its quantization config names no module of the checkpoint "
            f"(its first entry is {self.entries[0]!r}); it belongs to another model, or must be "
            "corrected"
        )


NO_MODULES = ModuleList("", ())


def read_list(reader: ConfigReader, key: str) -> ModuleList:
    """Read the list at this key; empty if it is missing."""
    entries = reader.take(key, list, [])
    if not all(isinstance(entry, str) and entry for entry in entries):
        raise reader.error(key, f"must be names of modules, not {entries}")
    require_expressions(reader, key, entries)
    return ModuleList(key, tuple(entries))


def require_expressions(reader: ConfigReader, key: str, entries: Collection[str]) -> None:
    """Raise CheckpointError for an invalid regular expression after "re:"."""
    for entry in entries:
        try:
            re.compile(entry.removeprefix(_EXPRESSION) if entry.startswith(_EXPRESSION) else "")
        except re.error as error:
            raise reader.error(
                key, f"holds {entry!r}, which is no regular expression ({error}); correct it"
            ) from error


def matches(entry: str, module: str) -> bool:
    """Whether an entry of a list matches this module."""
    if entry.startswith(_EXPRESSION):
        pattern = entry.removeprefix(_EXPRESSION)
        return any(re.match(pattern, name) is not None for name in (module, bare(module)))
    return any(
        fnmatchcase(name, one) or fnmatchcase(name, f"{one}.*")
        for name, one in ((module, entry), (bare(module), bare(entry)))
    )


def bare(name: str) -> str:
    """A module's name without the prefixes that differ between exports."""
    while name.startswith(_PREFIXES):
        name = name.partition(".")[2]
    return name
