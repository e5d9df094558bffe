"""GGUF models in repositories of the hub, of which most have one model many times."""

from pathlib import Path

from slipstream.core.errors import CheckpointError
from slipstream.models.gguf.container import split_paths
from slipstream.models.gguf.files import USUAL, listed, model_in, models_among, patterns
from slipstream.models.hub import download, list_files


def fetch_model(name: str, tag: str | None, revision: str | None) -> Path:
    """The path of a model of a repository, fetched where needed.

    Args:
        tag: what the file's name says of its types, "Q8_0"; None: the usual one, or the only one.

    Raises:
        CheckpointError: there is none, or several, or the hub does not give it.
    """
    wanted = tag or USUAL
    found = model_in(download(name, revision, patterns(wanted)), wanted)
    if found is not None:
        return found
    models = models_among([Path(file) for file in list_files(name, revision)])
    if tag is None and len(models) == 1:
        parts = [str(part) for part in split_paths(models[0])]
        return download(name, revision, parts) / models[0]
    if not models:
        raise CheckpointError(f"{name} holds no model in GGUF; check the name")
    raise CheckpointError(
        f"{name} has no file of {wanted}; name one of those that it has ({listed(models)}) by what "
        f"it is, such as {name}:Q8_0"
    )
