"""Lists of modules in a quantization_config, such as those that are not quantised.

An entry is a module name, which also matches the module's submodules and may have the wildcards `*`
and `?`, or a regular expression after "re:". The prefixes `model.` and `language_model.` are
optional.
"""

import logging
import re
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from slipstream.core.errors import CheckpointError
from slipstream.models.config_reader import ConfigReader

logger = logging.getLogger("slipstream")

_PREFIXES = ("model.", "language_model.")
_EXPRESSION = "re:"
_HEAD = "lm_head"  # in most lists, even if it is tied and not stored
_ANYWHERE = "*"  # first in patterns of recipes for many models, such as *router*


@dataclass(frozen=True)
class ModuleList:
    """The entries of one list, and its key in the config."""

    key: str
    entries: tuple[str, ...]

    def names(self, module: str) -> bool:
        """Whether an entry matches this module."""
        return any(matches(entry, module) for entry in self.entries)

    def require_named(self, modules: Collection[str], path: Path) -> None:
        """Raise CheckpointError if the list names modules but none of these."""
        own = [entry for entry in self._of_layers if not entry.startswith(_ANYWHERE)]
        if own and self._is_about_none(modules):
            raise CheckpointError(
                f"{self._mismatch(path, own[0])}; it belongs to another model, or must be corrected"
            )

    def warn_unless_named(self, modules: Collection[str], path: Path) -> None:
        """Warn if the list has entries, but none of them names one of these modules."""
        if self._of_layers and self._is_about_none(modules):
            logger.warning("%s", self._mismatch(path, self._of_layers[0]))

    @property
    def _of_layers(self) -> list[str]:
        return [entry for entry in self.entries if not matches(entry, _HEAD)]

    def _is_about_none(self, modules: Collection[str]) -> bool:
        return not any(matches(entry, module) for entry in self._of_layers for module in modules)

    def _mismatch(self, path: Path, entry: str) -> str:
        return (
            f"{path}: {self.key} of its quantization config names no module of the checkpoint "
            f"(such as {entry!r})"
        )


NO_MODULES = ModuleList("", ())


def read_list(reader: ConfigReader, key: str) -> ModuleList:
    """Read the list at this key, or the one name; empty if it is missing."""
    entries = reader.take_any(key) or []
    entries = [entries] if isinstance(entries, str) else entries
    if not isinstance(entries, list) or not all(
        isinstance(entry, str) and entry for entry in entries
    ):
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
