"""Finds GGUF files: by path, in a directory, or in a repository of the hub."""

import re
from pathlib import Path
from typing import Final

from slipstream.core.errors import CheckpointError
from slipstream.models.hub import download, list_files

EXTENSION: Final = ".gguf"
MAGIC: Final = b"GGUF"
USUAL: Final = "Q4_K_M"
"""The tag of the file that is loaded from a repository if the name has no tag."""

_TAGGED = re.compile(r"(?P<name>[^:]+):(?P<tag>[\w.-]+)")
_REPOSITORY = re.compile(r".+-gguf", re.IGNORECASE)
_NUMBER = re.compile(r"-\d{5}-of-\d{5}$")
_PROJECTOR = "mmproj"  # in the names of files with a vision tower
_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_SHOWN = 12


def split_paths(path: Path) -> list[Path]:
    """The paths of all parts of a split file, given any of them; of other files only `path`."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match[3]) < 2:
        return [path]
    parts = range(1, int(match[3]) + 1)
    return [path.with_name(f"{match[1]}-{part:05}-of-{match[3]}.gguf") for part in parts]


def is_gguf(path: Path) -> bool:
    """Whether a path has the name of a GGUF file, or is a file with its first bytes: Ollama stores
    such files under names without an ending."""
    if _has_ending(path) or not path.is_file():
        return _has_ending(path)
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise CheckpointError(f"cannot open {path}: {error.strerror}") from error


def _has_ending(path: Path) -> bool:
    return path.name.lower().endswith(EXTENSION)


def split_tag(name: str) -> tuple[str, str | None] | None:
    """Split a model name into hub name and tag (None without one); None if it is not GGUF."""
    match = _TAGGED.fullmatch(name)
    if match is not None:
        return match["name"], match["tag"]
    return (name, None) if _REPOSITORY.fullmatch(name) else None


def patterns(tag: str) -> list[str]:
    """Patterns of the names of a repository's files with a tag, in all usual spellings."""
    return [
        pattern
        for spelling in dict.fromkeys((tag, tag.lower(), tag.upper()))
        for pattern in (
            f"*[-._]{spelling}{EXTENSION}",
            f"*[-._]{spelling}-?????-of-?????{EXTENSION}",
            f"{spelling}/*{EXTENSION}",
            f"{spelling}{EXTENSION}",
            f"{spelling}-?????-of-?????{EXTENSION}",
        )
    ]


def models_among(files: list[Path], tag: str | None = None) -> list[Path]:
    """The models among files, with a tag or all; of a split model only the first part."""
    found = [file for file in files if _has_ending(file) and _PROJECTOR not in file.name.lower()]
    if tag is not None:
        found = [file for file in found if any(map(file.match, patterns(tag)))]
    return sorted({split_paths(file)[0] for file in found})


def model_in(folder: Path, tag: str | None = None) -> Path | None:
    """The one GGUF model in a directory; None if there is none, or a checkpoint of another kind;
    CheckpointError if there are several."""
    if tag is None and any(folder.glob("*.safetensors")):
        return None
    found = models_among([*folder.glob("*"), *folder.glob("*/*")], tag)
    if len(found) > 1:
        raise CheckpointError(f"{folder} holds several GGUF models; name one: {listed(found)}")
    return found[0] if found else None


def split_stem(path: Path) -> str:
    """A model's file name without extension and part number, which may be used as a tag."""
    return _NUMBER.sub("", path.name[: -len(EXTENSION)]) if _has_ending(path) else path.name


def require_first(path: Path) -> Path:
    """The path of a GGUF file; CheckpointError for a later part of a split one."""
    first = split_paths(path)[0]
    if first != path:
        raise CheckpointError(f"{path} is a later part of a split file; give {first.name}")
    return path


def listed(files: list[Path]) -> str:
    """The first names of files, for messages."""
    names = [file.name for file in files]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def fetch_model(name: str, tag: str | None, revision: str | None) -> Path:
    """The path of a GGUF model of a hub repository, which is downloaded if necessary.

    Args:
        tag: quantization in the file's name, such as "Q8_0"; None: `USUAL`, or the only model.

    Raises:
        CheckpointError: no model or several match, or the download fails.
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
