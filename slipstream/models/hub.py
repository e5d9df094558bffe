"""Downloads checkpoints from the hub with the huggingface_hub client."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from slipstream.core.errors import CheckpointError

T = TypeVar("T")

# For each error class of the client: what is wrong, and what to do.
_HUB_PROBLEMS = {
    "GatedRepoError": "its owner wants consent to terms: give it on its page, and --hf-token here",
    "RepositoryNotFoundError": "the hub has no such model, or a private one: check the spelling, "
    "or give --hf-token",
    "RevisionNotFoundError": "the hub has the model, but not this revision: check --revision",
}


@dataclass(frozen=True)
class HubAccess:
    """Settings of downloads from the hub.

    Attributes:
        folder: where downloads are kept; None: in the client's own cache.
        token: access token; None: the one from `hf auth login`, if there is one.
        offline: only what was downloaded before is found, and nothing is waited for.
    """

    folder: str | None = None
    token: str | None = field(default=None, repr=False)
    offline: bool = False


_ANYHOW = HubAccess()
_HUB = ContextVar("_HUB", default=_ANYHOW)


@contextmanager
def hub_settings(access: HubAccess) -> Iterator[None]:
    """Use these settings for all downloads within the context."""
    before = _HUB.set(access)
    try:
        yield
    finally:
        _HUB.reset(before)


def download(
    name: str, revision: str | None, wanted: Sequence[str], ignored: Sequence[str] = ()
) -> Path:
    """Download the files of a repository that match a pattern, if needed; returns their folder, or
    raises CheckpointError."""

    def fetch() -> str:
        from huggingface_hub import snapshot_download

        access = _HUB.get()
        return snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(wanted),
            ignore_patterns=list(ignored),
            cache_dir=access.folder,
            token=access.token,
            local_files_only=access.offline,
        )

    return Path(_fetch(fetch, name, revision))


def list_files(name: str, revision: str | None) -> list[str]:
    """The paths of all files in a repository; errors as `download`."""

    def fetch() -> list[str]:
        from huggingface_hub import list_repo_files

        if _HUB.get().offline:
            return []
        return list(list_repo_files(name, revision=revision, token=_HUB.get().token))

    return _fetch(fetch, name, revision)


def _fetch(fetch: Callable[[], T], name: str, revision: str | None) -> T:
    unknown = f"{name} is neither a directory (in {Path.cwd()}) nor a bundled demo"
    try:
        return fetch()
    except ImportError as error:
        raise CheckpointError(
            f"{unknown}, and hub names need the package huggingface_hub: install slipstream[hub], "
            f"or give the path of a model directory"
        ) from error
    except Exception as error:  # whatever the hub's client, its transport or the disk raises
        at = f" at revision {revision}" if revision else ""
        for kind in type(error).__mro__:
            if kind.__name__ in _HUB_PROBLEMS:
                raise CheckpointError(
                    f"{unknown}, and the hub did not give it{at}: {_HUB_PROBLEMS[kind.__name__]}"
                ) from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{unknown}, and it could not be fetched from the hub{at} ({reason}); check the name "
            f"and the network, or give the path of a model directory"
        ) from error
