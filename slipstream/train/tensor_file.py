"""Writing safetensors files, and reading back small ones whole."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError
from slipstream.models.safetensors_file import read_entries, read_into

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}
_ALIGNMENT = 8


def write_tensors(
    file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """A safetensors file, which is there whole or not at all."""
    header: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
    start = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
        start += tensor.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % _ALIGNMENT)
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f"{file.name}.part")
    with beside.open("wb") as opened:
        opened.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in tensors.values():
            flat = tensor.detach().cpu().contiguous().flatten()
            opened.write(flat.view(torch.uint8).numpy().data if len(flat) else b"")
    beside.replace(file)


def read_tensors(file: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """These tensors of a file, as they are stored.

    Raises CheckpointError for a file that is cut short, or that lacks one of them.
    """
    entries = read_entries(file)
    missing = [name for name in names if name not in entries]
    if missing:
        raise CheckpointError(f"{file} has no tensor {missing[0]}; it is no file of this kind")
    tensors = {}
    for name in names:
        entry = entries[name]
        tensors[name] = torch.empty(entry.shape, dtype=entry.dtype)
        read_into(entry, tensors[name], raw=True)
    return tensors
