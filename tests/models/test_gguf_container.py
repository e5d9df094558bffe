"""Headers of GGUF files: what is there is read, and what is damaged is refused in a sentence."""

import random
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch

from slipstream.core.errors import CheckpointError
from slipstream.models.gguf.blocks import BF16, F32, MXFP4, Q4_0, Q6_K
from slipstream.models.gguf.container import read_container
from slipstream.models.gguf.files import split_paths
from tests.gguf_files import Stored, random_blocks, write_gguf, write_split

METADATA = {
    "general.architecture": "llama",
    "an.integer": 7,
    "a.negative": -7,
    "a.number": 0.5,
    "a.truth": True,
    "texts": ["a", "", "日本"],
    "numbers": [1.5, -2.0],
    "empty": [],
}


def tensors() -> dict[str, Stored]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": random_blocks(Q4_0, (3, 64), generator),
        "b.weight": random_blocks(F32, (5,), generator),
        "c.weight": random_blocks(Q6_K, (2, 256), generator),
        "d.weight": random_blocks(MXFP4, (2, 3, 32), generator),
        "e.weight": random_blocks(BF16, (4, 6), generator),
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", METADATA, tensors())


def replaced(file: Path, old: bytes, new: bytes) -> Path:
    content = file.read_bytes()
    assert content.count(old) == 1
    file.write_bytes(content.replace(old, new))
    return file


@pytest.mark.parametrize("version", [2, 3])
def test_what_is_written_is_read(tmp_path: Path, version: int) -> None:
    file = write_gguf(tmp_path / "model.gguf", METADATA, tensors(), version)
    found = read_container(file)
    assert found.metadata == METADATA
    assert found.path == file
    content = file.read_bytes()
    for name, stored in tensors().items():
        tensor = found.tensors[name]
        assert (tensor.kind, tensor.shape, tensor.nbytes) == (
            stored.kind,
            stored.shape,
            stored.raw.numel(),
        )
        own = content[tensor.offset : tensor.offset + tensor.nbytes]
        assert own == stored.raw.numpy().tobytes()
    assert read_container(file) is found  # not read again


def test_a_file_that_changes_is_read_again(file: Path) -> None:
    assert "an.integer" in read_container(file).metadata
    write_gguf(file, {"other": 1}, {})
    assert read_container(file).metadata == {"other": 1}


