"""Small GGUF files, and blocks of random numbers for them."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.models.gguf.blocks import F32, GgufType

ALIGNMENT = 32


@dataclass(frozen=True)
class Stored:
    """A tensor as a file has it.

    Attributes:
        raw: [..., bytes of a row] uint8.
    """

    kind: GgufType
    raw: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.raw.shape[:-1], self.kind.columns(self.raw.shape[-1]))

    def numbers(self) -> Tensor:
        """The numbers that the blocks stand for, in float32."""
        return self.kind.dequantised(self.raw.flatten(0, -2)).view(self.shape)


def floats(values: Tensor, kind: GgufType = F32) -> Stored:
    """A tensor of plain floats [...]."""
    assert kind.floats is not None
    return Stored(kind, values.to(kind.floats).contiguous().view(torch.uint8))


def random_blocks(
    kind: GgufType, shape: tuple[int, ...], generator: torch.Generator, scale: float = 0.01
) -> Stored:
    """Blocks whose bytes are random, but for their scales, which are finite and about `scale`."""
    if kind.floats is not None:
        return floats(torch.randn(shape, generator=generator) * scale, kind)
    raw = torch.randint(
        256, (*shape[:-1], kind.row_bytes(shape[-1])), generator=generator, dtype=torch.uint8
    )
    blocks = raw.view(-1, kind.nbytes)
    if kind.name == "MXFP4":
        blocks[:, 0] = 118 + blocks[:, 0] % 8
        return Stored(kind, raw)
    for place in kind.scales:
        halves = torch.randn((len(blocks), 1), generator=generator) * scale / 8
        blocks[:, place : place + 2] = halves.half().view(torch.uint8)
    return Stored(kind, raw)


def write_gguf(
    file: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    version: int = 3,
) -> Path:
    """Write a file; integers become uint32 (int32 in lists or where negative), floats
    float32."""
    head = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    head += [_text(key) + _value(value) for key, value in metadata.items()]
    offset, data = 0, []
    for name, stored in tensors.items():
        shape = stored.shape[::-1]
        head.append(_text(name) + struct.pack("<I", len(shape)) + _numbers("Q", shape))
        head.append(struct.pack("<IQ", stored.kind.number, offset))
        data.append(_padded(stored.raw.numpy().tobytes()))
        offset += len(data[-1])
    file.write_bytes(_padded(b"".join(head)) + b"".join(data))
    return file


def write_split(
    folder: Path, stem: str, metadata: Mapping[str, Any], tensors: Mapping[str, Stored], parts: int
) -> list[Path]:
    """Write a split file, the first part with the metadata and each with some of the tensors."""
    files = []
    for index in range(parts):
        own = {"split.no": index, "split.count": parts, **(metadata if index == 0 else {})}
        some = dict(list(tensors.items())[index::parts])
        files.append(folder / f"{stem}-{index + 1:05}-of-{parts:05}.gguf")
        write_gguf(files[-1], own, some)
    return files


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % ALIGNMENT)


def _text(value: str) -> bytes:
    content = value.encode()
    return struct.pack("<Q", len(content)) + content


def _numbers(letter: str, values: Any) -> bytes:
    return struct.pack(f"<{len(values)}{letter}", *values)


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        return struct.pack("<I", 9) + _list(value)
    number, content = _typed(value)
    return struct.pack("<I", number) + content


def _list(values: list[Any]) -> bytes:
    if all(type(value) is int for value in values):
        return struct.pack("<IQ", 5, len(values)) + _numbers("i", values)
    head = struct.pack("<IQ", _typed(values[0])[0], len(values))
    return head + b"".join(_typed(value)[1] for value in values)


def _typed(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return (5, struct.pack("<i", value)) if value < 0 else (4, struct.pack("<I", value))
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    assert isinstance(value, str), value
    return 8, _text(value)
