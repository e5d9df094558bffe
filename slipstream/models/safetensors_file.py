"""Reads safetensors files strictly, without mapping them into memory.

A file is 8 bytes of header length (little endian), a JSON header, then the tensors' bytes without
gaps. Pages of a mapped file would count as memory of the process while weights are copied; reading
into the parameter's own memory needs no second copy.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError
from slipstream.kernels.devices import is_host_memory

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_SLICE_BYTES = 16 << 20  # bytes that are read, converted and checked at a time
_CACHED = 1 << 20  # bytes that stay in a core's cache
_COMPARED = 1 << 10  # rows at a time
# The square of a larger number overflows in float32: a norm would take its row for zeros, and all
# tokens would be equally probable, without any number that is not finite.
MOST_WEIGHT = 1e18
DAMAGED = "copy or download the file again"
_POINTER = b"version https://git-lfs"

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class TensorEntry:
    """The place of one tensor in a file; its offset is from the start of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    def row_range(self, start: int, stop: int) -> "TensorEntry":
        """The entry of the rows from `start` to before `stop`, which are contiguous in the file."""
        row = self.nbytes // self.shape[0]
        shape, nbytes = (stop - start, *self.shape[1:]), (stop - start) * row
        return replace(self, shape=shape, offset=self.offset + start * row, nbytes=nbytes)


def require_content(file: Path) -> None:
    """Raise CheckpointError for a Git LFS pointer, the placeholder of a file not downloaded yet."""
    with _opened(file) as opened:
        if opened.read(len(_POINTER)) == _POINTER:
            raise CheckpointError(
                f"{file} is a Git LFS pointer, not the file itself; run `git lfs pull` in its "
                "folder, or download the file again"
            )


def read_entries(file: Path) -> dict[str, TensorEntry]:
    """The entries of a safetensors file by name; reads only the header.

    Raises CheckpointError unless the header describes exactly the bytes that follow it.
    """
    size, raw = _read_header(file)
    start = _LENGTH_BYTES + len(raw)
    header = _parse_header(file, raw)
    header.pop("__metadata__", None)  # free text of the exporter
    entries = {name: _entry(file, start, name, value) for name, value in header.items()}
    places = [(it.offset, it.nbytes, name) for name, it in entries.items()]
    check_layout(file, places, start, size)
    return entries


def read_into(entry: TensorEntry, destination: Tensor, *, raw: bool = False) -> None:
    """Fill `destination` with the tensor, converted to its dtype and copied to its device.

    Raises CheckpointError if it does not fit, or holds numbers that are not finite.

    Args:
        destination: contiguous, of the entry's shape; may be a slice of a larger parameter.
        raw: read any dtype as it is stored (index tables, scales); `destination` must have it too.
    """
    if not destination.is_contiguous():
        raise ValueError(f"the destination of {entry.name} must be contiguous")
    check_fits(entry, destination, raw)
    flat = destination.detach().view(-1)
    with _opened(entry.file) as file:
        file.seek(entry.offset)
        _read_slices(file, entry, flat)