def test_all_parts_of_a_split_file_are_read(tmp_path: Path) -> None:
    files = write_split(tmp_path, "model", METADATA, tensors(), 3)
    assert split_paths(files[1]) == files
    found = read_container(files[0])
    assert found.tensors.keys() == tensors().keys()
    assert found.tensors["b.weight"].file == files[1]
    assert found.metadata["a.number"] == 0.5

    write_gguf(files[1], {"split.no": 1}, tensors())
    with pytest.raises(
        CheckpointError, match=r"00002-of-00003.gguf has tensor a.weight, as an earlier"
    ):
        read_container(files[0])
    write_gguf(files[1], {"split.no": 2}, {})
    with pytest.raises(CheckpointError, match="is not the part that its name tells"):
        read_container(files[0])
    files[1].unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00003.gguf; all 3 parts .*"):
        read_container(files[0])
    renamed = files[0].rename(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="is one of 3 parts by its header"):
        read_container(renamed)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"GGUF", b"GGML", "is no GGUF file"),
        (b"GGUF\3\0", b"GGUF\1\0", "has version 1 of the GGUF format; only 2 and 3 are read"),
        (b"GGUF\3\0\0\0", b"GGUF\0\0\0\3", "for big-endian machines"),
        (struct.pack("<QQ", 5, 8), struct.pack("<QQ", 1 << 60, 8), r"is truncated: \d+ tensors"),
        (struct.pack("<QQ", 5, 8), struct.pack("<QQ", 5, 1 << 60), r"truncated: \d+ pairs"),
        (b"an.integer\4", b"an.integer\x63", "an.integer has a value of the type 99"),
        (b"texts\x09\0\0\0\x08", b"texts\x09\0\0\0\x09", "texts has a value of the type 9"),
        (b"an.integer", b"a.negative", "has the key 'a.negative' twice"),
        (b"an.integer", b"an.intege\xff", "a key of its metadata is no text in UTF-8"),
        (b"c.weight", b"a.weight", "describes tensor a.weight twice"),
        (b"c.weight\2", b"c.weight\0", "tensor c.weight .* has 0 dimensions"),
        (b"c.weight\2", b"c.weight\5", "tensor c.weight .* has 5 dimensions"),
        (
            b"c.weight\2\0\0\0\0\1\0",
            b"c.weight\2\0\0\0\x20\1\0",
            "rows of 288 numbers, which are no whole blocks of Q6_K",
        ),
        (
            b"c.weight\2\0\0\0\0\1\0\0\0\0\0\0\2",
            b"c.weight\2\0\0\0\0\1\0\0\0\0\0\0\0",
            r"has the shape \[0, 256\]",
        ),
        (
            b"c.weight\2\0\0\0\0\1\0\0\0\0\0\0\2\0\0\0\0\0\0\0",
            b"c.weight\2\0\0\0\0\1\0\0\0\0\0\0\2\0\0\0\0\0\0\xff",
            "is truncated: tensor c.weight ends at byte",
        ),
        (
            struct.pack("<IQ", 14, 160),
            struct.pack("<IQ", 14, 128),
            "tensor c.weight .* overlaps tensor b.weight",
        ),
        (
            struct.pack("<IQ", 14, 160),
            struct.pack("<IQ", 14, 1 << 63),
            "leaves a gap after tensor b.weight",
        ),
        (
            struct.pack("<IQ", 14, 160),
            struct.pack("<IQ", 10, 160),
            "tensor c.weight .* is of the type Q2_K; supported are F32, .* such as Q4_K_M",
        ),
        (struct.pack("<IQ", 14, 160), struct.pack("<IQ", 77, 160), "of the type number 77"),
    ],
)
def test_what_is_damaged_is_said(file: Path, old: bytes, new: bytes, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_container(replaced(file, old, new))


def test_alignment_and_the_end(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    for value in (0, 7, 24, 1 << 20, "32"):
        write_gguf(file, {"general.alignment": value}, {})
        with pytest.raises(CheckpointError, match="alignment must be a power of two"):
            read_container(file)
    write_gguf(file, {"general.alignment": 64}, {})
    assert read_container(file).tensors == {}
    write_gguf(file, METADATA, tensors())
    whole = read_container(file).tensors
    file.write_bytes(file.read_bytes() + bytes(39))
    assert read_container(file).tensors == whole
    file.write_bytes(file.read_bytes() + b"a")
    with pytest.raises(CheckpointError, match=r"has 40 bytes after tensor e.weight, its last part"):
        read_container(file)


def test_a_header_ends_before_it_fills_the_memory(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.models.gguf.header._MAX_BYTES", 64)
    with pytest.raises(CheckpointError, match="has a header of more than 0 MiB"):
        read_container(file)


def test_no_damage_raises_anything_else(file: Path) -> None:
    """Bytes that are changed, cut out or doubled at random, most of them in the header."""
    whole, chance = file.read_bytes(), random.Random(3)
    header = read_container(file).tensors["a.weight"].offset
    refused = most = 0
    tracemalloc.start()
    for index in range(800):
        content = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            place = chance.randrange(min(header, len(content)))
            kind = chance.randrange(5)
            if kind == 0:
                content[place] ^= 1 << chance.randrange(8)
            elif kind == 1:
                content[place : place + 8] = chance.choice((b"\xff" * 8, bytes(8), b"\0\0\0\1" * 2))
            elif kind == 2:
                del content[1 + chance.randrange(len(whole)) :]
            elif kind == 3:
                del content[place + 1 : place + chance.randrange(9)]
            else:
                content[place:place] = content[place : place + chance.randrange(9)]
        damaged = file.with_name(f"{index}.gguf")  # a new name, so that none is remembered
        damaged.write_bytes(content)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]  # with earlier errors that nobody collected yet
        try:
            read_container(damaged)
        except CheckpointError:
            refused += 1
        most = max(most, tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    assert refused > 500
    assert most < 4 << 20
