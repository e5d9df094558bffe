"""`custom`: drafts on the host with a Python class of the user.

    {"method": "custom", "model": "package.module:Class", "options": {"any": "keyword"}}

The class is instantiated once, with `options` as keyword arguments, and must have one method:

    def guess(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]: ...

`guess` is called in every step with the requests that may draft. It returns, for each request in
order, the token ids that it expects next: at most `most_tokens` (further ones are ignored), or
none. Wrong guesses cost time but never change the output. If the class also has a method
`forget(request_ids: Sequence[str])`, it is called before the next `guess` with finished requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from operator import index
from typing import Any

from slipstream.core.batch import Batch, ScheduledRequest
from slipstream.core.errors import UsageError
from slipstream.core.request import Request
from slipstream.runner.device_batch import Guesses
from slipstream.runner.device_state import DeviceState
from slipstream.speculative.drafter import HostDrafter, LoadedDrafter, load_host_drafter
from slipstream.speculative.options import Options, TargetModel

_FORM = "give the class as package.module:Class"


@dataclass(frozen=True)
class DraftRequest:
    """A request as the user's class sees it.

    Attributes:
        request_id: constant for the life of the request, and unique among live requests.
        token_ids: the known tokens, prompt and output; a copy.
        num_prompt_tokens: number of prompt tokens among them.
        most_tokens: maximum number of guesses that this step can use; at least 1.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    most_tokens: int


@dataclass(frozen=True)
class CustomConfig:
    """The import path of the class, and its keyword arguments."""

    path: str
    options: Mapping[str, Any]


def read_options(options: Options) -> CustomConfig:
    path = options.take_str("model", None)
    if path is None:
        raise UsageError(f"speculative_config: method custom needs model; {_FORM}")
    keywords = options.take("options", {})
    if not isinstance(keywords, Mapping) or not all(isinstance(key, str) for key in keywords):
        raise UsageError(
            "speculative_config: options must be a mapping of keyword arguments for "
            f"{path}, not {keywords!r}"
        )
    return CustomConfig(path, keywords)


def load(config: CustomConfig, target: TargetModel) -> LoadedDrafter:
    made = _find_class(config.path)
    try:
        user = made(**config.options)
    except Exception as error:
        raise UsageError(
            f"custom drafter {config.path} cannot be made with options "
            f"{dict(config.options)!r}: {_cause(error)}"
        ) from error
    if not callable(getattr(user, "guess", None)):
        raise UsageError(
            f"custom drafter {config.path} has no method guess(requests), which returns a list of "
            "token ids for each request"
        )
    return load_host_drafter(lambda state: CustomDrafter(config.path, user, target, state))


class CustomDrafter(HostDrafter):
    """Calls the user's object and checks the guesses that it returns."""

    def __init__(self, path: str, user: Any, target: TargetModel, state: DeviceState) -> None:
        super().__init__(state)
        self._path, self._user, self._vocab_size = path, user, target.vocab_size
        self._ended: list[str] = []

    def prepare(self, batch: Batch) -> Guesses:
        """Get the guesses of the user's object.

        Raises:
            UsageError: the object raised an error, or did not return valid guesses.
        """
        ended, self._ended = self._ended, []
        if ended and hasattr(self._user, "forget"):
            self._call("forget", ended)
        items = [item for item in batch.requests if item.num_draft_tokens]
        answers = iter(self._ask(items) if items else [])
        return [next(answers) if item.num_draft_tokens else [] for item in batch.requests]

    def forget(self, requests: Sequence[Request]) -> None:
        self._ended += [request.request_id for request in requests if request.finished]

    def _ask(self, items: Sequence[ScheduledRequest]) -> list[list[int]]:
        answers = self._call("guess", [_shown(item) for item in items])
        rows = _listed(answers, len(items) + 1)
        if rows is None or len(rows) != len(items):
            raise UsageError(
                f"custom drafter {self._path} returned {_short(answers)} for {len(items)} "
                "requests; guess must return one list of token ids for each"
            )
        return [self._checked(row, item) for row, item in zip(rows, items, strict=True)]

    def _checked(self, row: Any, item: ScheduledRequest) -> list[int]:
        """Check the guesses for one request and cut them to its `most_tokens`."""
        tokens = _listed(row, item.num_draft_tokens)
        try:
            ids = None if tokens is None else [index(token) for token in tokens]
        except TypeError:
            ids = None
        if ids is None:
            raise UsageError(
                f"custom drafter {self._path} returned {_short(row)} for request "
                f"{item.request.request_id}; guess must return a list of token ids for each request"
            )
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise UsageError(
                    f"custom drafter {self._path} guessed token {token} for request "
                    f"{item.request.request_id}, but the target's vocabulary has the ids from 0 to "
                    f"{self._vocab_size - 1}"
                )
        return ids

    def _call(self, name: str, argument: Any) -> Any:
        try:
            return getattr(self._user, name)(argument)
        except Exception as error:
            raise UsageError(
                f"custom drafter {self._path} failed in {name}: {_cause(error)}"
            ) from error


def _find_class(path: str) -> type[Any]:
    """Import the class `package.module:Class` or `package.module.Class`."""
    name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not name or not attribute:
        raise UsageError(f"speculative_config: {path!r} names no class; {_FORM}")
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise UsageError(f"custom drafter {path}: {name} needs {_cause(error)}") from error
        raise UsageError(
            f"custom drafter {path}: there is no module {error.name}; set PYTHONPATH to the "
            "directory that holds it"
        ) from error
    except Exception as error:
        raise UsageError(f"custom drafter {path}: importing {name}: {_cause(error)}") from error
    found = getattr(module, attribute, None)
    if not isinstance(found, type):
        own = {key: it for key, it in vars(module).items() if isinstance(it, type)}
        classes = [key for key, it in own.items() if it.__module__ == name]
        raise UsageError(
            f"custom drafter {path}: {name} has no class {attribute}; "
            f"it has {', '.join(classes) or 'none'}"
        )
    return found


def _shown(item: ScheduledRequest) -> DraftRequest:
    request = item.request
    tokens = tuple(request.token_ids)
    return DraftRequest(
        request.request_id, tokens, request.num_prompt_tokens, item.num_draft_tokens
    )


def _listed(value: Any, most: int) -> list[Any] | None:
    """The first elements of a sequence, an array or a tensor; None for other values."""
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__"):
        return None
    try:
        return list(islice(value, most))
    except TypeError:
        return None


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
