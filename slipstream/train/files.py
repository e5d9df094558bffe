"""Files of a run: replaced as a whole, and with a clear error when the disk is full."""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.models.tokenizer import Tokenizer, has_tokenizer

try:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file
except ImportError as error:
    raise UsageError(
        "training needs the package safetensors; install it with pip install 'slipstream[train]'"
    ) from error

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
SOURCE = "source"
"""The key of metadata that identifies what a file was made from."""
_ERROR_NUMBER = re.compile(r"(?:os error |code: )(\d+)")  # in messages of safetensors


@contextmanager
def replacing(file: Path, nbytes: int) -> Iterator[Path]:
    """Give the path of a new file, which takes the place of `file` once it is written and synced.

    Args:
        nbytes: about what will be written; named in the error of a full disk.

    Raises CheckpointError if the system refuses to write; `file` is then unchanged.
    """
    temporary = file.with_name(f"{file.name}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # safetensors makes files that only their owner can read
        _sync(temporary)
        temporary.replace(file)
        with suppress(OSError):  # not every file system syncs directories
            _sync(file.parent)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _not_written(file, error, nbytes) from error


def write_tensors(
    file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Replace a safetensors file; raises as `replacing` does."""
    stored = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with replacing(file, sum(tensor.nbytes for tensor in stored.values())) as temporary:
        save_file(stored, temporary, {"format": "pt", **(metadata or {})})


def write_text(file: Path, text: str) -> None:
    """Replace a text file; raises as `replacing` does."""
    with replacing(file, len(text.encode())) as temporary:
        temporary.write_text(text, "utf-8")


def append_line(file: Path, line: str) -> None:
    """Append to a text file, which may end with a part of the line where the disk is full."""
    try:
        with file.open("a", encoding="utf-8") as opened:
            opened.write(f"{line}\n")
    except OSError as error:
        raise _not_written(file, error, len(line.encode()) + 1) from error


def read_lines(file: Path) -> Iterator[Any]:
    """The values of a file of JSON lines, up to one that was cut short; none without a file."""
    for line in file.read_text("utf-8").splitlines() if file.is_file() else ():
        try:
            yield json.loads(line)
        except ValueError:
            return


def read_tensors(file: Path, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file, all or those with these names, on the CPU.

    Raises CheckpointError for a damaged file, or one that lacks a tensor.
    """
    with _opened(file) as opened:
        return {name: opened.get_tensor(name) for name in names or opened.keys()}


def read_slices(file: Path, names: Sequence[str]) -> dict[str, Any]:
    """Tensors whose rows are read when they are indexed; raises as `read_tensors` does."""
    with _opened(file) as opened:
        return {name: opened.get_slice(name) for name in names}


def read_metadata(file: Path) -> dict[str, str]:
    """The metadata of a safetensors file; raises CheckpointError for a damaged file."""
    with _opened(file) as opened:
        return opened.metadata() or {}


def comes_from(file: Path, source: str) -> bool:
    """Whether a safetensors file is whole and has this `source` in its metadata."""
    try:
        return read_metadata(file).get(SOURCE) == source
    except CheckpointError:
        return False


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> None:
    """config.json and model.safetensors; floating-point tensors in `dtype`, others as they are."""
    stored = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    write_tensors(folder / "model.safetensors", stored)
    content = {**config, "torch_dtype": str(dtype).removeprefix("torch.")}
    write_text(folder / "config.json", json.dumps(content, indent=2) + "\n")


def copy_tokenizer(target: Path, folder: Path) -> None:
    """Copy the tokenizer's files, for a drafter that is a language model."""
    if target.is_file() and has_tokenizer(target):  # GGUF, which has it in itself
        write_text(folder / "tokenizer.json", Tokenizer(target).to_json())
    for name in _TOKENIZER_FILES:
        source = target / name
        if source.is_file():
            with replacing(folder / name, source.stat().st_size) as temporary:
                shutil.copyfile(source, temporary)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, "pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _sync(path: Path) -> None:
    """Wait until a file or a directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _not_written(file: Path, error: Exception, nbytes: int) -> CheckpointError:
    found = _ERROR_NUMBER.search(str(error))
    number = error.errno if isinstance(error, OSError) else int(found[1]) if found else None
    if number == errno.ENOSPC:
        free = shutil.disk_usage(file.parent).free
        why = (
            f"the disk is full: it takes {_megabytes(nbytes)} and {_megabytes(free)} are free, so "
            f"{_megabytes(max(0, nbytes - free))} are missing"
        )
    elif number in (errno.EFBIG, errno.EDQUOT):
        why = f"it takes {_megabytes(nbytes)}, more than the quota or `ulimit -f` allows"
    else:
        return CheckpointError(
            f"{file} cannot be written: {os.strerror(number) if number else error}"
        )
    kept = "; the file that was there is unchanged" if file.is_file() else ""
    return CheckpointError(
        f"{file} cannot be written: {why}{kept}; make room and give the same command again, which "
        "continues from what is kept"
    )


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
