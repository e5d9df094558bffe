"""Command lines as `vllm serve` takes them, rewritten for `slipstream serve`.

Typer does not support these itself: flags of other names, `--no-NAME` for every switch, several
values after one name, and keys of JSON objects as flags (`--speculative-config.model PATH`).
"""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from slipstream.cli.vllm_flags import (
    ENTRIES,
    SHORT,
    Unsupported,
    arguments_for,
    negated,
    takes_value,
)
from slipstream.core.errors import UsageError

_CONFIG = "--config"
_JSON, _NUMBERS = "<json>", "<numbers>"  # metavars
_MODEL_FLAGS = ("-m", "--model", "-hf", "-hfr", "--hf-repo")  # of other programs
_ALIKE = 0.75  # of two words, one of which may be a misspelling of the other


@dataclass
class _ArgumentGroup:
    """Arguments that belong together, and the option that they set; None: MODEL, or unknown."""

    arguments: list[str]
    option: Any = None

    @property
    def is_model(self) -> bool:
        return self.option is None and not self.arguments[0].startswith("-")


def rewritten(arguments: Sequence[str], options: Sequence[Any]) -> list[str]:
    """The arguments as the parser's options declare them; UsageError for flags that are refused."""
    line = _Line(options)
    line.read(arguments)
    return line.finish()


def unknown_flag(name: str, declared: Iterable[str], command: str) -> UsageError:
    """The error for a flag that a command does not have: the reason, or a similar flag.

    Args:
        declared: the command's flags, and the names of its arguments.
        command: as its help is asked for.
    """
    declared = [*declared]
    if name in _MODEL_FLAGS and "model" in declared:
        return UsageError(
            f"no such flag: {name}; give the model's file or name as the argument: {command} MODEL"
        )
    entry = ENTRIES.get(name)
    if isinstance(entry, Unsupported):
        return UsageError(f"{name} is not supported: {entry.why}")
    if entry is not None:
        return UsageError(f"no such flag: {name}; slipstream serve alone accepts it")
    flags = [it for it in (*declared, *ENTRIES) if it.startswith("--")]
    for word, other in (("--disable-", "--enable-"), ("--enable-", "--disable-")):
        opposite = name.replace(word, other, 1)
        if opposite != name and opposite in flags:
            return UsageError(f"no such flag: {name}; did you mean {negated(opposite)}?")
    near = (
        [it for it in flags if _means(name, it)]
        or [it for it in flags if it.startswith(f"{name}-")]
        or [it for it in declared if name.startswith("--") and it.endswith(name[1:])]
    )
    if len(near) == 1:
        entry = ENTRIES.get(near[0])
        why = f", which is not supported: {entry.why}" if isinstance(entry, Unsupported) else "?"
        return UsageError(f"no such flag: {name}; did you mean {near[0]}{why}")
    also = "" if name.startswith("--") else "; docs/from_llama_cpp.md has the flags of llama.cpp"
    return UsageError(f"no such flag: {name}; see {command} --help{also}")


def _means(name: str, flag: str) -> bool:
    """Whether a name is a misspelling of a flag. Words are compared singly: min is never max."""
    given, words = name.strip("-").split("-"), flag.strip("-").split("-")
    if "".join(given) == "".join(words):
        return True
    return len(given) == len(words) and all(
        one == other
        or (min(len(one), len(other)) > 2 and (one.startswith(other) or other.startswith(one)))
        or SequenceMatcher(None, one, other).ratio() >= _ALIKE
        for one, other in zip(given, words, strict=True)
    )


