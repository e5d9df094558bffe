"""`slipstream list`: the models that are on this machine, and whether they can be served."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from slipstream.cli.checkpoint_facts import DRAFT_MODEL, CheckpointFacts, read_facts
from slipstream.cli.errors import say
from slipstream.cli.terminal import stderr_console, stdout_console
from slipstream.core.errors import CheckpointError, SlipstreamError
from slipstream.core.flags import flag


@dataclass(frozen=True, kw_only=True)
class ListFlags:
    """Where to look, and how to report."""

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
    """Tell which models are on this machine.

    They are the bundled ones, and those in the hub's cache.
    """
    with stderr_console().status("reading the headers of checkpoints"):
        models = [*_bundled(), *_downloaded(flags.download_dir)]
    if flags.json:
        print(json.dumps([asdict(model) for model in models], ensure_ascii=False, indent=2))
        return
    table = Table("model", "size", "kind", box=None, pad_edge=False)
    for model in models:
        at = f"@{model.revision}" if model.revision else ""
        size = "" if model.num_bytes is None else f"{model.num_bytes / 1e6:,.0f} MB"
        table.add_row(model.name + at, size, model.kind or f"not supported: {model.problem}")
    stdout_console().print(table)


def _bundled() -> Iterator[CachedModel]:
    from slipstream.models.checkpoint import bundled_names

    for name in bundled_names():
        yield _described(name, None, name)


def _downloaded(folder: str | None) -> Iterator[CachedModel]:
    """The models in the hub's cache."""
    from slipstream.models.gguf.files import models_among, split_stem

    for repo in _repositories(folder):
        several = len(repo.revisions) > 1  # named by revision to tell them apart
        for revision in sorted(repo.revisions, key=lambda it: -it.last_modified):
            name = revision.commit_hash[:8] if several else None
            models = models_among([Path(file.file_path) for file in revision.files])
            for model in models:  # of which a repository may have many
                tag = split_stem(model)
                yield _described(f"{repo.repo_id}:{tag}", name, model)
            if not models:
                yield _described(repo.repo_id, name, revision.snapshot_path)


def _repositories(folder: str | None) -> list[Any]:
    """The repositories of models in the hub's cache; none without a cache or a hub client.

    Raises:
        CheckpointError: `folder` was given and is not a hub cache.
    """
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


def _described(name: str, revision: str | None, place: str | Path) -> CachedModel:
    try:
        facts = read_facts(str(place))
    except SlipstreamError as error:
        what = str(error).split("; ")[0]  # without remedies and lists of supported values
        return CachedModel(
            name, revision, None, None, what.replace(f"{place}/", "").replace(str(place), "it")
        )
    return CachedModel(name, revision, facts.num_bytes, _kind(facts), None)


def _kind(facts: CheckpointFacts) -> str:
    """A description: architecture, format and drafter, or the drafting method."""
    if facts.kind != DRAFT_MODEL:
        return f"drafter, method {facts.kind}"
    config = facts.config
    parts = ["" if config is None else config.architecture, facts.quantization]
    if facts.own_drafter is not None:
        parts.append(f"own drafter: {facts.own_drafter}")
    return ", ".join(part for part in parts if part)
