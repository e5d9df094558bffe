"""`slipstream list`: the models that are on this machine, and whether they can be served."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Column, Table

import slipstream
from slipstream.cli.checkpoint_facts import CheckpointFacts
from slipstream.cli.errors import say
from slipstream.cli.terminal import stderr_console, stdout_console
from slipstream.core.errors import CheckpointError, SlipstreamError, UsageError
from slipstream.core.flags import flag


@dataclass(frozen=True, kw_only=True)
class ListFlags:
    """Where to look, and how to report."""

    folder: Path | None = flag(
        None,
        "List the models anywhere in this directory instead, such as GGUF files.",
        argument=True,
        metavar="FOLDER",
    )
    download_dir: str | None = flag(
        None, "The folder of downloaded models. [the hub's own cache]", metavar="<folder>"
    )
    json: bool = flag(False, "Print one JSON document.")


@dataclass(frozen=True)
class CachedModel:
    """One model of this machine.

    Attributes:
        name: what MODEL or --drafter takes.
        num_bytes: size of its weights; None if there are none.
        kind: a description; None if the model is not supported.
        problem: why it is not supported; None if it is.
    """

    name: str
    revision: str | None
    num_bytes: int | None
    kind: str | None
    problem: str | None


def list_models(*, flags: ListFlags) -> None:
    """List the models on this machine.

    They are the bundled ones, and those in the hub's cache; or those in FOLDER.
    """
    if flags.folder is not None and flags.download_dir is not None:
        raise UsageError("give a folder of models, or --download-dir, not both")
    with stderr_console().status("reading the headers of checkpoints"), _Kept() as kept:
        if flags.folder is None:
            places = [*_bundled(), *_downloaded(flags.download_dir)]
        else:
            places = list(_in_folder(flags.folder))
        models = [kept.described(*place) for place in places]
    if flags.json:
        print(json.dumps([asdict(model) for model in models], ensure_ascii=False, indent=2))
        return
    name = Column("model", overflow="fold")  # a path that is cut could not be given as MODEL
    table = Table(name, "size", "kind", box=None, pad_edge=False)
    for model in models:
        at = f"@{model.revision}" if model.revision else ""
        size = "" if model.num_bytes is None else f"{model.num_bytes / 1e6:,.0f} MB"
        table.add_row(model.name + at, size, model.kind or f"not supported: {model.problem}")
    stdout_console().print(table)


Place = tuple[str, str | None, Path]  # name, revision, directory or file


def _bundled() -> Iterator[Place]:
    from slipstream.models.bundled import bundled_names, bundled_path

    for name in bundled_names():
        path = bundled_path(name)
        assert path is not None
        yield name, None, path


def _downloaded(folder: str | None) -> Iterator[Place]:
    from slipstream.models.gguf.files import models_among, split_stem

    for repo in _repositories(folder):
        several = len(repo.revisions) > 1  # named by revision to tell them apart
        for revision in sorted(repo.revisions, key=lambda it: -it.last_modified):
            name = revision.commit_hash[:8] if several else None
            models = models_among([Path(file.file_path) for file in revision.files])
            for model in models:  # a repository may have several
                yield f"{repo.repo_id}:{split_stem(model)}", name, model
            if not models:
                yield repo.repo_id, name, revision.snapshot_path


def _in_folder(folder: Path) -> Iterator[Place]:
    """The GGUF files and checkpoints in a directory, at any depth, by their paths."""
    from slipstream.models.gguf.files import EXTENSION, is_gguf, models_among

    if not folder.is_dir():
        raise UsageError(f"{folder} is not a directory; name one that holds models")
    files = [it for it in folder.rglob("*") if it.is_file() and os.access(it, os.R_OK)]
    found = {*models_among(files)}
    found |= {it for it in files if it.suffix.lower() != EXTENSION and is_gguf(it)}  # Ollama's
    found |= {it.parent for it in files if it.suffix == ".safetensors"} & {
        it.parent for it in files if it.name == "config.json"
    }
    yield from ((str(it), None, it) for it in sorted(found))


class _Kept:
    """Descriptions from earlier runs, by path: a checkpoint is read with torch, which is slow."""

    def __enter__(self) -> "_Kept":
        from slipstream.engine.drafting.kept_costs import cache_folder

        self._file, self._rows = cache_folder() / "listed.json", dict[str, Any]()
        self._has_new = False
        # Other versions of the program support other models.
        code = [it.stat().st_mtime_ns for it in Path(slipstream.__file__).parent.rglob("*.py")]
        self._version = [slipstream.__version__, max(code)]
        with suppress(OSError, ValueError, TypeError):
            self._rows = dict(json.loads(self._file.read_text("utf-8")))
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_new:
            with suppress(OSError):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.write_text(json.dumps(self._rows), "utf-8")

    def described(self, name: str, revision: str | None, place: Path) -> CachedModel:
        """The model's description, which is read again if its files have changed."""
        files = sorted(place.rglob("*")) if place.is_dir() else [place]
        sizes = [[it.name, it.lstat().st_size, it.lstat().st_mtime_ns] for it in files]
        found = self._rows.get(str(place))
        if not isinstance(found, dict) or found.get("key") != [*self._version, sizes]:
            row = dict(zip(("num_bytes", "kind", "problem"), _described(place), strict=True))
            found = {"key": [*self._version, sizes], "row": row}
            self._rows[str(place)], self._has_new = found, True
        return CachedModel(name, revision, **found["row"])


def _repositories(folder: str | None) -> list[Any]:
    """The repositories of models in the hub's cache; none without a cache or a hub client, and
    CheckpointError if `folder` was given and is no cache."""
    try:
        from huggingface_hub import CacheNotFound, scan_cache_dir
    except ImportError:
        if folder is not None:
            raise CheckpointError(
                "--download-dir needs the package huggingface_hub; install slipstream[hub]"
            ) from None
        return []
    try:
        found = scan_cache_dir(folder)
    except (CacheNotFound, ValueError) as error:
        if folder is not None:
            raise CheckpointError(
                f"--download-dir {folder} is not a folder of downloads ({error}); name another"
            ) from None
        return []
    for warning in found.warnings:  # such a repository is left out
        say(f"not listed: {str(warning).splitlines()[0]}; download it again")
    models = [repo for repo in found.repos if repo.repo_type == "model"]
    return sorted(models, key=lambda repo: repo.repo_id)


def _described(place: Path) -> tuple[int | None, str | None, str | None]:
    """(bytes of the weights, kind, problem)."""
    from slipstream.cli.checkpoint_facts import read_facts

    try:
        facts = read_facts(str(place))
    except SlipstreamError as error:
        what = str(error).split("; ")[0]  # without remedies and lists of supported values
        return None, None, what.replace(f"{place}/", "").replace(str(place), "it")
    return facts.num_bytes, _kind(facts), None


def _kind(facts: CheckpointFacts) -> str:
    """A description: architecture, format and drafter, or the drafting method."""
    if not facts.is_language_model:
        return f"drafter, method {facts.kind}"
    config = facts.config
    parts = ["" if config is None else config.architecture, facts.quantization]
    if facts.own_drafter is not None:
        parts.append(f"own drafter: {facts.own_drafter}")
    return ", ".join(part for part in parts if part)