class _Line:
    def __init__(self, options: Sequence[Any], of_file: bool = False) -> None:
        self._parser_options, self._of_file = options, of_file
        self._options = {
            name: option
            for option in options
            for name in (*option.opts, *option.secondary_opts)
            if name.startswith("-")
        }
        self._groups: list[_ArgumentGroup] = []
        self._file: list[_ArgumentGroup] = []  # from --config
        self._keys: dict[str, dict[str, Any]] = {}  # of JSON objects
        self._cleared: set[int] = set()  # options that --no-NAME took back
        self._rest: list[str] = []  # after --

    def read(self, arguments: Sequence[str]) -> None:
        waiting = deque(arguments)
        while waiting:
            token = waiting.popleft()
            if token == "--":
                self._rest = [token, *waiting]
                return
            if token.startswith("-") and token != "-":
                self._flag(token, waiting)
            else:
                self._groups.append(_ArgumentGroup([token]))

    def groups(self) -> list[_ArgumentGroup]:
        """All groups that were read; keys of an object are combined."""
        for name, keys in self._keys.items():
            option = self._options.get(name)
            if option is not None and any(it.option is option for it in self._groups):
                raise UsageError(f"{name} is given whole and by its keys; give one of them")
            self.read([f"{name}={json.dumps(keys)}"])
        return self._groups

    def finish(self) -> list[str]:
        self.groups()
        models = dict.fromkeys(it.arguments[0] for it in self._groups if it.is_model)
        # A second MODEL may be the value of an unknown flag, which the parser will refuse.
        unknown = any(it.option is None and not it.is_model for it in self._groups)
        if len(models) > 1 and not unknown:
            raise UsageError(f"{' and '.join(models)} are two models; name one, as MODEL")
        given = {id(it.option) for it in self._groups if it.option is not None} | self._cleared
        if not models:
            models = dict.fromkeys(it.arguments[0] for it in self._file if it.is_model)
        groups = [it for it in self._file if id(it.option) not in given] + self._groups
        words = [word for it in groups if not it.is_model for word in it.arguments]
        return [*models, *words, *self._rest]

    def _flag(self, token: str, waiting: deque[str]) -> None:
        spelled, is_set, value = token.partition("=")
        name, _, key = spelled.partition(".")
        name = name.replace("_", "-")
        name = SHORT.get(name, name) if name not in self._options else name
        positive = f"--{name.removeprefix('--no-')}"
        if key:
            self._key(name, key, value if is_set else self._value(spelled, waiting))
        elif is_set and name.startswith("--no-"):
            raise UsageError(f"{name} takes no value")
        elif name in self._options:
            self._declared(name, value if is_set else None, waiting)
        elif name == _CONFIG:
            file = _Line(self._parser_options, of_file=True)
            if self._of_file:
                raise UsageError("a file of flags cannot have --config; give it twice")
            file.read(arguments_for(name, value if is_set else self._value(name, waiting)))
            self._file += file.groups()
        elif name in ENTRIES:
            given = value if is_set else None
            if given is None and takes_value(name):
                given = self._value(name, waiting)
            waiting.extendleft(reversed(arguments_for(name, given)))
        elif name.startswith("--no-") and positive in ENTRIES:
            waiting.extendleft(reversed(arguments_for(positive, None, off=True)))
        elif name.startswith("--no-") and getattr(self._options.get(positive), "is_flag", False):
            option = self._options[positive]  # back to its default, whatever a file says
            self._groups = [it for it in self._groups if it.option is not option]
            self._cleared.add(id(option))
        else:
            self._groups.append(_ArgumentGroup([token]))

    def _declared(self, name: str, value: str | None, waiting: deque[str]) -> None:
        option = self._options[name]
        if option.is_flag:
            if value is not None:
                raise UsageError(f"{name} takes no value; it has the form {negated(name)}")
            self._groups.append(_ArgumentGroup([name], option))
            return
        if value is None:
            value = self._value(name, waiting)
        if option.metavar == _NUMBERS:
            while waiting and waiting[0].isdigit():
                value += f",{waiting.popleft()}"
        main = max(option.opts, key=len)
        self._groups.append(_ArgumentGroup([main, value], option))
        # After MODEL, what follows the first value cannot be MODEL.
        while option.multiple and waiting and not waiting[0].startswith("-") and self._has_model:
            self._groups.append(_ArgumentGroup([main, waiting.popleft()], option))

    @property
    def _has_model(self) -> bool:
        return any(it.is_model for it in self._groups)

    def _key(self, name: str, key: str, text: str) -> None:
        option = self._options.get(name)
        if option is not None:
            name = max(option.opts, key=len)
        if (option is None and name not in ENTRIES) or (option and option.metavar != _JSON):
            raise UsageError(f"{name} takes no keys such as {key}; give {name} itself")
        if name in ENTRIES and isinstance(ENTRIES[name], Unsupported):
            arguments_for(name, None)
        *path, last = key.split(".")
        found = self._keys.setdefault(name, {})
        for step in path:
            found = found.setdefault(step, {})
            if not isinstance(found, dict):
                raise UsageError(f"{name}.{key} sets a key of a value that is not an object")
        try:
            found[last] = json.loads(text)
        except ValueError:
            found[last] = text

    def _value(self, name: str, waiting: deque[str]) -> str:
        if not waiting:
            raise UsageError(f"{name} needs a value")
        if waiting[0].startswith("--"):  # an API key that is a flag's name would be no secret
            raise UsageError(
                f"{name} needs a value, and {waiting[0]} is a flag; a value that begins so is "
                f"given as {name}=VALUE"
            )
        return waiting.popleft()
