"""Reads and strictly checks the headers of GGUF files; counts in a header are not trusted.

A file has a magic number, a version, counts, metadata pairs, tensor descriptions, and the tensors'
bytes, each aligned. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from pathlib import Path

import torch

from slipstream.core.errors import CheckpointError
from slipstream.kernels.formats.weight import Weight
from slipstream.models.gguf.blocks import BLOCK_TYPES, OTHER_TYPES, BlockForm, GgufType
from slipstream.models.gguf.files import MAGIC, split_paths
from slipstream.models.gguf.header import HeaderReader, Value
from slipstream.models.safetensors_file import DAMAGED, TensorEntry, check_layout, require_content

_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_ALIGNMENT, _MAX_ALIGNMENT = 32, 1 << 16
_BIG_ENDIAN = 1 << 24  # a version is only this large if its byte order is swapped
_PIECE = 1 << 16  # bytes that are read at once
_KEPT = 8  # number of cached headers
# Minimum for a tensor: the length of its name, number of dimensions, one size, type and offset.
_LEAST_TENSOR_BYTES = 32
_LEAST_PAIR_BYTES = 13  # minimum for a metadata pair: the length of the key, type and value


@dataclass(frozen=True)
class GgufTensor:
    """The description of a tensor.

    Attributes:
        shape: slowest dimension first, so that a matrix is [rows, columns].
        offset: offset in bytes of its first byte from the start of the file.
    """

    name: str
    kind: GgufType
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    def entry(self, name: str) -> TensorEntry:
        """The tensor's entry under another name: floats of `shape`, or for quantised types uint8,
        whose last dimension is the bytes of a row."""
        dtype, shape = self.kind.floats, self.shape
        if dtype is None:
            dtype, shape = torch.uint8, (*shape[:-1], self.kind.row_bytes(shape[-1]))
        return TensorEntry(name, dtype, shape, self.file, self.offset, self.nbytes)


@dataclass(frozen=True)
class Container:
    """The header of a GGUF file, or the headers of all parts of a split one.

    Attributes:
        path: path of the file, or of the first part.
        metadata: metadata of that file.
        tensors: tensors of all parts, by name.
    """

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]


def read_container(path: Path) -> Container:
    """Read the header of a GGUF file, and of the other parts if it is split.

    Headers are cached until a file changes.

    Raises:
        CheckpointError: a header violates the format, a tensor type is not supported, or a part is
            missing.
    """
    first, *others = parts = split_paths(path)
    missing = [part.name for part in parts if not part.exists()]
    if others and missing:
        raise CheckpointError(
            f"{first.parent} lacks {missing[0]}; all {len(parts)} parts of a split file must lie "
            "in one directory"
        )
    container = _read(first)
    count = container.metadata.get("split.count", 0)
    if count not in (0, 1) if not others else count != 1 + len(others):
        kind = f"one of {count} parts" if count else "a whole file"
        raise CheckpointError(
            f"{first} is {kind} by its header, and something else by its name; give it, and all "
            "parts of it, the names that they were published with (...-00001-of-00003.gguf)"
        )
    tensors = dict(container.tensors)
    for index, part in enumerate(others, 1):
        more = _read(part)
        if more.metadata.get("split.no") != index:
            raise CheckpointError(f"{part} is not the part that its name tells; {DAMAGED}")
        doubled = sorted(tensors.keys() & more.tensors.keys())
        if doubled:
            raise CheckpointError(
                f"{part} has tensor {doubled[0]}, as an earlier part has; {DAMAGED}"
            )
        tensors |= more.tensors
    return replace(container, tensors=tensors) if others else container


def _read(file: Path) -> Container:
    try:
        stat = file.stat()
    except OSError as error:
        raise CheckpointError(f"cannot open {file}: {error.strerror}") from error
    return _read_as_it_is(file, stat.st_size, stat.st_mtime_ns)


@lru_cache(_KEPT)
def _read_as_it_is(file: Path, size: int, changed: int) -> Container:
    """Read the header of one file; size and time of its last change are the cache's key."""
    require_content(file)
    with HeaderReader(file, size) as header:
        if header.take(len(MAGIC), "its first word") != MAGIC:
            raise CheckpointError(f"{file} is no GGUF file, by its first bytes; {DAMAGED}")
        _require_version(file, header.integer("I", "its version"))
        num_tensors = header.count(_LEAST_TENSOR_BYTES, "tensors")
        num_pairs = header.count(_LEAST_PAIR_BYTES, "pairs of metadata")
        metadata = header.metadata(num_pairs)
        alignment = _alignment(file, metadata)
        tensors = [_tensor(file, header) for _ in range(num_tensors)]
        start = -(-header.position // alignment) * alignment
    by_name: dict[str, GgufTensor] = {}
    for tensor in tensors:
        if tensor.name in by_name:
            raise CheckpointError(f"{file} describes tensor {tensor.name} twice; {DAMAGED}")
        by_name[tensor.name] = replace(tensor, offset=start + tensor.offset)
    places = [(it.offset, it.nbytes, name) for name, it in by_name.items()]
    check_layout(file, places, start, size, partial(_ends_in_zeros, file), alignment)
    return Container(file, metadata, by_name)


def _require_version(file: Path, version: int) -> None:
    if version in _VERSIONS:
        return
    if version >= _BIG_ENDIAN:
        raise CheckpointError(f"{file} is for big-endian machines; use the file for little endian")
    raise CheckpointError(
        f"{file} has version {version} of the GGUF format; only "
        f"{' and '.join(map(str, _VERSIONS))} are read: convert it again with a llama.cpp of today"
    )


def _alignment(file: Path, metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment", _ALIGNMENT)
    if type(value) is int and 8 <= value <= _MAX_ALIGNMENT and value & (value - 1) == 0:
        return value
    raise CheckpointError(
        f"{file}: general.alignment must be a power of two from 8 to {_MAX_ALIGNMENT}, not "
        f"{value!r}; {DAMAGED}"
    )


def _tensor(file: Path, header: HeaderReader) -> GgufTensor:
    """Read the description of a tensor; its offset is relative to the start of the data."""
    name = header.text("the name of a tensor")
    where = f"tensor {name} in {file}"
    dimensions = header.integer("I", where)
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise CheckpointError(f"{where} has {dimensions} dimensions; {DAMAGED}")
    shape = tuple(header.integer("Q", where) for _ in range(dimensions))[::-1]
    kind = _kind(where, header.integer("I", where))
    offset = header.integer("Q", where)
    if 0 in shape:
        raise CheckpointError(f"{where} has the shape {list(shape)}; {DAMAGED}")
    if shape[-1] % kind.numbers:
        raise CheckpointError(
            f"{where} has rows of {shape[-1]} numbers, which are no whole blocks of {kind.name} "
            f"({kind.numbers} numbers); {DAMAGED}"
        )
    nbytes = prod(shape) // kind.numbers * kind.nbytes
    return GgufTensor(name, kind, shape, file, offset, nbytes)


def _kind(where: str, number: int) -> GgufType:
    kind = BLOCK_TYPES.get(number)
    if kind is None:
        name = OTHER_TYPES.get(number, f"number {number}")
        raise CheckpointError(
            f"{where} is of the type {name}; supported are "
            f"{', '.join(known.name for known in BLOCK_TYPES.values())}. Use a file in one of "
            "them, such as Q4_K_M or Q8_0"
        )
    return kind


def _ends_in_zeros(file: Path, position: int) -> bool:
    """Whether all bytes from `position` on are zeros, with which some programs fill a page."""
    with file.open("rb") as opened:
        opened.seek(position)
        return not any(any(piece) for piece in iter(lambda: opened.read(_PIECE), b""))


_TABLE = "token_embd.weight"


@dataclass(frozen=True)
class TypeBytes:
    """The tensors of one type that are loaded in the same way.

    Attributes:
        num_bytes: their bytes in the file.
        becomes: dtype that they are converted to; None: they are kept as stored.
        rounded: whether the conversion may change numbers.
    """

    type: str
    num_bytes: int
    becomes: str | None
    rounded: bool


def types_by_bytes(
    container: Container, dtype: torch.dtype, kept: Collection[type[Weight]]
) -> list[TypeBytes]:
    """The types of a file and how they are loaded, sorted by bytes, largest first.

    Args:
        dtype: dtype of the model's parameters.
        kept: weight classes that the device multiplies without dequantising.
    """
    sizes: dict[tuple[GgufType, bool], int] = {}
    for tensor in container.tensors.values():
        form = BlockForm(tensor.kind, is_table=tensor.name == _TABLE).kind
        key = tensor.kind, form in kept
        sizes[key] = sizes.get(key, 0) + tensor.nbytes
    name = str(dtype).removeprefix("torch.")
    found = [
        TypeBytes(kind.name, size, None if stays else name, not stays and _loses(kind, dtype))
        for (kind, stays), size in sizes.items()
    ]
    return sorted(found, key=lambda each: -each.num_bytes)


def _loses(kind: GgufType, dtype: torch.dtype) -> bool:
    """Whether conversion of a type to `dtype` may change numbers."""
    if dtype == torch.float32 or kind.floats == dtype:
        return False
    # Powers of two times four bits; everything else has scales of eleven bits or more.
    return kind.name != "MXFP4"