def hold_same_numbers(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two stored matrices [N, K] have equal numbers, whatever their dtypes."""
    are_floats = {one.dtype, other.dtype} <= set(WEIGHT_DTYPES)
    if not are_floats or one.shape != other.shape or len(one.shape) != 2:
        return False
    rows = one.shape[0]
    for start in range(0, rows, _COMPARED):
        found = []
        for entry in (one, other):
            part = entry.row_range(start, min(start + _COMPARED, rows))
            found.append(torch.empty(part.shape, dtype=torch.float32))
            read_into(part, found[-1])
        if not torch.equal(*found):
            return False
    return True


def require_finite(entry: TensorEntry, values: Tensor) -> None:
    """Raise CheckpointError if `values`, which were read from the entry, hold NaN, infinity, or
    numbers so large that no text can be made with them."""
    if not values.dtype.is_floating_point or _are_usable(values):
        return
    where = f"tensor {entry.name} in {entry.file}"
    if values.float().isfinite().all():
        raise CheckpointError(
            f"{where} holds numbers above {MOST_WEIGHT:.0e}, whose squares overflow, so the model "
            f"cannot run; {DAMAGED}, or use another checkpoint"
        )
    if values.dtype == entry.dtype:
        raise CheckpointError(
            f"{where} holds NaN or infinity, so no text can be made with it; {DAMAGED}, or use "
            "another checkpoint"
        )
    raise CheckpointError(
        f"{where} holds NaN, infinity, or numbers too large for {dtype_name(values.dtype)}; "
        f"load it as {dtype_name(entry.dtype)}, or use another checkpoint"
    )


def _are_usable(values: Tensor) -> bool:
    if values.dtype == torch.float8_e4m3fn:
        # In e4m3, NaN has all bits besides the sign set, and there is no infinity.
        codes = torch.split(values.view(torch.uint8).view(-1), _CACHED)
        return all(bool((part & 0x7F).max() < 0x7F) for part in codes if part.numel())
    if values.dtype.itemsize == 1:
        values = values.float()
    # Faster than testing each number: a sum of usable ones hardly ever exceeds the bound.
    if abs(float(values.sum())) <= MOST_WEIGHT:
        return True
    return all(abs(float(extreme)) <= MOST_WEIGHT for extreme in values.aminmax())


def _opened(file: Path) -> FileIO:
    try:
        return FileIO(file, "rb")  # unbuffered: large reads go straight to their place
    except OSError as error:
        raise CheckpointError(f"cannot open {file}: {error.strerror}") from error


def _read_header(file: Path) -> tuple[int, bytes]:
    """The size of the file and the bytes of its header."""
    size = _size_of(file)
    require_content(file)
    with _opened(file) as opened:
        prefix = opened.read(_LENGTH_BYTES)
        if len(prefix) < _LENGTH_BYTES:
            raise CheckpointError(
                f"{file} is truncated: it has {len(prefix)} bytes, fewer than the "
                f"{_LENGTH_BYTES} of a safetensors header length; {DAMAGED}"
            )
        length = int.from_bytes(prefix, "little")
        # Checked before anything is allocated: in a file of another format this may be any number.
        if length > _MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{file} claims a header of {length} bytes, more than the {_MAX_HEADER_BYTES} that "
                f"the safetensors format allows; it is damaged or of another format"
            )
        if _LENGTH_BYTES + length > size:
            raise CheckpointError(
                f"{file} is truncated: its header of {length} bytes does not fit in its "
                f"{size} bytes; {DAMAGED}"
            )
        header = opened.read(length)
    if len(header) < length:
        raise CheckpointError(
            f"{file} ended after {len(header)} of its {length} header bytes; {DAMAGED}"
        )
    return size, header


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise CheckpointError(f"cannot open {file}: {error.strerror}") from error


def _parse_header(file: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the header of {file} is not valid JSON ({error}); it is damaged or of another format"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"the header of {file} is not a JSON object; {DAMAGED}")
    return header


def _unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    # json keeps the last of equal names, which would silently drop a tensor.
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key!r} is named twice")
        result[key] = value
    return result


def _entry(file: Path, start: int, name: str, value: object) -> TensorEntry:
    where = f"tensor {name} in {file}"
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is not described by a JSON object; {DAMAGED}")
    dtype = _DTYPES.get(str(value.get("dtype")))
    if dtype is None:
        raise CheckpointError(
            f"{where} has dtype {value.get('dtype')!r}, which is not supported; convert the "
            f"checkpoint to bfloat16, float16 or float32"
        )
    shape = _sizes(f"the shape of {where}", value.get("shape"))
    offsets = _sizes(f"the data_offsets of {where}", value.get("data_offsets"))
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has data_offsets {list(offsets)}; {DAMAGED}")
    nbytes, needed = offsets[1] - offsets[0], math.prod(shape) * dtype.itemsize
    if nbytes != needed:
        raise CheckpointError(
            f"{where} has {nbytes} bytes, but shape {list(shape)} of {value['dtype']} needs "
            f"{needed}; {DAMAGED}"
        )
    return TensorEntry(name, dtype, shape, file, start + offsets[0], nbytes)


def _sizes(what: str, value: object) -> tuple[int, ...]:
    # type() rather than isinstance: true is no size.
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    raise CheckpointError(f"{what} must be a list of sizes, not {value!r}; {DAMAGED}")


def check_layout(
    file: Path,
    tensors: Iterable[tuple[int, int, str]],
    start: int,
    size: int,
    ends_in_padding: Callable[[int], bool] = lambda position: False,
    alignment: int = 1,
) -> None:
    """Raise CheckpointError unless tensors fill the file from `start` to its end, aligned, without
    gap or overlap.

    Args:
        tensors: the offset in the file, the size in bytes and the name of each.
        ends_in_padding: whether the file has only padding from a position on.
    """
    position, previous = start, "the header"
    for offset, nbytes, name in sorted(tensors):
        if offset != position:
            relation = "overlaps" if offset < position else "leaves a gap after"
            raise CheckpointError(
                f"tensor {name} in {file} starts at byte {offset - start} of the data and "
                f"{relation} {previous}, which ends at {position - start}; {DAMAGED}"
            )
        end, previous = offset + nbytes, f"tensor {name}"
        if end > size:
            raise CheckpointError(
                f"{file} is truncated: {previous} ends at byte {end}, but the file has {size}; "
                f"{DAMAGED}"
            )
        position = -(-end // alignment) * alignment
    if position < size and not ends_in_padding(position):
        raise CheckpointError(
            f"{file} has {size - position} bytes after {previous}, its last part; {DAMAGED}"
        )


def check_fits(entry: TensorEntry, destination: Tensor, raw: bool = False) -> None:
    """Raise CheckpointError unless a tensor can be read into `destination`; see `read_into`."""
    where = f"tensor {entry.name} in {entry.file}"
    if tuple(destination.shape) != entry.shape:
        raise CheckpointError(
            f"{where} has shape {list(entry.shape)}, but {list(destination.shape)} is expected; "
            f"its config.json does not describe these weights"
        )
    if raw and destination.dtype != entry.dtype:
        raise CheckpointError(
            f"{where} is stored as {dtype_name(entry.dtype)}, but "
            f"{dtype_name(destination.dtype)} is expected"
        )
    if not raw and entry.dtype not in WEIGHT_DTYPES:
        raise CheckpointError(
            f"{where} is stored as {dtype_name(entry.dtype)}; weights must be bfloat16, float16 or "
            f"float32, unless its config.json has a quantization_config that says otherwise"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _fill(file: FileIO, entry: TensorEntry, flat: Tensor) -> None:
    """Read the next bytes of the file into the memory of a flat tensor of the entry's dtype."""
    if flat.numel() == 0:
        return
    memory = flat.view(torch.uint8).numpy().data
    done = 0
    while done < len(memory):  # the system reads at most 2 GiB at once
        count = file.readinto(memory[done:])
        if not count:
            raise CheckpointError(
                f"{entry.file} ended inside tensor {entry.name}; it has changed since it was "
                f"opened, or is on a failing disk"
            )
        done += count


def _read_slices(file: FileIO, entry: TensorEntry, flat: Tensor) -> None:
    """Read slice by slice: a conversion never holds a second whole tensor, and numbers are checked
    while they are in the cache."""
    size = max(1, _SLICE_BYTES // entry.dtype.itemsize)
    is_direct = is_host_memory(flat) and flat.dtype == entry.dtype
    buffer = flat if is_direct else torch.empty(min(flat.numel(), size), dtype=entry.dtype)
    for part in torch.split(flat, size):
        if is_direct:
            _fill(file, entry, part)
        else:
            _fill(file, entry, buffer[: len(part)])
            part.copy_(buffer[: len(part)])
        require_finite(entry, part)
